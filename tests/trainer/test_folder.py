"""A run's folder: one owner, whole files, and a rewind to the last checkpoint."""

import errno
import io
import json
import os

import chz
import pytest

from trimtab.errors import Invalid
from trimtab.trainer import folder as folder_module
from trimtab.trainer import resume
from trimtab.trainer.config import Config
from trimtab.trainer.folder import Folder, State
from trimtab.trainer.stopped import Stopped

STATE = State(
    step=3,
    checkpoint="tinker://a/weights/step-000003",
    position=48,
    seed=7,
    seconds=1.25,
    algorithm={"scores": {"mean": 0.1 + 0.2, "var": 1 / 3, "count": 1e-4}},
    superseded=("tinker://a/weights/step-000002",),
)


def test_the_state_comes_back_bit_for_bit(tmp_path):
    with Folder(tmp_path) as folder:
        folder.write_state(STATE)
    assert Folder(tmp_path).state() == STATE


def test_two_runs_in_one_folder_are_refused(tmp_path):
    owner = rf"in use by a run of process {os.getpid()}"
    with Folder(tmp_path), pytest.raises(Invalid, match=owner):
        Folder(tmp_path).__enter__()
    with Folder(tmp_path):
        pass  # free again


def test_rewind_drops_later_lines_and_torn_ones(tmp_path):
    with Folder(tmp_path) as folder:
        folder.append("metrics.jsonl", [{"step": i, "x": i / 3} for i in range(4)])
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "x"')  # killed here
        folder.rewind(3)
        folder.append("metrics.jsonl", [{"step": 3, "x": 9.0}])
        assert [line["step"] for line in folder.lines("metrics.jsonl")] == [0, 1, 2, 3]
        assert folder.lines("metrics.jsonl")[1]["x"] == 1 / 3


def test_a_full_disk_is_told_with_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Folder(tmp_path) as folder:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(Stopped, match=r"the disk is full, so .*state.json .*--resume"):
            folder.write_state(STATE)
        assert folder.state() is None  # nothing half written


class FullDisk(io.TextIOWrapper):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_the_start_is_told_too(tmp_path, monkeypatch):
    def full(path, mode, encoding):
        return FullDisk(open(path, mode + "b"), encoding=encoding)

    with monkeypatch.context() as patched:
        patched.setattr(folder_module, "open", full, raising=False)
        with pytest.raises(Stopped, match=r"the disk is full, so .*run.lock could not be written"):
            Folder(tmp_path).__enter__()
    with Folder(tmp_path):
        pass  # no lock was left behind


@pytest.mark.parametrize("name", ["state.json", "config.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_text('{"step": 1')
    with Folder(tmp_path) as folder, pytest.raises(Invalid, match=f"{name} is damaged"):
        resume.begin(folder, Config(resume=True))


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    with Folder(tmp_path) as folder:
        assert resume.begin(folder, Config()) is None
        folder.write_state(STATE)
        with pytest.raises(Invalid, match="holds a run at step 3; go on with it with --resume"):
            resume.begin(folder, Config())
        assert resume.begin(folder, Config(resume=True)) == STATE


def test_a_run_goes_on_under_the_options_it_began_with(tmp_path):
    began = Config(reward_clip=(-5.0, 5.0), learning_rate=3e-4)
    with Folder(tmp_path) as folder:
        resume.begin(folder, began)
        folder.write_state(STATE)
        later = chz.replace(began, resume=True, steps=500, base_url="http://127.0.0.1:1")
        assert resume.begin(folder, later) == STATE
        assert json.loads((tmp_path / "config.json").read_text())["steps"] == 500
        with pytest.raises(Invalid, match=r"learning_rate was 0.0003 .* and is 0.1 now"):
            resume.begin(folder, chz.replace(later, learning_rate=0.1))


def test_resume_without_a_checkpoint_begins_anew(tmp_path):
    with Folder(tmp_path) as folder:
        folder.append("metrics.jsonl", [{"step": 0}])
        assert resume.begin(folder, Config(resume=True)) is None
        assert folder.lines("metrics.jsonl") == []
