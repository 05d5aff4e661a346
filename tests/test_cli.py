"""The command line: quick to appear, and its flags are the knobs."""

import re
import subprocess
import sys
import time

from typer.testing import CliRunner

from trimtab import __version__
from trimtab.cli import app
from trimtab.config import ServerConfig


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_appears_at_once():
    best = 99.0
    for _ in range(3):
        started = time.monotonic()
        command = [sys.executable, "-m", "trimtab.cli", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        best = min(best, time.monotonic() - started)
    assert "serve" in done.stdout and "doctor" in done.stdout and "model" in done.stdout
    assert best < 1.0  # 0.2 s alone on two cores


def test_the_version_is_the_packages():
    assert run("--version").stdout.strip() == f"trimtab {__version__}"


def test_serve_has_a_flag_for_each_knob_and_no_other():
    found = run("serve", "--help")
    assert found.exit_code == 0
    flags = set(re.findall(r"--([a-z-]+)", found.stdout)) - {"help", "config"}
    assert flags == {name.replace("_", "-") for name in ServerConfig.model_fields}


def test_serve_without_a_model_says_so():
    found = run("serve")
    assert found.exit_code == 1
    assert found.stderr.strip() == "error: model: required: name at least one model to serve"


def test_doctor_shows_the_machine_and_the_data_directory(tmp_path):
    found = run("doctor", "--data-dir", str(tmp_path / "none"))
    assert found.exit_code == 0
    for words in ("torch", "tinker SDK", "as tested", "float32", "bfloat16", "GFLOP/s", "nothing"):
        assert words in found.stdout
    (tmp_path / "a").write_bytes(bytes(2**20))
    assert "1 files, 1.0 MiB" in run("doctor", "--data-dir", str(tmp_path)).stdout


def test_other_commands_are_handed_on():
    found = run("model", "--help")
    assert found.exit_code == 0 and "list" in found.stdout
