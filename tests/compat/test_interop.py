"""Weights out, and optimizers in: what other software makes of ours, what ours refuses of others'.

A checkpoint becomes a PEFT adapter with one command and a merged model with another; both give the
log-probabilities that the server gives.
"""

import os
import subprocess
import sys

import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.wire.live import MODEL, connected, datum, prompt, serving
from trimtab import tiny

KEY = "tml-local"
TOKENS = [5, 6, 7, 8, 9, 250, 3]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny", context=256)


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    with serving(model=(f"{MODEL}={model_folder}",), data_dir=data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with connected(server, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def trained(client):
    """(path of a checkpoint after a step, the server's log-probabilities of TOKENS under it)."""
    training = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    training.forward_backward([datum(TOKENS)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    found = sampling.compute_logprobs(prompt(*TOKENS)).result()
    return training.save_state("final").result().path, torch.tensor(found[1:])


@pytest.fixture
def command(server, tmp_path):
    """Runs a module with the environment that `trimtab serve` prints, in a folder of its own."""
    environment = os.environ | {
        "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": os.getcwd(),
    }  # fmt: skip

    def run(*words):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *map(str, words)], cwd=tmp_path,
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    return run


def logprobs(model):
    with torch.no_grad():
        found = model.eval()(torch.tensor([TOKENS])).logits.log_softmax(-1)[0]
    return found[torch.arange(len(TOKENS) - 1), TOKENS[1:]]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_one_command_makes_a_peft_adapter(command, trained, model_folder, tmp_path):
    path, expected = trained
    done = command("tinker.cli", "checkpoint", "download", path, "-o", "adapters")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "adapters").iterdir()
    base = load(model_folder)
    assert (logprobs(base) - expected).abs().max() > 0.01, "the step did nothing"
    torch.testing.assert_close(
        logprobs(PeftModel.from_pretrained(base, str(folder))), expected, atol=1e-4, rtol=0
    )


def test_another_makes_a_merged_model(command, trained, model_folder, tmp_path):
    path, expected = trained
    done = command("trimtab.cli", "merge", path, "merged", "--base", model_folder)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(logprobs(load(tmp_path / "merged")), expected, atol=1e-4, rtol=0)


def test_merging_what_the_server_does_not_have_fails_with_a_sentence(command, trained):
    path = trained[0].replace("/final", "/other")
    done = command("trimtab.cli", "merge", path, "merged")
    assert done.returncode == 1 and "is unknown" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ optimizers

ONLY = "'dimuon' is not offered; this server has 'adamw'"


def test_other_optimizers_are_refused_where_a_model_is_made_with_what_there_is(client, trained):
    dimuon = types.DimuonOptimizerConfig()
    with pytest.raises(tinker.BadRequestError, match=ONLY):
        client.create_lora_training_client(MODEL, rank=2, optimizer=dimuon).result()
    with pytest.raises(tinker.BadRequestError, match=ONLY):
        client.create_training_client_from_state(trained[0], optimizer=dimuon).result()
    training = client.create_lora_training_client(
        MODEL, rank=2, optimizer=types.AdamOptimizerConfig()
    ).result()
    training.forward_backward([datum(TOKENS)], "cross_entropy").result()
    with pytest.raises(tinker.TinkerError, match="'dimuon' is not offered; use adam_params"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result()
