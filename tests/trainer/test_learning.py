"""That it learns, and that a control does not, on a model trained in the test itself."""

import json

import pytest

from recipes import learning
from recipes.learning import ALGORITHMS, Case, Outcome, cases, measure, tiny_model


def test_each_algorithm_has_a_run_a_seed_and_a_control_in_turn():
    found = cases(range(3), ALGORITHMS, controls=1)
    assert len(found) == 12
    assert {c.algorithm for c in found if c.control} == set(ALGORITHMS)
    assert Case("stable_reinforce", 2, control=True) in found
    everything = cases(range(3), ALGORITHMS, controls=3)
    assert len(set(everything)) == 18


def test_a_row_and_a_line_say_the_same(tmp_path):
    outcome = Outcome("m", "sums", "grpo", 1, True, 0.25, 0.5, 12.25)
    assert learning.row(outcome) == "| grpo | 1 | shuffled | 0.250 | 0.500 | +0.250 | 12 |"
    for _ in range(2):
        learning.keep(tmp_path / "new" / "r.jsonl", outcome)
    kept = [json.loads(line) for line in (tmp_path / "new" / "r.jsonl").read_text().splitlines()]
    assert [Outcome(**line) for line in kept] == [outcome, outcome]


@pytest.mark.nightly
def test_each_algorithm_learns_in_each_seed_and_the_control_does_not(tmp_path):
    chosen = cases(range(3), ALGORITHMS, controls=len(ALGORITHMS))
    with tiny_model(tmp_path) as ground:
        found = list(measure(ground, chosen, tmp_path, {}))
    assert len(found) == 18
    for outcome in found:
        if outcome.control:
            assert outcome.gain < 0.05, outcome
        else:
            assert outcome.gain >= 0.2, outcome
