"""That it learns, and that a control does not, on a model trained in the test itself."""

import pytest

from recipes.learning import ALGORITHMS, measure


@pytest.mark.nightly
def test_each_algorithm_learns_in_each_seed_and_the_control_does_not(tmp_path):
    seeds = range(3)
    found = list(measure(tmp_path, seeds=seeds, algorithms=ALGORITHMS, words={}))
    assert len(found) == 18
    for outcome in found:
        if outcome.control:
            assert outcome.gain < 0.05, outcome
        else:
            assert outcome.gain >= 0.2, outcome
