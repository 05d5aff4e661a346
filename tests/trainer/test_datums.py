"""Tokens to rows and spans: the alignment that everything else rests on."""

import numpy as np
import pytest
from tinker.types import PromptProvenanceSpan as P
from tinker.types import SampledProvenanceSpan as S
from trainer_builders import trajectory, turn

from trimtab.trainer.datums import datum, input_spans, target_spans
from trimtab.trainer.trajectory import rows

TURNS = [
    turn([5, 6], [7, 8], [-0.1, -0.2], "a"),
    turn([1, 2, 3], [9], [-0.3], "b"),
    turn([4], [10, 11], [-0.4, -0.5], "c"),
]


def test_rows_of_one_turn():
    row = rows(trajectory([7, 8], prompt=[5, 6]))
    assert row.inputs_N.tolist() == [5, 6, 7]
    assert row.targets_N.tolist() == [6, 7, 8]
    assert row.mask_N.tolist() == [False, True, True]
    assert row.logprobs_N.tolist() == [0, -1, -1]


def test_rows_of_three_turns_mask_replies():
    row = rows(trajectory(turns=TURNS))
    assert row.inputs_N.tolist() == [5, 6, 7, 8, 1, 2, 3, 9, 4, 10]
    assert row.targets_N.tolist() == [6, 7, 8, 1, 2, 3, 9, 4, 10, 11]
    assert row.mask_N.astype(int).tolist() == [0, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert row.logprobs_N.tolist() == [0, -0.1, -0.2, 0, 0, 0, -0.3, 0, -0.4, -0.5]


def test_spans_of_three_turns_name_their_places():
    """Turn b was sampled after the prompt 5 6 7 8 1 2 3: its own part of it begins at 4."""
    t = trajectory(turns=TURNS)
    assert target_spans(t) == [
        P(sequence_id="a", offset=1, length=1),
        S(sequence_id="a", offset=0, length=2),
        P(sequence_id="b", offset=4, length=3),
        S(sequence_id="b", offset=0, length=1),
        P(sequence_id="c", offset=8, length=1),
        S(sequence_id="c", offset=0, length=2),
    ]
    assert input_spans(t)[0] == P(sequence_id="a", offset=0, length=2)
    assert input_spans(t)[-1] == S(sequence_id="c", offset=0, length=1)
    assert sum(s.length for s in input_spans(t)) == 10


def test_a_prompt_and_a_turn_of_one_token_leave_no_empty_runs():
    t = trajectory(turns=[turn([5], [7], name="a")])
    assert target_spans(t) == [S(sequence_id="a", offset=0, length=1)]
    assert input_spans(t) == [P(sequence_id="a", offset=0, length=1)]


def test_spans_claim_the_tokens_that_they_cover():
    """Every run, read out of the request that it names, gives the datum's own tokens."""
    t = trajectory(turns=TURNS)
    tokens, start, prompts, sampled = t.tokens.tolist(), 0, {}, {}
    for part in t.turns:
        start += part.before.size
        prompts[part.sequence_id] = tokens[:start]
        sampled[part.sequence_id] = part.tokens_T.tolist()
        start += part.tokens_T.size

    def read(spans):
        sources = [(prompts if isinstance(s, P) else sampled, s) for s in spans]
        return [x for src, s in sources for x in src[s.sequence_id][s.offset :][: s.length]]

    assert read(input_spans(t)) == tokens[:-1]
    assert read(target_spans(t)) == tokens[1:]


def test_datum_carries_inputs_and_spans():
    made = datum(trajectory(turns=TURNS), {"advantages": np.arange(10)})
    assert made.model_input.to_ints() == [5, 6, 7, 8, 1, 2, 3, 9, 4, 10]
    assert made.loss_fn_inputs["advantages"].dtype == "float32"
    assert made.loss_fn_inputs["target_tokens"].to_numpy().tolist()[-1] == 11
    assert len(made.loss_fn_input_spans) == 6


def test_datum_refuses_another_length():
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\), expected \(10,\)"):
        datum(trajectory(turns=TURNS), {"advantages": np.zeros(3)})
