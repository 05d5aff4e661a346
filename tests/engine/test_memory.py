"""What memory there is, what a pass needs of it, and which errors mean that it ran out."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.engine import memory as module
from trimtab.engine.batching import MicroBatch
from trimtab.engine.cores import Cores
from trimtab.engine.memory import (
    MIB,
    SHARE,
    Memory,
    NoRoom,
    available_bytes,
    is_out_of_memory,
    machine_bytes,
    resident_bytes,
)
from trimtab.engine.torch_learner import TorchLearner
from trimtab.types import LoraConfig, TrainingDatum

from .reference import forward_backward

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (NoRoom(2, 1, 3, True), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_which_errors_mean_that_memory_ran_out(error, ran_out):
    assert is_out_of_memory(error) is ran_out


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_what_is_taken_is_not_free_and_comes_back(monkeypatch):
    monkeypatch.setattr(module, "resident_bytes", lambda: 100 * MIB)
    memory = Memory(400 * MIB)
    assert memory.free() == 300 * MIB
    with memory.taking(200 * MIB):
        assert memory.free() == 100 * MIB
        with pytest.raises(NoRoom) as caught, memory.taking(150 * MIB):
            pass
        told = "about 150 MiB are needed, and 100 MiB of the 400 MiB that memory_mib allows"
        assert str(caught.value).startswith(told) and caught.value.fits
    memory.check(300 * MIB)
    with pytest.raises(NoRoom) as caught:
        memory.check(500 * MIB)
    assert not caught.value.fits


def test_the_machine_bounds_it_too(monkeypatch):
    """A neighbour that fills the machine leaves less than the limit says."""
    monkeypatch.setattr(module, "available_bytes", lambda: 10 * MIB)
    assert Memory(2**50).free() == 10 * MIB


def test_a_cgroup_counts_where_it_is_smaller(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    assert machine_bytes() > 64 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    whole = machine_bytes()
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    assert machine_bytes() == 64 * MIB < whole
    assert Memory().limit == int(SHARE * 64 * MIB)
    (tmp_path / "memory.current").write_text(f"{50 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {6 * MIB}\n")
    assert available_bytes() == 20 * MIB


@needs_proc
def test_own_pages_are_counted():
    before = resident_bytes()
    block = np.ones(64 * MIB, np.uint8)
    assert 60 * MIB < resident_bytes() - before < 70 * MIB
    del block


def test_two_threads_do_not_take_the_same_bytes(monkeypatch):
    monkeypatch.setattr(module, "resident_bytes", lambda: 0)
    memory, took = Memory(100), []

    def take():
        try:
            with memory.taking(60):
                took.append(1)
                both.wait(5)
        except NoRoom:
            took.append(0)
            both.wait(5)

    both = threading.Barrier(2)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(took) == [0, 1] and memory.free() == 100


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


@needs_proc
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_pass_needs_what_was_said_or_somewhat_less(base_of, architecture):
    """Held against the process' own high-water mark; Gemma's attention keeps its scores."""
    base = base_of(architecture)
    learner = TorchLearner(base, micro_batch_tokens=10_000, cores=Cores(1))
    learner.create("m", LoraConfig(rank=4, seed=1))
    rows = np.zeros(64, np.int64)
    data = tuple(
        TrainingDatum(np.full(64, i, np.int32), {"target_tokens": rows}) for i in range(64)
    )
    need = learner._need(learner._model("m"), MicroBatch.of(0, data), True) / MIB
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    before = peak_mib()
    forward_backward(learner, data)
    assert 20 < peak_mib() - before < need < 3 * (peak_mib() - before)
