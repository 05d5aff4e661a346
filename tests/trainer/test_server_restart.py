"""A server that is killed in mid-run and comes back: the run goes on to the same end."""

import threading
import time

import pytest
from conftest import serve
from test_end_to_end import DIGITS, assert_same, config, lines

from trimtab.trainer import Task, train
from trimtab.trainer.folder import Folder

RUN = dict(steps=4, eval_every=2)


def slow(completion, item):
    time.sleep(0.1)
    return DIGITS.reward(completion, item)


@pytest.mark.nightly
def test_a_run_goes_on_when_its_server_comes_back(tiny_model, tmp_path):
    log = tmp_path / "log"
    process, url = serve(tiny_model, tmp_path / "data", log)
    port = int(url.rsplit(":", 1)[1])
    task = Task(DIGITS.prompts, slow, held_out=DIGITS.held_out, name="digits")
    run = threading.Thread(target=train, args=(config(url, tmp_path / "run", **RUN), task))
    run.start()
    wait_for_step(tmp_path / "run", 1)
    process.kill()
    process.wait()
    time.sleep(1)
    process, _ = serve(tiny_model, tmp_path / "data", log, port=port)
    run.join(timeout=300)
    assert not run.is_alive()
    train(config(url, tmp_path / "other", **RUN), task)
    assert_same(lines(tmp_path / "run"), lines(tmp_path / "other"))
    process.terminate()
    process.wait(timeout=20)


def wait_for_step(path, step):
    end = time.monotonic() + 120
    while (state := Folder(path).state()) is None or state.step < step:
        assert time.monotonic() < end
        time.sleep(0.02)
