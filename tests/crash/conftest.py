"""One nursery for all crash tests, and a run that was never killed to compare with."""

import os

import pytest

from trimtab import tiny

from .kit import Nursery

os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="session")
def crash_model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("crash") / "tiny", context=256)


@pytest.fixture(scope="session")
def nursery():
    made = Nursery()
    yield made
    made.close()
