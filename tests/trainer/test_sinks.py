"""Metrics handed to TensorBoard, wandb and trackio are read back from what the library wrote.

Each is logged in a process of its own, in two halves: the second one goes on with the run.
"""

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys

import pytest

from trimtab.errors import Invalid
from trimtab.trainer.config import Config
from trimtab.trainer.sinks import run_id, sinks

REWARD, LOSS = "env/all/reward/total", "loss:sum"
LOGGED = {0: {REWARD: 0.25, LOSS: 2.0}, 1: {REWARD: 0.5, LOSS: 1.0}}

WRITE = """
import json, sys
from pathlib import Path
from trimtab.trainer.config import Config
from trimtab.trainer.sinks import sinks

folder, options, logged = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
for sink in sinks(Config(steps=7, **options), folder):
    for step, metrics in logged.items():
        sink.log(int(step), metrics)
    sink.close()
"""


def write(folder, options):
    folder.mkdir()
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment = os.environ | offline | {"TRACKIO_DIR": str(folder / "trackio")}
    for step, metrics in LOGGED.items():
        words = [str(folder), json.dumps(options), json.dumps({step: metrics})]
        command = [sys.executable, "-c", WRITE, *words]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def needs(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `pip install trimtab[sinks]` has it")


def test_tensorboard(tmp_path):
    needs("tensorboard")
    write(tmp_path / "run", {"tensorboard": True})
    script = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
found = EventAccumulator(sys.argv[1]).Reload()
names = found.Tags()["tensors"]
print(json.dumps({n: [(e.step, float(make_ndarray(e.tensor_proto))) for e in found.Tensors(n)]
                  for n in names}))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run" / "tensorboard")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        REWARD: [[0, 0.25], [1, 0.5]],
        LOSS: [[0, 2.0], [1, 1.0]],
    }


def test_wandb_offline(tmp_path):
    needs("wandb")
    folder = tmp_path / "run"
    write(folder, {"wandb_project": "sums"})
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for path in files for record in wandb_records(path)]
    begun = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.project, r.display_name, r.run_id) for r in begun} == {
        ("sums", "run", run_id(folder))
    }
    options = {item.key: json.loads(item.value_json) for item in begun[0].config.update}
    assert options["steps"] == 7
    found = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
            found[int(values["_step"])] = {n: float(values[n]) for n in (REWARD, LOSS)}
    assert found == LOGGED


def wandb_records(path):
    """A LevelDB log: blocks of 32 KiB, in them pieces of (crc, length, type); a protobuf message
    is one piece, or a first, middle ones and a last."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def test_wandb_without_a_login_is_told_in_a_sentence(tmp_path, monkeypatch):
    needs("wandb")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    command = [sys.executable, "-c", WRITE, str(tmp_path), '{"wandb_project": "sums"}', "{}"]
    done = subprocess.run(
        command,
        env=environment | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "Invalid: wandb could not begin a run (No API key configured" in last
    assert last.endswith("set WANDB_MODE=offline, or leave out wandb_project")


def test_trackio(tmp_path):
    needs("trackio")
    folder = tmp_path / "run"
    write(folder, {"trackio_project": "sums"})
    with sqlite3.connect(folder / "trackio" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {f"run-{run_id(folder)}"}
    assert {step: json.loads(metrics) for _, step, metrics in rows} == LOGGED


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_told_with_the_way_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.summary", None)
    asked = {"tensorboard": True} if name == "tensorboard" else {f"{name}_project": "p"}
    with pytest.raises(Invalid, match=f"pip install {name}"):
        sinks(Config(**asked), tmp_path)
    assert sinks(Config(), tmp_path) == []
    assert not list(tmp_path.iterdir())
