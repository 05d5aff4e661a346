"""tinker-cookbook in an environment of its own, SmolLM2 behind `trimtab serve`.

COOKBOOK_MODEL=tiny puts a tiny random model in its place, under the same names: that shows that the
recipes run, in minutes on a busy machine, and not what they do to a language model.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab import tiny
from trimtab.modelstore import KNOWN, held

from .hubdata import write_all
from .kit import ANSWERER, FIXED, SMOLLM2, TEACHER, Cookbook


@pytest.fixture(scope="session")
def cookbook_python():
    given = os.environ.get("COOKBOOK_VENV")
    python = Path(given or Path(sys.prefix) / "cookbook") / "bin/python"
    if not python.exists():
        pytest.skip(
            f"no tinker-cookbook at {python}: `make cookbook` installs it, "
            "or COOKBOOK_VENV names an environment that has it"
        )
    return python


@pytest.fixture(scope="session")
def real():
    """Whether the model is a language model."""
    return os.environ.get("COOKBOOK_MODEL") != "tiny"


@pytest.fixture(scope="session")
def model_folder(real, tmp_path_factory):
    if not real:
        return tiny.build(tmp_path_factory.mktemp("model"), context=8192)
    found = held(KNOWN["smollm2"])
    if found is None:
        pytest.skip("SmolLM2 is not here: `trimtab model get smollm2` fetches it")
    return found.path


@pytest.fixture(scope="session")
def cookbook(cookbook_python, model_folder, tmp_path_factory):
    """SmolLM2 is served under its own name and under those that recipes have no option for."""
    root = tmp_path_factory.mktemp("cookbook")
    names = [SMOLLM2, FIXED, ANSWERER, TEACHER]
    words = [word for name in names for word in ("--model", f"{name}={model_folder}")]
    words += ["--port", "0", "--data-dir", str(root / "server"), "--threads", "1"]
    with open(root / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trimtab.cli", "serve", *words],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, (root / "server.log").read_text()
        (root / "runs").mkdir()
        yield Cookbook(cookbook_python, found[0], write_all(root / "data"), root / "runs")
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
