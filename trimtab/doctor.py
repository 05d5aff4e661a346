"""What this machine has, in lines of text: libraries, cores, arithmetic, the data directory."""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

SIZE = 1024


def report(data_dir: Path) -> Iterator[str]:
    """The lines one by one; the measurements take a few seconds."""
    yield from _libraries()
    yield from _arithmetic()
    yield from _data(data_dir)


def _libraries() -> Iterator[str]:
    from trimtab.wire.sessions import TESTED_SDK

    yield f"python        {platform.python_version()} on {platform.machine()} {platform.system()}"
    for name in ("torch", "transformers"):
        yield f"{name:13} {_version(name)}"
    sdk = _version("tinker")
    told = "as tested" if sdk == TESTED_SDK else f"tested with {TESTED_SDK}"
    yield f"tinker SDK    {sdk} ({told})"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _arithmetic() -> Iterator[str]:
    import torch

    yield f"cores         {os.cpu_count()}, torch uses {torch.get_num_threads()}"
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
        yield f"accelerator   {torch.cuda.get_device_name()}"
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            rate = _rate(torch, dtype, device)
            name = str(dtype).removeprefix("torch.")
            yield f"matmul        {name:9} on {device}: {rate:9.1f} GFLOP/s"


def _rate(torch: Any, dtype: Any, device: str) -> float:
    """The best of three products of SIZE x SIZE matrices, in 10**9 operations a second."""
    x = torch.ones(SIZE, SIZE, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * SIZE**3 / best / 1e9


def _data(data_dir: Path) -> Iterator[str]:
    if not data_dir.is_dir():
        yield f"data          {data_dir}: nothing there yet"
        return
    sizes = [path.stat().st_size for path in data_dir.rglob("*") if path.is_file()]
    yield f"data          {data_dir}: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
    yield from _sequences(data_dir)


def _sequences(data_dir: Path) -> Iterator[str]:
    """What is recorded of sampled sequences, whether a server is running on it or not."""
    from trimtab.service.sequences import held_in
    from trimtab.service.store import FILE

    if not (data_dir / FILE).exists():
        return
    try:
        held = held_in(data_dir / FILE)
    except sqlite3.Error as error:
        yield f"sequences     cannot be read: {error}"
        return
    yield (
        f"sequences     {held.sequences} held, {held.tokens} tokens, {held.recorded} of them with"
        f" stability information; {held.array_bytes / 2**20:.1f} MiB"
    )
