"""The table of docs/compatibility.md against the SDK that is installed: nothing got worse, nothing
is missing, and the page is the results'."""

import json

import pytest
import tinker

from . import matrix
from .methods import public_methods


@pytest.fixture(scope="module")
def before():
    return json.loads((matrix.RESULTS / f"{tinker.__version__}.json").read_text())


def test_the_table_has_each_method_of_the_installed_sdk_and_no_other(before):
    """A new method belongs into the table, as "unknown" until it has a trial: `make compat`."""
    assert sorted(before["methods"]) == public_methods()


def test_the_page_is_made_of_the_results():
    assert matrix.PAGE.read_text() == matrix.page(matrix.kept())


def test_methods_that_worked_still_work_and_refusals_say_the_same(before):
    now = matrix.measured()
    assert not matrix.troubles(now), now["core"]
    worse = {
        name: now["methods"].get(name)
        for name, old in before["methods"].items()
        if old["verdict"] in ("works", "refused") and now["methods"].get(name) != old
    }
    assert not worse
