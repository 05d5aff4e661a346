"""That it learns, and that a control does not, on a model trained in the test itself."""

import json
from pathlib import Path

import pytest

from recipes import learning
from recipes.learning import ALGORITHMS, Case, Outcome, cases, measure, tiny_model

RESULTS = Path(learning.__file__).parent / "results"


def test_each_algorithm_has_a_run_and_a_control_a_seed():
    found = cases(range(3), ALGORITHMS)
    assert len(set(found)) == len(found) == 18
    assert Case("stable_reinforce", 2, control=True) in found
    assert not any(case.control for case in cases([0], ALGORITHMS, ["true"]))
    with pytest.raises(ValueError):
        cases([0], ALGORITHMS, ["random"])


def test_the_pretrained_model_learned_each_time_and_no_control_did():
    """The rows that docs/trainer.md quotes: every case once, none left out."""
    lines = (RESULTS / "learning-smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    found = [Outcome(**json.loads(line)) for line in lines]
    ran = [Case(o.algorithm, o.seed, o.control) for o in found]
    assert sorted(ran, key=str) == sorted(cases(range(3), ALGORITHMS), key=str)
    for outcome in found:
        told(outcome)


def test_a_row_and_a_line_say_the_same(tmp_path):
    outcome = Outcome("m", "sums", "grpo", 1, True, 0.25, 0.5, 12.25)
    assert learning.row(outcome) == "| grpo | 1 | shuffled | 0.250 | 0.500 | +0.250 | 12 |"
    for _ in range(2):
        learning.keep(tmp_path / "new" / "r.jsonl", outcome)
    kept = [json.loads(line) for line in (tmp_path / "new" / "r.jsonl").read_text().splitlines()]
    assert [Outcome(**line) for line in kept] == [outcome, outcome]


@pytest.mark.nightly
def test_each_algorithm_learns_in_each_seed_and_the_control_does_not(tmp_path):
    with tiny_model(tmp_path) as ground:
        found = list(measure(ground, cases(range(3), ALGORITHMS), tmp_path, {}))
    assert len(found) == 18
    for outcome in found:
        told(outcome)


def told(outcome: Outcome) -> None:
    """A run with true rewards gains at least 0.2, a control less than 0.05."""
    assert outcome.gain < 0.05 if outcome.control else outcome.gain >= 0.2, outcome
