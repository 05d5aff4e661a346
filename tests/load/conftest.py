"""A server in this process, for loads of which the suite asks only that they are carried."""

import os

import pytest

os.environ["TINKER_TELEMETRY"] = "0"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from trimtab import tiny

    return tiny.build(tmp_path_factory.mktemp("load") / "model", context=256)


@pytest.fixture(scope="session")
def url(model_folder, tmp_path_factory):
    """A small queue, so that hundreds of samples run into its bound."""
    from trimtab.embedded import _served

    from .raw import MODEL

    config = {
        "model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path_factory.mktemp("data"),
        "threads": 1, "port": 0, "max_pending_samples": 1000,
    }  # fmt: skip
    with _served(config) as url:
        yield url
