"""The server inside a process, as notebooks and recipes use it."""

import threading

import httpx
import numpy as np
import pytest

import trimtab
from trimtab.errors import Invalid, NotFound

from .kit import MODEL, datum, logprobs, prompt

OURS = ("trimtab", "sampler", "learner")


def test_two_servers_at_once_and_one_after_the_other(model_folder, tmp_path):
    model = f"{MODEL}={model_folder}"
    kept = tmp_path / "kept"
    before = set(threading.enumerate())
    with trimtab.local(model=model, data_dir=kept) as outer:
        training = outer.create_lora_training_client(MODEL, rank=4).result()
        with trimtab.local(model=[model], chunk_datums=1) as inner:
            other = inner.create_lora_training_client(MODEL, rank=4).result()
            for client in (training, other):
                output = client.forward_backward([datum([5, 6, 7])] * 2, "cross_entropy").result()
                assert output.metrics["loss:sum"] > 0
            assert inner.holder._base_url != outer.holder._base_url
            url = inner.holder._base_url
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/api/v1/healthz")
        path = training.save_state("a").result().path
    with trimtab.local(model=model, data_dir=kept) as again:
        resumed = again.create_training_client_from_state(path).result()
        assert resumed.get_info().lora_rank == 4
    left = set(threading.enumerate()) - before  # the SDK keeps its own
    assert not [thread for thread in left if thread.name.startswith(OURS) or not thread.daemon]


def test_a_rounded_sampler_differs_from_its_learner_a_little(model_folder):
    with trimtab.local(model=f"{MODEL}={model_folder}", sampler_dtype="int8") as service:
        training = service.create_lora_training_client(MODEL, rank=4).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        drawn = sampler.compute_logprobs(prompt(5, 6, 7, 8)).result()[1:]
        (learned,) = logprobs(training.forward([datum([5, 6, 7, 8])], "cross_entropy").result())
    gap = np.abs(learned - np.array(drawn)).max()
    assert 1e-5 < gap < 0.3


def test_what_is_wrong_is_raised_before_the_block(model_folder):
    unknown = trimtab.local(model=f"{MODEL}={model_folder}", colour="red")
    with pytest.raises(Invalid, match="colour"), unknown:
        pytest.fail("entered")
    empty = trimtab.local(model=f"org/empty={model_folder.parent}")
    with pytest.raises(NotFound, match=r"config\.json"), empty:
        pytest.fail("entered")
