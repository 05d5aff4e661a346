"""Who computes on how many cores, and that nobody keeps threads he does not use."""

from __future__ import annotations

import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trimtab.engine.base import SampleWork
from trimtab.engine.cores import Cores
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import WeightsRef

from .sampling import request, sampling, save_adapter, tokens


def on_a_thread(function):
    with ThreadPoolExecutor(1) as one:
        return one.submit(function).result()


def test_a_sampler_takes_all_cores_alone_and_half_beside_a_learner():
    cores = Cores(4)

    def used(learning):
        def sampling():
            cores.sample()
            return torch.get_num_threads()

        if not learning:
            return on_a_thread(sampling)
        with cores.learning():
            return torch.get_num_threads(), on_a_thread(sampling)

    assert on_a_thread(lambda: used(False)) == 4
    assert on_a_thread(lambda: used(True)) == (4, 2)
    assert on_a_thread(lambda: used(False)) == 4


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_an_idle_sampler_keeps_no_team(llama):
    """An idle team makes every other thread's operations wait for theirs to wake up."""

    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    sampler = on_a_thread(lambda: TorchSampler(llama, cores=Cores(2)))
    sampler.publish("base", WeightsRef("base", llama.info.name))
    sampler.start()
    work = SampleWork(request(tokens(4), 2, max_tokens=3), "base", 0)
    for _ in range(2):  # it comes back after it went
        assert len(sampler.submit(work).result(10).sequences) == 2
        end = time.monotonic() + 20
        while threads() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threads() <= before
        assert not any(thread.name == "sampler" for thread in threading.enumerate())
    sampler.stop()


def test_an_idle_sampler_holds_no_more_adapters_than_its_limit(llama, tmp_path):
    with sampling(llama, adapters=1) as sampler:
        for name in ("a", "b"):
            folder = save_adapter(llama, tmp_path / name, seed=1)
            sampler.publish(name, WeightsRef(name, llama.info.name, folder))
            if name == "a":
                [kept] = sampler._shelf._loaded.values()
                factors = [weakref.ref(tensor) for tensor in kept.adapter.parameters()]
                del kept
                sampler.submit(SampleWork(request(tokens(4), 2, max_tokens=3), "a", 0)).result(10)
        end = time.monotonic() + 20
        while any(ref() is not None for ref in factors) and time.monotonic() < end:
            time.sleep(0.02)
        assert factors and all(ref() is None for ref in factors)
