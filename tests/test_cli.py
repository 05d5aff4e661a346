"""The command line: quick to appear, and its flags are the knobs."""

import re
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from trimtab import __version__
from trimtab.cli import _announce, app
from trimtab.config import ServerConfig
from trimtab.service.sequences import held_in
from trimtab.service.store import FILE, Store


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_appears_without_the_heavy_libraries():
    code = (
        "import sys; from typer.testing import CliRunner; from trimtab.cli import app\n"
        "print(CliRunner().invoke(app, ['--help']).stdout)\n"
        "print('heavy:', {'torch', 'tinker', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "serve" in done.stdout and "doctor" in done.stdout and "model" in done.stdout
    assert done.stdout.strip().endswith("heavy: set()")


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


def test_doctor_counts_what_a_journal_holds(tmp_path):
    store = Store(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.executemany(
            "INSERT INTO sequences VALUES (?, 'r', 's', 0, ?, 1.0, '[]', ?, 0, 0)",
            [("a", 10, 8), ("b", 5, None)],
        )
    db.close()
    told = run("doctor", "--data-dir", str(tmp_path)).stdout
    store.close()
    assert "2 held, 15 tokens, 10 of them with stability information" in told
    assert held_in(tmp_path / FILE).array_bytes == 10 * (4 + 68) + 5 * 4


def test_other_commands_are_handed_on():
    found = run("model", "--help")
    assert found.exit_code == 0 and "list" in found.stdout
    found = run("train", "--help")
    assert found.exit_code == 0 and "algorithm" in found.stdout


@pytest.mark.parametrize("keyed", [False, True])
def test_serve_prints_what_to_export(keyed, capsys):
    config = ServerConfig(model=("org/tiny",), port=0)
    url = "http://127.0.0.1:8000"
    _announce(SimpleNamespace(config=config, models=(), url=url, asks_for_keys=keyed))
    serving, *exports = capsys.readouterr().out.splitlines()
    assert serving == f"trimtab serves org/tiny at {url}"
    assert exports[0] == f"export TINKER_BASE_URL={url}"
    assert exports[1].startswith("export TINKER_API_KEY=tml-local") != keyed
    assert exports[2].startswith(f"export HF_ENDPOINT={url}")
    assert ("HF_TOKEN=$TINKER_API_KEY" in exports[2]) == keyed


def test_keys_are_created_listed_and_revoked(tmp_path):
    at = ("--data-dir", str(tmp_path))
    missing = run("keys", "list", *at)
    assert missing.exit_code == 1 and "no key was ever created" in missing.stderr
    made = run("keys", "create", "alice", "--name", "laptop", *at)
    secret = made.stdout.strip()
    assert secret.startswith("tml-") and "it is not shown again" in made.stderr
    run("keys", "create", "bob", *at)
    listed = run("keys", "list", *at).stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["1", "alice"], ["2", "bob"]]
    assert "used never" in listed[0] and listed[0].endswith("live  laptop")
    assert secret not in "".join(listed)
    assert "key 1 of alice is revoked" in run("keys", "revoke", "1", *at).stdout
    first, second = run("keys", "list", *at).stdout.splitlines()
    assert "revoked 2" in first and second.endswith("live")
    wrong = run("keys", "revoke", "7", *at)
    assert wrong.exit_code == 1 and "key 7 is unknown" in wrong.stderr
    assert "is no owner's name" in run("keys", "create", "../x", *at).stderr
