"""Short of death: a server is stopped, has no room, loses track of time, or finds a file cut."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import tinker
from e2e.kit import MODEL, batch
from tinker import types

from .kit import Home, Script, weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def home(nursery, crash_model, tmp_path):
    """Snapshots so rare that replays are long."""
    made = Home(nursery, crash_model, tmp_path, every=1000)
    yield made
    if made.pid and not made.dead:
        made.kill()
        made.wait(10)


@pytest.fixture(scope="module")
def undisturbed(nursery, crash_model, tmp_path_factory):
    home = Home(nursery, crash_model, tmp_path_factory.mktemp("calm"), every=1000)
    home.start()
    return trained(home)


def trained(home, cycles=4):
    """A client's whole run, and all it was told."""
    script = Script(home.url)
    script.begin()
    for _ in range(cycles):
        script.cycle()
    script.end()
    assert home.stop() == 0
    return script.told, weights(home, script)


def meanwhile(task):
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread


def test_stopped_for_a_while(home, undisturbed):
    def stop():
        for _ in range(3):
            time.sleep(1.0)
            home.kill(signal.SIGSTOP)
            time.sleep(1.0)
            home.kill(signal.SIGCONT)

    home.start()
    stopping = meanwhile(stop)
    found = Script(home.url)
    found.begin()
    for _ in range(4):
        found.cycle()
    stopping.join(20)
    found.end()
    assert home.stop() == 0
    assert (found.told, weights(home, found)) == undisturbed


def test_a_disk_that_is_full_for_a_while(home, undisturbed):
    full = home.path / "full"

    def empty():
        end = time.monotonic() + 30
        while "waits for the disk" not in home.log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(1.0)
        full.unlink()

    home.start(hook="crash.hooks:full_disk")
    script = Script(home.url)
    script.begin()
    for _ in range(2):
        script.cycle()
    full.touch()
    emptying = meanwhile(empty)
    for _ in range(2):
        script.cycle()
    emptying.join(40)
    script.end()
    assert home.stop() == 0
    assert (script.told, weights(home, script)) == undisturbed
    assert "waits for the disk: " in home.log.read_text()


def test_a_clock_that_jumps_by_days(home, undisturbed):
    """No session expires, no sequence's day ends, no result goes."""
    home.start(hook="crash.hooks:jumping_clock")
    assert trained(home) == undisturbed


def test_a_snapshot_that_was_cut_short(nursery, crash_model, tmp_path):
    home = Home(nursery, crash_model, tmp_path, every=1)
    home.start()
    service = tinker.ServiceClient(base_url=home.url, api_key="tml-local")
    training = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    adam = types.AdamParams(learning_rate=0.02)

    def step(client, n):
        client.forward_backward(batch(3, seed=n), "cross_entropy").result()
        return client.optim_step(adam).result().metrics

    step(training, 0)
    path = training.save_state("kept").result().path
    step(training, 1)
    snapshots = home.data / "snapshots"
    home.kill(signal.SIGSTOP)  # between two writes, most likely; the kill takes it from there
    home.kill()
    home.wait(10)
    for file in snapshots.glob("*/adapter.safetensors"):  # the kill may have left an empty folder
        file.write_bytes(file.read_bytes()[:-8])
    home.start()
    words = r"lost its weights when the server restarted .*damaged.* its last checkpoint is '"
    with pytest.raises(tinker.RequestFailedError, match=words + path):
        step(training, 2)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert step(resumed, 1)["optimizer_step"] == 2

    [(kept,)] = home.read("SELECT folder FROM checkpoints")
    file = home.data / "checkpoints" / kept / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer\.safetensors is damaged"):
        service.create_training_client_from_state_with_optimizer(path).result()
    service.create_training_client_from_state(path).result()  # its weights are whole
    service.close("success").result(20)
    assert home.stop() == 0


def test_a_client_that_fell_silent_is_told_where_its_weights_are(home):
    home.start(hook="crash.hooks:short_sessions")
    service = tinker.ServiceClient(base_url=home.url, api_key="tml-local")
    training = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    training.forward_backward(batch(3), "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    before = training.forward(batch(3), "cross_entropy").result().metrics["loss:sum"]
    path = f"tinker://{training.model_id}/weights/session-end"
    time.sleep(5.0)
    with pytest.raises(tinker.APIStatusError, match=f"has expired.* were saved: '{path}'"):
        training.forward(batch(3), "cross_entropy").result()
    again = tinker.ServiceClient(base_url=home.url, api_key="tml-local")
    resumed = again.create_training_client_from_state_with_optimizer(path).result()
    found = resumed.forward(batch(3), "cross_entropy").result().metrics["loss:sum"]
    assert found == before
    assert home.stop() == 0
    for client in (service, again):
        client.holder.close()


def test_a_second_server_on_the_directory_is_refused(home):
    home.start()
    service = tinker.ServiceClient(base_url=home.url, api_key="tml-local")
    assert service.get_server_capabilities().supported_models[0].model_name == MODEL
    second = Home(home.nursery, "", home.path)
    second.log = home.path / "second"
    second.args = [*home.args, "--port", str(second.port)]
    second.start()
    assert second.wait(20) == 1
    said = second.log.read_text()
    assert f"data directory {home.data} is in use by another trimtab server (process " in said
    assert str(home.pid) in said and "Traceback" not in said
    assert home.stop() == 0
