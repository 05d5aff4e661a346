"""Joining, waiting, leaving: admission, cancellation, bounds, stopping, contained failures."""

import threading
import time

import numpy as np
import pytest

from trimtab.errors import Busy, Invalid, ServerError, Stopping
from trimtab.types import WeightsRef

from .reference import plain
from .sampling import draw, gap, random_adapter, request, same, sampling, step, submit, tokens

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


def memory_of(sampler):
    return sampler._loop.memory


def placed(sampler):
    return sum(len(group.rows.owners) for group in sampler._loop.memory.groups.values())


def test_a_prompt_is_computed_once_for_all_samples_and_rows_decode_together(llama, monkeypatch):
    with sampling(llama, run=False) as sampler:
        passes = []
        plain_hidden = sampler._net.hidden
        monkeypatch.setattr(
            sampler._net, "hidden", lambda t, *rest: passes.append(len(t)) or plain_hidden(t, *rest)
        )
        futures = [submit(sampler, request(tokens(11), 4, max_tokens=3))]
        step(sampler)
        futures.append(submit(sampler, request(tokens(6), 2, max_tokens=3)))
        step(sampler, 4)
        assert all(f.done() for f in futures)
    assert passes == [10, 4, 5, 6, 6, 2]  # prefill, decode, prefill, decode, decode, decode


def test_a_long_prompt_does_not_hold_up_rows_that_decode(llama):
    with sampling(llama, run=False, prefill_tokens=5) as sampler:
        short = submit(sampler, request(tokens(2), max_tokens=8))
        step(sampler)
        long = submit(sampler, request(tokens(50), max_tokens=2))
        step(sampler, 7)
        assert short.done() and not long.done()  # 49 tokens take 10 steps of 5
        step(sampler, 4)
        assert long.done()


def test_more_rows_than_allowed_wait_and_all_finish_in_order(llama):
    model = plain(llama.info.path)
    prompt = tokens(9)
    with sampling(llama, run=False, rows=3) as sampler:
        first = submit(sampler, request(prompt, 8, max_tokens=4))
        second = submit(sampler, request(prompt, 1, max_tokens=1))
        step(sampler)
        assert placed(sampler) == 3 and not second.done()
        for _ in range(40):
            step(sampler)
            assert placed(sampler) <= 3
        result = first.result(0)
        assert second.done() and memory_of(sampler).reserved == 0
        alone = submit(sampler, request(prompt, 8, max_tokens=4, seed=0))
        sampler.start()
        assert all(map(same, result.sequences, alone.result(60).sequences))
    assert max(gap(model, prompt, s) for s in result.sequences) < 1e-4


def test_memory_stays_within_its_budget_and_comes_back(llama):
    places = 300  # two prompts of 32 places and seven rows of 32
    with sampling(llama, run=False, kv_bytes=places * TOKEN_BYTES) as sampler:
        futures = [
            submit(sampler, request(tokens(5 + 5 * i, i), 3, max_tokens=6 + i)) for i in range(6)
        ]
        for _ in range(200):
            step(sampler)
            memory = memory_of(sampler)
            assert memory.allocated() <= places and memory.reserved <= places
        assert all(f.done() for f in futures)
        assert memory.allocated() == memory.reserved == 0 and not memory.groups


def test_a_request_that_can_never_fit_is_refused(llama):
    with sampling(llama, run=False, kv_bytes=90 * TOKEN_BYTES) as sampler:
        sampler.check(request(tokens(40), 9, max_tokens=20))
        with pytest.raises(Invalid, match=r"max_tokens \(9\) need memory for 96 .* keeps 90"):
            sampler.check(request(tokens(50), max_tokens=9))


def test_cancelling_before_and_while_it_runs_frees_its_rows(llama):
    prompt = tokens(7)
    with sampling(llama, run=False, rows=4) as sampler:
        running = submit(sampler, request(prompt, 3, max_tokens=50))
        other = submit(sampler, request(prompt, 1, max_tokens=20, seed=5))
        queued = submit(sampler, request(prompt, 2, max_tokens=50))
        step(sampler, 5)
        assert placed(sampler) == 4 and sampler._loop.waiting == 1
        assert running.cancel() and queued.cancel()
        step(sampler)
        assert placed(sampler) == 1 and sampler._loop.waiting == 0
        step(sampler, 20)
        found = other.result(0).sequences[0]
        assert memory_of(sampler).reserved == 0 and not sampler._loop.busy
        sampler.start()
        assert same(found, draw(sampler, request(prompt, 1, max_tokens=20, seed=5)).sequences[0])


