"""The cookbook's own checks of a live service. They are in its repository and in no package: set
COOKBOOK_SOURCE to a checkout. They print and do not judge; the judging is here."""

import os
import re
from pathlib import Path

import pytest

from .kit import SMOLLM2

pytestmark = pytest.mark.nightly

COMPARE = """
import asyncio, sys
from pathlib import Path
import torch.autograd.forward_ad as document
sys.path.insert(0, sys.argv[1])
import compare_sampling_training_logprobs as check
text = Path(document.__file__).read_text()[:2000]
check.get_reference_document = lambda: text
asyncio.run(check.main(check.Config(model_names=[sys.argv[2]])))
"""


@pytest.fixture
def checks():
    folder = Path(os.environ.get("COOKBOOK_SOURCE", "")) / "tests"
    if not (folder / "validate_temperature_logprobs.py").exists():
        pytest.skip("the live checks are not in the package: COOKBOOK_SOURCE names a checkout")
    return folder


def test_sampler_and_learner_score_a_document_the_same(cookbook, checks):
    """The document is torch's forward_ad.py, from the installed torch instead of the network, its
    first 2000 characters."""
    run = cookbook.script(COMPARE, str(checks), SMOLLM2)
    found = re.search(r"'mse\[sample, train\]': ([0-9.e+-]+)", run.printed)
    assert found, run.printed
    assert float(found[1]) < 1e-6


def test_returned_logprobs_are_those_of_the_temperature(cookbook, checks):
    """log p_T(i) - log p_T(j) = (log p_1(i) - log p_1(j)) / T: that is, log-softmax(logits / T)."""
    script = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    run = cookbook.script(
        script, str(checks / "validate_temperature_logprobs.py"), f"base_model={SMOLLM2}"
    )
    rows = re.findall(r"^ +(\d\.\d{3}) +(\d+) +(\d+) +(\S+) +(\S+)$", run.printed, re.M)
    assert len(rows) == 7, run.printed
    worst = {row[0]: float(row[4]) for row in rows if row[4] != "nan"}
    assert len(worst) >= 5, run.printed
    assert max(worst.values()) < 1e-4, worst
