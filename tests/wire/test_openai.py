"""OpenAI's client against a whole server: the same tokens as the SDK's, as text."""

import re
import time
from pathlib import Path

import httpx
import openai
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from trimtab import tiny
from trimtab.engine.text import TokenizerText
from trimtab.wire.app import OPENAI, OPENAI_BASE
from trimtab.wire.openai_text import TORN, Cut, Piece, Pieces

from .live import MODEL, connected, prompt, serving

WORDS = "the cat sat on"


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(
        api_key=shared.alice, base_url=shared.url + OPENAI_BASE, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def words(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def drawn(shared, alices, words):
    """What the SDK draws from alice's checkpoint: a function of prompt ids and parameters."""
    with connected(shared.server, shared.alice) as service:
        sampling = service.create_sampling_client(model_path=alices.sampler).result()

        def draw(ids, n=1, **options):
            params = tinker.SamplingParams(**options)
            return sampling.sample(prompt(*ids), n, params).result().sequences

        yield draw


def shown(words, tokens):
    return words.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ------------------------------------------------------------------ text as it comes


@pytest.fixture(scope="module")
def text(words):
    return TokenizerText(words)


def spoken(text, before, tokens):
    pieces = Pieces(text, before)
    found = [piece for t in tokens for piece in pieces.add(t, shown=t not in text.special)]
    return [piece.text for piece in found if piece.shown], pieces.rest()


@given(st.text(min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_pieces_of_text_are_whole_characters_and_add_up(text, said):
    tokens = text.encode(said)
    pieces, rest = spoken(text, text.encode("so "), tokens)
    assert "".join(pieces) + rest == said
    if TORN not in said:
        assert not any(TORN in piece for piece in pieces) and not rest


@given(st.lists(st.integers(0, 319), max_size=150))
@settings(max_examples=60, deadline=None)
def test_any_tokens_come_out_as_text(text, tokens):
    """Torn bytes too, in whatever form; what is whole in one piece is in the sum."""
    pieces, rest = spoken(text, (), tokens)
    whole = text.decode([t for t in tokens if t not in text.special])
    assert re.sub(TORN, "", "".join(pieces) + rest).count("a") == whole.count("a")


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_text_is_cut_before_the_first_stop_string_however_it_comes(said, stops):
    at = min((said.index(stop) for stop in stops if stop in said), default=len(said))
    for step in (1, 2, 5):
        cut = Cut(stops)
        out = [cut.add([Piece(said[i : i + step])]) for i in range(0, len(said), step)]
        out.append(cut.add([], last=True))
        # Two may overlap: of those that are complete with the same piece, the first begins it.
        ends = [said.index(stop) + len(stop) for stop in stops if stop in said]
        seen = said[: -(-min(ends, default=len(said)) // step) * step]
        first = min((seen.index(stop) for stop in stops if stop in seen), default=at)
        assert "".join(out) == said[:first]
        assert cut.found == any(stop in said for stop in stops)


def test_markup_is_seen_by_stop_strings_and_not_shown():
    cut = Cut(["b<x>"])
    assert cut.add([Piece("ab"), Piece("<y>", shown=False), Piece("c")]) == "abc"
    assert cut.add([Piece("ab")]) == "a"
    assert cut.add([Piece("<x>", shown=False), Piece("d")]) == "" and cut.found


# ------------------------------------------------------------------ completions


def test_a_completion_is_what_the_sdk_draws(client, alices, words, drawn):
    ids = words.encode(WORDS)
    (greedy,) = drawn(ids, max_tokens=12, temperature=0.0)
    found = client.completions.create(
        model=alices.sampler, prompt=WORDS, max_tokens=12, temperature=0
    )
    assert found.choices[0].text == shown(words, greedy.tokens)
    assert found.choices[0].finish_reason == greedy.stop_reason
    assert found.usage.prompt_tokens == len(ids)
    assert found.usage.completion_tokens == len(greedy.tokens)
    base = client.completions.create(model=MODEL, prompt=WORDS, max_tokens=12, temperature=0)
    assert base.choices[0].text != found.choices[0].text, "the checkpoint is not the base model"


def test_seeds_several_prompts_and_several_samples(client, alices, words, drawn):
    prompts = [words.encode(WORDS), words.encode("two and")]
    options = {"max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "seed": 5}
    expected = [sequence for ids in prompts for sequence in drawn(ids, 3, **options)]
    found = client.completions.create(model=alices.sampler, prompt=prompts, n=3, **options)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert [choice.text for choice in found.choices] == [
        shown(words, sequence.tokens) for sequence in expected
    ]
    assert found.usage.prompt_tokens == sum(map(len, prompts))


def test_logprobs_are_the_sdks_and_text_offsets_lead_to_the_tokens(client, alices, words, drawn):
    (sequence,) = drawn(words.encode(WORDS), max_tokens=10, seed=3, temperature=0.5)
    found = client.completions.create(
        model=alices.sampler, prompt=WORDS, max_tokens=10, seed=3, temperature=0.5, logprobs=4
    ).choices[0]
    told = found.logprobs
    assert told.token_logprobs == pytest.approx(list(sequence.logprobs), abs=1e-5)
    assert [len(each) in (4, 5) for each in told.top_logprobs] == [True] * len(sequence.tokens)
    for token, logprob, offset, top in zip(
        told.tokens, told.token_logprobs, told.text_offset, told.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob, abs=1e-5)
        assert token.startswith("token_id:") or found.text[offset:].startswith(token)


def test_stop_strings_end_the_text_and_are_not_in_it(client, alices, words, drawn):
    (greedy,) = drawn(words.encode(WORDS), max_tokens=40, temperature=0.0)
    text = shown(words, greedy.tokens)
    stop = next(c for c in text[4:] if c.isalpha() and c not in text[:4])
    for stream in (False, True):
        found = client.completions.create(
            model=alices.sampler, prompt=WORDS, max_tokens=40, temperature=0, stop=[stop, "@@"],
            stream=stream,
        )  # fmt: skip
        chunks = list(found) if stream else [found]
        assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


# ------------------------------------------------------------------ chat


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_chat_uses_the_models_template(client, alices, words, drawn):
    ids = words.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    (greedy,) = drawn(ids, max_tokens=8, temperature=0.0)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for messages in (MESSAGES, [MESSAGES[0], {"role": "user", "content": parts}]):
        found = client.chat.completions.create(
            model=alices.sampler, messages=messages, max_completion_tokens=8, temperature=0,
            logprobs=True, top_logprobs=2,
        )  # fmt: skip
        message, told = found.choices[0].message, found.choices[0].logprobs.content
        assert (message.role, message.content) == ("assistant", shown(words, greedy.tokens))
        assert [each.logprob for each in told] == pytest.approx(list(greedy.logprobs), abs=1e-5)
        assert found.usage.prompt_tokens == len(ids)
        for each in told:
            best = each.top_logprobs[0]
            assert len(each.top_logprobs) == 2 and best.token == each.token, "greedy"
            assert best.bytes is None or bytes(best.bytes).decode() == best.token
    # An answer goes back into the conversation as it came.
    longer = [*MESSAGES, message.model_dump(), {"role": "user", "content": "more"}]
    client.chat.completions.create(model=alices.sampler, messages=longer, max_tokens=1)


def test_a_stream_adds_up_to_the_whole_and_counts(client, alices):
    options = {
        "model": alices.sampler, "messages": MESSAGES, "max_tokens": 24, "seed": 7, "n": 2,
        "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        told = [each for c in mine if c.logprobs for each in c.logprobs.content]
        assert told == choice.logprobs.content
    assert len({c.id for c in chunks}) == 1


# ------------------------------------------------------------------ streams are real


def endless(folder):
    """A model slow enough to be met at work, whose greedy answers never end by themselves."""
    tiny.build(folder, hidden=256, layers=8, context=4096)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0] = 0.0  # <|endoftext|>; among 320 logits one is above 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    folder, data_dir = endless(tmp_path_factory.mktemp("slow") / "m"), tmp_path_factory.mktemp("d")
    with serving(model=(f"{MODEL}={folder}",), data_dir=data_dir, max_pending_samples=2) as server:
        yield server


def test_tokens_arrive_while_later_ones_are_not_yet_drawn_and_leaving_stops_them(slow):
    """No queue beyond two requests: a third is told to wait until the client of one has left."""
    with openai.OpenAI(api_key="tml-x", base_url=slow.url + OPENAI_BASE, max_retries=0) as client:
        ask = {"model": MODEL, "prompt": WORDS, "max_tokens": 4000, "temperature": 0}
        one, two = (client.completions.create(**ask, stream=True) for _ in range(2))
        started = time.monotonic()
        assert next(iter(one)) and next(iter(two))
        assert time.monotonic() - started < 5
        with pytest.raises(openai.RateLimitError, match="2 sample requests are waiting"):
            client.completions.create(**ask)
        one.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                client.completions.create(**(ask | {"max_tokens": 1}))
                break
            except openai.RateLimitError:
                assert time.monotonic() < deadline, "its client left, and it still runs"
                time.sleep(0.05)
        two.close()


def test_a_server_that_stops_says_so_in_the_stream(slow_to_stop):
    with openai.OpenAI(api_key="tml-x", base_url=slow_to_stop.url + OPENAI_BASE) as client:
        stream = client.completions.create(
            model=MODEL, prompt=WORDS, max_tokens=4000, temperature=0, stream=True
        )
        next(iter(stream))
        slow_to_stop.stop()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)


@pytest.fixture
def slow_to_stop(tmp_path):
    folder = endless(tmp_path / "m")
    with serving(model=(f"{MODEL}={folder}",), data_dir=tmp_path / "data") as server:
        yield server


# ------------------------------------------------------------------ models, keys, counts, refusals


def test_models_are_base_models_and_ones_own_checkpoints(client, shared, alices):
    assert {MODEL, alices.sampler} <= {model.id for model in client.models.list()}
    found = client.models.retrieve(alices.sampler)
    assert found.id == alices.sampler and abs(found.created - time.time()) < 600
    with openai.OpenAI(api_key=shared.bob, base_url=shared.url + OPENAI_BASE) as bob:
        assert alices.sampler not in {model.id for model in bob.models.list()}


def test_what_is_drawn_is_counted(client, shared, alices):
    def counted():
        hour = time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(time.time() - 3600))
        until = time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(time.time() + 3600))
        admin = tinker.AdminClient(base_url=shared.url, api_key=shared.alice)
        found = admin.get_billing_usage(hour, until).result().data
        mine = [event.event_info for event in found if event.session_id == "openai"]
        return {
            kind: sum(info.token_count for info in mine if info.type == kind)
            for kind in ("sampling_prefill", "sampling_sample")
        }

    before = counted()
    used = client.completions.create(model=MODEL, prompt=WORDS, n=2, max_tokens=5).usage
    stream = client.completions.create(model=MODEL, prompt=WORDS, max_tokens=5, stream=True)
    streamed = len(list(stream))
    after = counted()
    assert after["sampling_prefill"] - before["sampling_prefill"] == 2 * used.prompt_tokens
    assert after["sampling_sample"] - before["sampling_sample"] >= used.completion_tokens + 1
    assert streamed >= 1


REFUSED = [
    ({"frequency_penalty": 0.5}, "frequency_penalty: not offered; leave it out or give 0"),
    ({"logit_bias": {"5": 1}}, "logit_bias: not offered"),
    ({"user": "me"}, "user: not offered"),
    ({"extra_body": {"min_p": 0.1}}, "min_p: not offered"),
    ({"echo": True}, "echo: not offered"),
    ({"best_of": 3}, "best_of: not offered"),
    ({"n": 0}, "n: 0 is outside 1"),
    ({"max_tokens": 0}, "max_tokens: 0 is outside 1"),
    ({"temperature": -1}, "temperature is -1.0"),
    ({"top_p": 0}, "top_p is 0"),
    ({"logprobs": 21}, "logprobs: 21 is outside 0 to 20"),
    ({"stop": [""]}, "stop has an empty string"),
    ({"stop": ["x"] * 17}, "stop: 17 strings"),
    ({"prompt": ""}, "prompt: empty"),
    ({"prompt": [[1, 2], 3]}, r"prompt\[1\]: text or a list of token ids is required"),
    ({"prompt": [999]}, r"prompt\[0\] is 999"),
    ({"prompt": "a " * 600}, "prompt has .* tokens; the context"),
    ({"stream_options": {"include_usage": True}}, "stream_options: given, but stream"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=[t for _, t in REFUSED])
def test_what_is_not_honoured_is_refused_by_name(client, options, told):
    with pytest.raises(openai.BadRequestError, match=told):
        client.completions.create(**({"model": MODEL, "prompt": WORDS} | options))


CHAT_REFUSED = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: not offered"),
    ({"response_format": {"type": "json_object"}}, "response_format: not offered"),
    ({"reasoning_effort": "low"}, "reasoning_effort: not offered"),
    ({"top_logprobs": 2}, "top_logprobs: given, but logprobs is not true"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens: 2, but max_completion_tokens"),
    ({"messages": []}, "messages: empty"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "name: not offered"),
    ({"messages": [{"role": "user"}]}, "content: text or a list of text parts is required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "content.0..type: 'image_url' is not offered",
    ),
]


@pytest.mark.parametrize(("options", "told"), CHAT_REFUSED, ids=[t for _, t in CHAT_REFUSED])
def test_a_chats_options_are_refused_by_name_too(client, options, told):
    with pytest.raises(openai.BadRequestError, match=told):
        client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))


def test_options_that_ask_for_nothing_are_taken(client):
    client.completions.create(
        model=MODEL, prompt=WORDS, max_tokens=1, frequency_penalty=0, presence_penalty=0.0,
        logit_bias={}, echo=False, best_of=1, suffix=None, user=None, stop=[],
    )  # fmt: skip
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, tools=[], store=False,
        response_format={"type": "text"},
    )  # fmt: skip


def test_unknown_models_and_keys(client, shared, alices):
    with pytest.raises(openai.NotFoundError, match="is not served here; allowed are org/tiny"):
        client.completions.create(model="gpt", prompt=WORDS)
    with pytest.raises(openai.BadRequestError, match="names weights; here only sampler_weights"):
        client.completions.create(model=alices.weights, prompt=WORDS)
    base = shared.url + OPENAI_BASE
    with (
        openai.OpenAI(api_key="tml-wrong", base_url=base) as wrong,
        pytest.raises(openai.AuthenticationError, match="Authorization: Bearer: this server"),
    ):
        wrong.models.list()
    body = {"model": MODEL, "prompt": WORDS}
    keyless = httpx.post(f"{base}/completions", json=body, headers={"X-API-Key": shared.alice})
    assert keyless.status_code == 401
    assert keyless.json()["error"]["type"] == "authentication_error"


def test_open_servers_take_any_key_that_starts_like_one(slow):
    for key, status in (("tml-any", 200), ("sk-x", 401)):
        found = httpx.get(
            f"{slow.url}{OPENAI_BASE}/models", headers={"Authorization": f"Bearer {key}"}
        )
        assert found.status_code == status


def test_a_model_without_a_chat_template_is_told(tmp_path):
    folder = tiny.build(tmp_path / "m", tokenizer="characters")
    plain = TokenizerText(AutoTokenizer.from_pretrained(folder))
    with pytest.raises(ValueError, match="no chat template"):
        plain.chat([{"role": "user", "content": "hi"}])


def test_the_docs_name_each_route():
    page = Path("docs/openai.md").read_text()
    rows = re.findall(r"^\| `(GET|POST) (/oai/api/v1\S+)`", page, re.M)
    assert rows == [(route.method, OPENAI_BASE + route.path) for route in OPENAI]