def test_a_full_queue_is_busy_and_takes_more_later(llama):
    with sampling(llama, run=False, waiting=2, rows=1) as sampler:
        futures = [submit(sampler, request(tokens(3), max_tokens=2)) for _ in range(2)]
        with pytest.raises(Busy, match="2 sampling requests are waiting"):
            submit(sampler, request(tokens(3), max_tokens=2))
        step(sampler)
        futures.append(submit(sampler, request(tokens(3), max_tokens=2)))
        step(sampler, 8)
        assert all(f.done() for f in futures)


def test_stopping_ends_soon_and_fails_what_is_in_flight(llama):
    with sampling(llama, rows=2) as sampler:
        futures = [submit(sampler, request(tokens(3), 2)) for _ in range(50)]
        futures[0].result(60)
        started = time.perf_counter()
        sampler.stop()
        assert time.perf_counter() - started < 5
        unfinished = [f for f in futures if f.exception(0) is not None]
        assert unfinished and all(isinstance(f.exception(0), Stopping) for f in unfinished)
        with pytest.raises(Stopping):
            submit(sampler, request(tokens(3)))
    with sampling(llama, run=False) as sampler:
        never = submit(sampler, request(tokens(3)))
    assert isinstance(never.exception(0), Stopping)


def test_a_decode_step_that_fails_fails_its_requests_and_the_loop_goes_on(llama, monkeypatch):
    with sampling(llama, run=False) as sampler:
        plain_hidden = sampler._net.hidden
        broken = threading.Event()

        def hidden(*args):
            if broken.is_set():
                raise OSError("broken")
            return plain_hidden(*args)

        monkeypatch.setattr(sampler._net, "hidden", hidden)
        futures = [submit(sampler, request(tokens(3), 2, max_tokens=9)) for _ in range(2)]
        step(sampler, 2)
        broken.set()
        step(sampler)
        for future in futures:
            with pytest.raises(ServerError, match="decode step failed: OSError: broken"):
                future.result(0)
        prompt = submit(sampler, request(tokens(3)))
        step(sampler)
        with pytest.raises(ServerError, match="computing the prompt failed"):
            prompt.result(0)
        broken.clear()
        assert memory_of(sampler).reserved == 0 and not sampler._loop.busy
        later = submit(sampler, request(tokens(3), max_tokens=2))
        step(sampler, 3)
        assert later.done()


def test_a_tokenizer_that_fails_fails_one_request(llama, monkeypatch):
    with sampling(llama, run=False) as sampler:
        good = submit(sampler, request(tokens(3), max_tokens=4))
        bad = submit(
            sampler, request(tokens(3), 3, max_tokens=4, ignore_eos=False, stop_strings=("zz",))
        )
        job = sampler._inbox[1]
        monkeypatch.setattr(type(job.stops), "_completes", lambda *_: 1 / 0)
        step(sampler, 5)
        assert len(good.result(0).sequences[0].tokens) == 4
        with pytest.raises(ServerError, match="ZeroDivisionError"):
            bad.result(0)


def test_weights_that_are_not_numbers_fail_their_request_and_harm_no_other(llama, monkeypatch):
    adapter = random_adapter(llama, 1)
    for _, B in adapter.pairs.values():
        B.fill_(float("nan"))
    model = plain(llama.info.path)
    with sampling(llama, run=False) as sampler:
        monkeypatch.setattr(sampler._shelf, "_read", lambda _: adapter)
        sampler.publish("nan", WeightsRef("bad", "llama", llama.info.path))
        bad = submit(sampler, request(tokens(21), 4, max_tokens=30), "nan")
        good = submit(sampler, request(tokens(9), 4, max_tokens=30))
        step(sampler, 5)
        with pytest.raises(ServerError, match="'bad' gave a log-probability that is not a number"):
            bad.result(0)
        later = submit(sampler, request(tokens(25), 4, max_tokens=30))
        step(sampler, 40)
        assert len(sampler._loop.memory.groups) == 0
        for future, n in ((good, 9), (later, 25)):
            assert max(gap(model, tokens(n), s) for s in future.result(0).sequences) < 1e-4


