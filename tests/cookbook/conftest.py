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
def thinking(real):
    """For what is rendered with a thinking model's form: its end must be one token."""
    if not real:
        pytest.skip("the tiny model has no token to spare for </think>")


def thinks(folder, to):
    """The model of `folder` with a tokenizer in which a token that nothing uses is `</think>`."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text().replace("<jupyter_start>", "</think>")
        (to / name).unlink()
        (to / name).write_text(text)
    return to


@pytest.fixture(scope="session")
def cookbook(cookbook_python, model_folder, real, tmp_path_factory):
    """SmolLM2 is served under its own name and under those that recipes have no option for."""
    root = tmp_path_factory.mktemp("cookbook")
    served = {SMOLLM2: model_folder, FIXED: model_folder}
    if real:
        served |= dict.fromkeys((ANSWERER, TEACHER), thinks(model_folder, root / "thinks"))
    words = [word for name in served for word in ("--model", f"{name}={served[name]}")]
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
