"""Each rule of the two tiers with its own words. Pure: records are given, nothing is stored.

The record: prompt 20 21 22, sampled 30 31 32 33. The datum of a whole sequence: input
20 21 22 30 31 32, targets 0 0 30 31 32 33 (dummy ids under the prompt, as recipes send them).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from trimtab.errors import Invalid
from trimtab.service import provenance
from trimtab.service.provenance import Registry
from trimtab.service.sequences import Record
from trimtab.types import Datum, PromptSpan, SampledSpan

ID, PLAIN, OTHER = "S:sample:0:0:0", "S:sample:0:1:0", "S:sample:0:2:0"
MODEL = "S:train:0"


def record(name=ID, *, prompt=(20, 21, 22), tokens=(30, 31, 32, 33), head=True, tau=1.0, k=3):
    n = len(tokens)
    return Record(
        name,
        np.asarray(prompt, np.int32),
        np.asarray(tokens, np.int32),
        tau,
        ((f"{MODEL}:3", 1, 5, MODEL), (f"{MODEL}:9", n - 1, 7, MODEL)),
        np.linspace(-1, -2, n).astype(np.float32) if head else None,
        np.arange(n * k, dtype=np.int32).reshape(n, k) if head else None,
        -np.arange(n * k, dtype=np.float32).reshape(n, k) if head else None,
    )


RECORDS = {ID: record(), PLAIN: record(PLAIN, head=False)}


def whole(name=ID, advantages=(0, 0, 1, 1, 1, 1), targets=(0, 0, 30, 31, 32, 33)):
    logprobs = np.zeros(6, np.float32)
    logprobs[2:] = RECORDS[ID].logprobs
    inputs = {
        "target_tokens": np.asarray(targets, np.int64),
        "logprobs": logprobs,
        "advantages": np.asarray(advantages, np.float32),
    }
    return Datum(
        np.asarray([20, 21, 22, 30, 31, 32], np.int32),
        inputs,
        (PromptSpan(name, 0, 3), SampledSpan(name, 0, 3)),
        (PromptSpan(name, 1, 2), SampledSpan(name, 0, 4)),
    )


def resolve(*data, strict=True, records=RECORDS, absent=None):
    loss = "stable_reinforce" if strict else None
    named = provenance.structure(data, needed=loss, longest_id=64, most=50_000)
    absent = dict.fromkeys(named - records.keys(), "unknown") | (absent or {})
    return provenance.resolve(
        data, Registry(records, absent, MODEL), loss=loss, head_k=8, tolerance=1e-3
    )


def refusal(*data, **options):
    with pytest.raises(Invalid) as caught:
        resolve(*data, **options)
    return caught.value.message


def with_inputs(datum, **arrays):
    return replace(datum, inputs={**datum.inputs, **arrays})


# --------------------------------------------------------------------------- what passes


def test_a_whole_sequence_is_laid_along_its_rows():
    (part,) = resolve(whole()).stability
    assert part.sequence_N.tolist() == [-1, -1, 0, 0, 0, 0]
    assert part.recorded_N.tolist() == [False, False, True, True, True, True]
    assert part.head_ids_NK.shape == (6, 3)
    np.testing.assert_array_equal(part.head_ids_NK[2:], RECORDS[ID].head_ids_TK)
    np.testing.assert_array_equal(part.head_logprobs_NK[2:], RECORDS[ID].head_logprobs_TK)
    assert np.isneginf(part.head_logprobs_NK[:2]).all()
    np.testing.assert_array_equal(part.logprobs_N[2:], RECORDS[ID].logprobs)
    assert np.isnan(part.logprobs_N[:2]).all()
    np.testing.assert_array_equal(part.version_step_N, np.float32([np.nan, np.nan, 5, 7, 7, 7]))
    assert part.temperature_N.tolist() == [1.0] * 6


def test_other_losses_get_no_stability_and_may_carry_no_spans():
    bare = replace(whole(), model_input_spans=(), loss_fn_input_spans=())
    resolved = resolve(whole(), bare, strict=False)
    assert resolved.stability == (None, None) and resolved.unverified == 0


def test_steps_of_another_models_weights_are_unknown():
    runs = (("base:tiny", 1, 0, ""), ("X:train:0:3", 3, 9, "X:train:0"))
    (part,) = resolve(whole(), records={ID: replace(RECORDS[ID], versions=runs)}).stability
    np.testing.assert_array_equal(part.version_step_N[2:], np.float32([0, np.nan, np.nan, np.nan]))


def test_two_turns_and_two_sequences_in_one_datum():
    """Turn 2's prompt is turn 1's prompt and answer and one more token: offset 6 of it is new."""
    second = record(OTHER, prompt=(20, 21, 22, 30, 31, 32, 33, 40), tokens=(50, 51), tau=0.5, k=2)
    tokens = np.asarray([20, 21, 22, 30, 31, 32, 33, 40, 50], np.int32)
    logprobs = np.zeros(9, np.float32)
    logprobs[2:6], logprobs[7:] = RECORDS[ID].logprobs, second.logprobs
    datum = Datum(
        tokens,
        {
            "target_tokens": np.asarray([0, 0, 30, 31, 32, 33, 0, 50, 51], np.int64),
            "logprobs": logprobs,
            "advantages": np.asarray([0, 0, 1, 1, 1, 1, 0, -1, -1], np.float32),
        },
        (
            PromptSpan(ID, 0, 3),
            SampledSpan(ID, 0, 4),
            PromptSpan(OTHER, 7, 1),
            SampledSpan(OTHER, 0, 1),
        ),
        (
            PromptSpan(ID, 1, 2),
            SampledSpan(ID, 0, 4),
            PromptSpan(OTHER, 7, 1),
            SampledSpan(OTHER, 0, 2),
        ),
    )
    (part,) = resolve(datum, records={**RECORDS, OTHER: second}).stability
    assert part.sequence_N.tolist() == [-1, -1, 0, 0, 0, 0, -1, 1, 1]
    assert part.temperature_N.tolist() == [1] * 7 + [0.5] * 2
    assert part.head_ids_NK.shape == (9, 3)  # one K a request: the narrower head is padded
    assert part.head_ids_NK[7].tolist() == [0, 1, 0] and np.isneginf(part.head_logprobs_NK[7, 2])


def test_a_sequence_named_twice_is_two():
    one = whole()
    twice = Datum(
        np.concatenate([one.tokens] * 2),
        {name: np.concatenate([array] * 2) for name, array in one.inputs.items()},
        one.model_input_spans * 2,
        one.loss_fn_input_spans * 2,
    )
    (part,) = resolve(twice).stability
    assert part.sequence_N.tolist() == [-1, -1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1]
    assert len(resolve(one, one).stability) == 2  # and one sequence may serve several datums


def test_a_sampled_sequence_of_one_token():
    short = record(tokens=(30,), prompt=(20, 21))
    datum = Datum(
        np.asarray([20, 21], np.int32),
        {
            "target_tokens": np.asarray([0, 30], np.int64),
            "logprobs": np.asarray([0, -1], np.float32),
            "advantages": np.asarray([0, 1], np.float32),
        },
        (PromptSpan(ID, 0, 2), SampledSpan(ID, 0, 0)),
        (PromptSpan(ID, 1, 1), SampledSpan(ID, 0, 1)),
    )
    short = replace(short, versions=((f"{MODEL}:3", 1, 5, MODEL),))
    (part,) = resolve(datum, records={ID: short}).stability
    assert part.sequence_N.tolist() == [-1, 0] and part.version_step_N[1] == 5


def test_spans_of_length_0_cover_nothing_even_of_unknown_ids():
    datum = whole()
    nothing = (PromptSpan("who", 5, 0), SampledSpan("who", 9, 0))
    datum = replace(
        datum,
        model_input_spans=nothing + datum.model_input_spans,
        loss_fn_input_spans=(*nothing, *datum.loss_fn_input_spans, *nothing),
    )
    assert resolve(datum).unverified == 0


def test_zero_advantage_rows_may_lie_under_a_sequence_without_stability_part():
    datum = whole(PLAIN, advantages=[0] * 6)
    datum = with_inputs(datum, logprobs=np.full(6, -9.0, np.float32))  # nothing to hold it against
    (part,) = resolve(datum, records={PLAIN: RECORDS[PLAIN]}).stability
    assert part.sequence_N.tolist() == [-1, -1, 0, 0, 0, 0] and not part.recorded_N.any()
    assert part.head_ids_NK.shape == (6, 8)


def test_unknown_and_expired_pass_and_are_counted_unless_the_loss_needs_them():
    for why, words in [("unknown", "did not sample"), ("expired", "has expired")]:
        absent = {OTHER: why}
        assert resolve(whole(OTHER), strict=False, absent=absent).unverified == 4
        text = refusal(whole(OTHER), absent=absent)
        assert text.startswith(f"datum 0: model_input_spans[0] names sequence {OTHER!r}, which")
        assert words in text


def test_what_is_told_of_absent_sequences():
    foreign = refusal(whole(OTHER), absent={OTHER: "foreign"})
    assert foreign == refusal(whole(OTHER), absent={OTHER: "unknown"})
    for strict in (True, False):
        told = {
            why: refusal(whole(OTHER), absent={OTHER: why}, strict=strict)
            for why in ("foreign", "pending", "cancelled", "failed")
        }
        assert told["foreign"] == foreign
        assert "still being sampled" in told["pending"]
        assert "was cancelled" in told["cancelled"]
        assert "sampling failed" in told["failed"]


# --------------------------------------------------------------------------- what is refused


def test_both_lists_or_neither():
    datum = replace(whole(), loss_fn_input_spans=())
    text = "datum 1: loss_fn_input_spans is missing; give both lists or none"
    assert refusal(whole(), datum, strict=False) == text
    bare = replace(whole(), model_input_spans=(), loss_fn_input_spans=())
    assert refusal(bare) == (
        "datum 0: model_input_spans is missing; stable_reinforce needs both span lists"
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["", "a b", "a\x00", "x" * 65, "a\n"])
def test_ids_are_well_formed_even_where_they_cover_nothing(name, strict):
    spans = (*whole().loss_fn_input_spans, SampledSpan(name, 0, 0))
    text = refusal(replace(whole(), loss_fn_input_spans=spans), strict=strict)
    assert text.startswith("datum 0: loss_fn_input_spans[2].sequence_id") and "1 to 64" in text


@pytest.mark.parametrize(("offset", "length"), [(-1, 3), (0, -3), (2**63, 3)])
def test_offsets_and_lengths_are_not_negative_nor_beyond_64_bits(offset, length):
    spans = (PromptSpan(ID, offset, length), SampledSpan(ID, 0, 3))
    text = refusal(replace(whole(), model_input_spans=spans), strict=False)
    assert text.startswith("datum 0: model_input_spans[0].") and "found" in text


@pytest.mark.parametrize("strict", [True, False])
def test_the_lists_tile_their_fields(strict):
    short = (PromptSpan(ID, 1, 1), SampledSpan(ID, 0, 4))
    text = refusal(replace(whole(), loss_fn_input_spans=short), strict=strict)
    assert "loss_fn_input_spans covers 5 positions, but there are 6 rows of target_tokens" in text
    long = (PromptSpan(ID, 0, 3), SampledSpan(ID, 0, 4))
    text = refusal(replace(whole(), model_input_spans=long), strict=strict)
    assert "model_input_spans covers 7 positions, but there are 6 input tokens" in text


def test_spans_that_sum_right_but_point_past_the_record():
    past = (PromptSpan(ID, 1, 3), SampledSpan(ID, 0, 3))
    text = refusal(replace(whole(), model_input_spans=past), strict=False)
    assert "model_input_spans[0] claims positions 1 to 4 of the prompt" in text
    assert "of which 3 were recorded" in text
    past = (PromptSpan(ID, 1, 2), SampledSpan(ID, 2**62, 4))
    text = refusal(replace(whole(), loss_fn_input_spans=past), strict=False)
    assert "of the sampled tokens of sequence" in text and "of which 4 were recorded" in text


def test_the_targets_of_prompt_spans_are_free_but_their_range_is_not():
    past = (PromptSpan(ID, 2, 2), SampledSpan(ID, 0, 4))
    assert "of which 3" in refusal(replace(whole(), loss_fn_input_spans=past), strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_tokens_are_the_recorded_ones(strict):
    tokens = np.asarray([20, 21, 22, 30, 9, 32], np.int32)
    assert refusal(replace(whole(), tokens=tokens), strict=strict) == (
        "datum 0: model_input[4] is token 9, but model_input_spans[1] claims position 1 of the"
        f" sampled tokens of sequence {ID!r}, where token 31 was recorded"
    )
    tokens = np.asarray([20, 9, 22, 30, 31, 32], np.int32)
    text = refusal(replace(whole(), tokens=tokens), strict=strict)
    assert "model_input_spans[0] claims position 1 of the prompt" in text and "token 21" in text
    text = refusal(whole(targets=(0, 0, 30, 31, 9, 33)), strict=strict)
    assert "target_tokens[4] is token 9, but loss_fn_input_spans[1] claims position 2" in text


def test_alternatives_are_held_against_ranges_only():
    targets = np.zeros((6, 2), np.int64)
    datum = replace(whole(), inputs={"target_tokens": targets})
    assert resolve(datum, strict=False).unverified == 0
    past = replace(datum, loss_fn_input_spans=(PromptSpan(ID, 0, 2), SampledSpan(ID, 1, 4)))
    assert "of which 4" in refusal(past, strict=False)


def test_a_sampled_span_is_a_whole_sequence():
    datum = whole()
    parts = (PromptSpan(ID, 1, 2), SampledSpan(ID, 0, 2), SampledSpan(ID, 2, 2))
    text = refusal(replace(datum, loss_fn_input_spans=parts))
    assert "loss_fn_input_spans[1] claims offset 0 and length 2" in text and "length 4" in text
    resolve(replace(datum, loss_fn_input_spans=parts), strict=False)


def test_at_least_one_sampled_span_of_at_least_one_token():
    datum = whole(advantages=[0] * 6)
    spans = (PromptSpan(ID, 0, 3), PromptSpan(ID, 0, 3), SampledSpan(ID, 0, 0))
    text = refusal(replace(datum, loss_fn_input_spans=spans))
    assert text.startswith("datum 0: loss_fn_input_spans has no sampled span")


def test_a_nonzero_advantage_needs_a_recorded_row():
    text = refusal(whole(advantages=(0, -2, 1, 1, 1, 1)))
    assert "advantages[1] is -2, but loss_fn_input_spans[0]" in text and "a prompt span" in text
    text = refusal(whole(PLAIN, advantages=(0, 0, 0, 0.5, 0, 0)))
    assert "advantages[3] is 0.5" in text and "without record_stability_info" in text


@pytest.mark.parametrize("value", [-1.5, np.nan, np.inf])
def test_logprobs_are_the_recorded_ones_within_the_tolerance(value):
    logprobs = whole().inputs["logprobs"].copy()
    logprobs[2:] += 0.0009
    resolve(with_inputs(whole(), logprobs=logprobs))
    logprobs[5] = value
    text = refusal(with_inputs(whole(), logprobs=logprobs))
    assert f"logprobs[5] is {value:.6g}, but loss_fn_input_spans[1] claims position 3" in text
    assert "-2 was recorded (tolerance 0.001)" in text
    resolve(with_inputs(whole(), logprobs=logprobs), strict=False)


def test_10_000_spans_in_a_datum_are_not_quadratic():
    n = 10_000
    many = record(prompt=tuple([20] * n), tokens=tuple(range(n)), k=8)
    datum = Datum(
        many.tokens.copy(),
        {
            "target_tokens": many.tokens.astype(np.int64),
            "logprobs": np.zeros(n, np.float32),
            "advantages": np.zeros(n, np.float32),
        },
        tuple(SampledSpan(ID, i, 1) for i in range(n)),
        tuple(SampledSpan(ID, i, 1) for i in range(n)),
    )
    started = time.perf_counter()
    resolve(datum, strict=False, records={ID: many})
    assert time.perf_counter() - started < 1.0
    one = record(tokens=(30,))
    spans = tuple(SampledSpan(ID, 0, 1) for _ in range(n))
    rows = {
        "target_tokens": np.full(n, 30),
        "logprobs": np.full(n, -1.0, np.float32),
        "advantages": np.ones(n, np.float32),
    }
    datum = Datum(np.full(n, 30, np.int32), rows, spans, spans)
    started = time.perf_counter()
    (part,) = resolve(datum, records={ID: one}).stability
    assert time.perf_counter() - started < 1.0
    assert part.sequence_N.tolist() == list(range(n))
    text = refusal(*[datum] * 3, records={ID: one})
    assert text == "data carries 60000 provenance spans; the limit of a request is 50000"