def test_a_cancelled_prompt_leaves_nothing_that_is_no_number(llama, monkeypatch):
    """Cancelled before a step came upon it; a shorter prompt has its places next."""
    adapter = random_adapter(llama, 1)
    for _, B in adapter.pairs.values():
        B.fill_(float("nan"))
    model = plain(llama.info.path)
    with sampling(llama, run=False, prefill_tokens=24) as sampler:
        monkeypatch.setattr(sampler._shelf, "_read", lambda _: adapter)
        sampler.publish("nan", WeightsRef("bad", "llama", llama.info.path))
        sizes = (10, 18, 30)
        futures = [submit(sampler, request(tokens(10), max_tokens=30))]  # keeps the pool alive
        step(sampler, 2)
        bad = submit(sampler, request(tokens(30), max_tokens=30), "nan")
        step(sampler)
        assert bad.cancel()
        futures += [submit(sampler, request(tokens(n), max_tokens=30)) for n in sizes[1:]]
        step(sampler, 60)
        for future, n in zip(futures, sizes, strict=True):
            assert gap(model, tokens(n), future.result(0).sequences[0]) < 1e-4


def test_stops_end_a_sequence_with_their_token_and_its_logprob(llama):
    model = plain(llama.info.path)
    prompt = tokens(5)
    with sampling(llama) as sampler:
        free = draw(sampler, request(prompt, seed=3, max_tokens=20)).sequences[0]
        ids = free.tokens.tolist()
        fifth, at = ids[5], ids.index(ids[5])
        options = {"seed": 3, "ignore_eos": False, "stop_token_ids": (fifth,)}
        stopped = draw(sampler, request(prompt, max_tokens=20, **options)).sequences[0]
        exactly = draw(sampler, request(prompt, max_tokens=at + 1, **options)).sequences[0]
        before = draw(sampler, request(prompt, max_tokens=at, **options)).sequences[0]
    assert free.stop_reason == before.stop_reason == "length"
    assert stopped.stop_reason == exactly.stop_reason == "stop"
    assert stopped.tokens.tolist() == exactly.tokens.tolist() == ids[: at + 1]
    assert len(stopped.logprobs) == at + 1 and gap(model, prompt, stopped) < 1e-4
    assert before.tokens.tolist() == ids[:at]


def test_eos_and_strings_stop_in_the_sampler_and_the_empty_list_runs_on(llama):
    prompt = tokens(5)
    words = llama.tokenizer
    with sampling(llama) as sampler:
        free = draw(sampler, request(prompt, 400, seed=3, max_tokens=20)).sequences
        eos = llama.info.eos_token_ids[0]
        through = next(i for i, s in enumerate(free) if eos in s.tokens[:-1])
        ended = draw(
            sampler, request(prompt, 400, seed=3, max_tokens=20, ignore_eos=False)
        ).sequences[through]
        at = free[through].tokens.tolist().index(eos)
        assert ended.tokens.tolist() == free[through].tokens.tolist()[: at + 1]
        assert ended.stop_reason == "stop" and len(free[through].tokens) == 20

        text = words.decode(free[0].tokens.tolist(), skip_special_tokens=False)
        string = next(text[i : i + 3] for i in range(3, 20) if "\ufffd" not in text[i : i + 3])
        found = draw(
            sampler,
            request(prompt, seed=3, max_tokens=20, ignore_eos=False, stop_strings=(string,)),
        ).sequences[0]
    kept = words.decode(found.tokens.tolist(), skip_special_tokens=False)
    without_last = words.decode(found.tokens.tolist()[:-1], skip_special_tokens=False)
    assert found.stop_reason == "stop" and string in kept and string not in without_last
    assert found.tokens.tolist() == free[0].tokens.tolist()[: len(found.tokens)]


def test_no_max_tokens_and_too_many_run_to_the_context(llama):
    with sampling(llama) as sampler:
        for limit in (None, 10_000):
            sequence = draw(sampler, request(tokens(60), max_tokens=limit)).sequences[0]
            assert len(sequence.tokens) == 4 and sequence.stop_reason == "length"


def test_many_requests_at_once_all_finish(llama):
    rng = np.random.default_rng(0)
    with sampling(llama, rows=16) as sampler:
        sizes = [(int(rng.integers(1, 40)), int(rng.integers(1, 12))) for _ in range(120)]
        futures = [
            submit(sampler, request(tokens(p, p), 2, max_tokens=t, seed=p)) for p, t in sizes
        ]
        for future in futures[::7]:
            future.cancel()
        done = [f.result(60) for f in futures if not f.cancelled()]
    assert [len(r.sequences[1].tokens) for r in done] == [
        t for f, (_, t) in zip(futures, sizes, strict=True) if not f.cancelled()
    ]
