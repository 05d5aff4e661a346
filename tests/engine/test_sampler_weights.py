"""Weights by name: several in one batch, switched while sampling, kept and forgotten."""

import shutil

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from trimtab.engine.checkpoint import write
from trimtab.engine.decoding import grouped, runs
from trimtab.engine.weights import WeightsShelf
from trimtab.errors import Invalid, NotFound
from trimtab.types import WeightsRef

from .reference import plain
from .sampling import (
    draw,
    gap,
    random_adapter,
    request,
    same,
    sampling,
    save_adapter,
    step,
    submit,
    tokens,
)


def test_adapters_decode_in_one_batch_as_each_would_alone(base, tmp_path):
    prompts = [tokens(n, n) for n in (3, 20, 9, 14, 5, 5)]
    names = ["a", "base", "b", "a", "b", "base"]
    folders = {n: save_adapter(base, tmp_path / n, seed=i) for i, n in enumerate("ab")}
    models = {n: plain(base.info.path, folders.get(n)) for n in ("a", "b", "base")}
    requests = [request(p, 2, max_tokens=6 + 2 * i, seed=i) for i, p in enumerate(prompts)]
    with sampling(base) as together, sampling(base) as alone:
        for sampler in (together, alone):
            for name, folder in folders.items():
                sampler.publish(name, WeightsRef(name, base.info.name, folder))
        futures = [submit(together, r, n, head_k=4) for r, n in zip(requests, names, strict=True)]
        for r, name, future in zip(requests, names, futures, strict=True):
            single = draw(alone, r, name)
            for sequence, expected in zip(
                future.result(60).sequences, single.sequences, strict=True
            ):
                assert same(sequence, expected)
                assert sequence.versions == ((name, len(sequence.tokens)),)
                assert gap(models[name], r.prompt, sequence) < 1e-4
    assert gap(models["base"], prompts[0], futures[0].result().sequences[0]) > 0.05


def test_rows_of_an_adapter_stand_together():
    a, b = object(), object()
    adapters = [b, a, None, b, a]
    order = grouped(adapters)
    assert order == [0, 3, 1, 4, 2]
    assert runs([adapters[i] for i in order]) == [(b, 0, 2), (a, 2, 4), (None, 4, 5)]


def switched_logprobs(before, after, prompt, sequence, at):
    """Plain transformers on one kept cache: tokens from `at` on drawn under `after`."""
    ids = torch.tensor([*prompt.tolist(), *sequence.tokens.tolist()])[None]
    cut = len(prompt) - 1 + at  # the token fed at this position is the first under `after`
    with torch.no_grad():
        cache = DynamicCache(config=before.config)
        first = before(input_ids=ids[:, :cut], cache=cache)
        rest = after(input_ids=ids[:, cut:-1], cache=cache)
    full = torch.cat([first.logits[0], rest.logits[0]])[len(prompt) - 1 :].log_softmax(-1)
    return full.gather(1, torch.tensor(sequence.tokens).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_publishing_switches_at_the_next_step_and_keeps_the_cache(base_of, tmp_path, architecture):
    base = base_of(architecture)
    folders = [save_adapter(base, tmp_path / f"{i}", seed=i) for i in (1, 2)]
    before, after = (plain(base.info.path, f) for f in folders)
    prompt = tokens(7)
    with sampling(base, run=False) as sampler:
        sampler.publish("live", WeightsRef("v1", base.info.name, folders[0]))
        sampler.publish("fixed", WeightsRef("v1", base.info.name, folders[0]))
        live = submit(sampler, request(prompt, 2, max_tokens=12), "live", head_k=3)
        fixed = submit(sampler, request(prompt, 2, max_tokens=12), "fixed")
        step(sampler, 5)
        sampler.publish("live", WeightsRef("v2", base.info.name, folders[1]))
        sampler.retire("live")
        step(sampler, 8)
    for sequence in live.result(0).sequences:
        assert sequence.versions == (("v1", 5), ("v2", 7))
        expected = switched_logprobs(before, after, prompt, sequence, at=5)
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
        assert gap(before, prompt, sequence) > 0.02 and gap(after, prompt, sequence) > 0.02
        at_head = np.where(sequence.head.ids == sequence.tokens[:, None], sequence.head.logprobs, 0)
        own = at_head.sum(1)
        np.testing.assert_allclose(own[own != 0], sequence.logprobs[own != 0], atol=1e-6)
    for sequence in fixed.result(0).sequences:
        assert sequence.versions == (("v1", 12),)
        assert gap(before, prompt, sequence) < 1e-4


def test_an_unreadable_folder_fails_publish_and_leaves_the_target(llama, tmp_path):
    good = save_adapter(llama, tmp_path / "good", seed=1)
    with sampling(llama) as sampler:
        sampler.publish("t", WeightsRef("v1", "llama", good))
        with pytest.raises(NotFound):
            sampler.publish("t", WeightsRef("v2", "llama", tmp_path / "nowhere"))
        write(tmp_path / "other", "another", random_adapter(llama, 1), steps=0)
        with pytest.raises(Invalid, match="another"):
            sampler.publish("t", WeightsRef("v3", "llama", tmp_path / "other"))
        assert draw(sampler, request(tokens(3), max_tokens=2), "t").sequences[0].versions == (
            ("v1", 2),
        )
        with pytest.raises(NotFound, match="'nobody'"):
            submit(sampler, request(tokens(3)), "nobody")
        sampler.retire("t")
        with pytest.raises(NotFound, match="'t'"):
            submit(sampler, request(tokens(3)), "t")


def test_a_version_is_read_once_and_an_evicted_one_again_or_its_request_fails(llama, tmp_path):
    folders = [save_adapter(llama, tmp_path / f"{i}", seed=i) for i in range(3)]
    with sampling(llama, adapters=2) as sampler:
        reads = []
        read = sampler._shelf._read
        sampler._shelf._read = lambda path: reads.append(path.name) or read(path)
        for i, folder in enumerate(folders):
            sampler.publish(f"t{i}", WeightsRef(f"v{i}", "llama", folder))
            sampler.publish(f"again{i}", WeightsRef(f"v{i}", "llama", folder))
        assert reads == ["0", "1", "2"]
        draw(sampler, request(tokens(3), max_tokens=2), "t2")
        assert reads == ["0", "1", "2"]
        draw(sampler, request(tokens(3), max_tokens=2), "t0")
        assert reads == ["0", "1", "2", "0"]
        shutil.rmtree(folders[1])
        lost = submit(sampler, request(tokens(3), max_tokens=2), "t1")
        with pytest.raises(NotFound):
            lost.result(60)
        assert sampler._loop.memory.reserved == 0
        draw(sampler, request(tokens(3), max_tokens=2), "t2")


def test_a_target_between_publish_and_hold_means_the_newest(tmp_path):
    shelf = WeightsShelf(lambda path: path.name, keep=1)
    shelf.publish("t", WeightsRef("v1", "m", tmp_path / "a"))
    target = shelf.find("t")
    shelf.publish("t", WeightsRef("v2", "m", tmp_path / "b"))
    assert target.weights is None  # nothing is kept for a target that nobody uses
    assert shelf.hold(target).version == "v2"
    held = shelf.hold(target)
    shelf.publish("t", WeightsRef("v3", "m", tmp_path / "c"))
    assert held.version == "v2" and target.weights.version == "v3"
    shelf.release(target)
    shelf.release(target)
    assert target.weights is None
