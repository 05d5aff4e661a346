"""How much memory there is, how much of it is free, and what running out of it looks like.

A `Memory` is one limit for all engines of this process. What is about to be computed asks for its
need first (`taking`), so that work too large is split or refused by name, and the kernel never has
to end the process. On a CPU the limit counts this process' own pages, and the room that the machine
and its cgroup have left counts too; on an accelerator it is the device's memory. Knows nothing of
models, requests or queues.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MIB = 2**20
SHARE = 0.85
"""Of the machine's (or its cgroup's, or the device's) memory, where no limit is set."""
KEPT = 512 * MIB
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_CGROUP = Path("/sys/fs/cgroup")
_TOLD = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


class NoRoom(MemoryError):
    """What is asked for does not fit now. `fits` says whether it would, were nothing else there."""

    def __init__(self, need: int, free: int, limit: int, fits: bool) -> None:
        super().__init__(
            f"about {_mib(need)} MiB are needed, and {_mib(max(free, 0))} MiB of the"
            f" {_mib(limit)} MiB that memory_mib allows are free"
        )
        self.fits = fits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: NoRoom, Python's MemoryError, torch's error for a device, or
    the RuntimeError that torch raises for the CPU.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error).lower() for t in _TOLD)


def first_line(error: BaseException) -> str:
    """What an error says, without the rest that torch tells programmers."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Memory:
    """`limit` in bytes; None takes a share of what there is.

    >>> memory = Memory(limit=4 * 2**30)
    >>> with memory.taking(2**28):
    ...     loss.backward()
    """

    def __init__(self, limit: int | None = None, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self.limit = int(SHARE * self._total()) if limit is None else limit
        self._lock = threading.Lock()
        self._taken = 0
        self._spare: list[Callable[[], None]] = []

    def may_free(self, give_up: Callable[[], None]) -> None:
        """`give_up` frees what is kept for speed alone. Where memory is short it is called, from
        whatever thread asks; it must not ask for memory itself."""
        self._spare.append(give_up)

    @contextmanager
    def taking(self, need: int) -> Iterator[None]:
        """Hold `need` bytes for the block; NoRoom where they are not free."""
        with self._lock:
            self._ask(need)
            self._taken += need
        try:
            yield
        finally:
            with self._lock:
                self._taken -= need

    def check(self, need: int) -> None:
        """Raise NoRoom unless `need` bytes are free now."""
        with self._lock:
            self._ask(need)

    def _ask(self, need: int) -> None:
        if need > self.free() and need > self._reclaimed():
            raise NoRoom(need, self.free(), self.limit, fits=need <= self.limit)

    def free(self) -> int:
        """Bytes that may still be used: under the limit, and of what the machine has left."""
        if self._device.type == "cuda":
            inside = torch.cuda.memory_reserved(self._device)
            left = torch.cuda.mem_get_info(self._device)[0] + inside
            held = torch.cuda.memory_allocated(self._device)
            return min(self.limit, left) - held - self._taken
        return min(self.limit - resident_bytes(), available_bytes()) - self._taken

    def _reclaimed(self) -> int:
        """`free` once everything that nobody needs is given back."""
        for give_up in self._spare:
            give_up()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(OSError, AttributeError):  # glibc has it; others need it less
                ctypes.CDLL(None).malloc_trim(0)
        return self.free()

    def _total(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.get_device_properties(self._device).total_memory
        return machine_bytes()


# ------------------------------------------------------------------ what the kernel says


def resident_bytes() -> int:
    """This process' own pages in memory, files it maps apart; 0 where the kernel does not say."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def machine_bytes() -> int:
    """The machine's memory, or the cgroup's where that is less."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _number("memory.max", "memory/memory.limit_in_bytes")
    return pages if limit is None else min(pages, limit)


def available_bytes() -> int:
    """What the machine, and the cgroup, could still hand out without taking it from anybody."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**62
    found = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")), 2**62)
    limit = _number("memory.max", "memory/memory.limit_in_bytes")
    used = _number("memory.current", "memory/memory.usage_in_bytes")
    if limit is None or used is None:
        return found
    return min(found, limit - used + _reclaimable())


def keep_freed(size: int = KEPT) -> None:
    """Let glibc keep up to `size` freed bytes for what is allocated next. A learner frees a pass'
    memory and asks for as much again; what the kernel takes back it zeroes anew, page by page (3 to
    5% of a small model's step). `Memory` still gives all of it back before it refuses anything."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 32 * MIB)  # the most it accepts
        libc.mallopt(_TRIM_THRESHOLD, size)


def _number(*names: str) -> int | None:
    """The first of these cgroup files that holds a number (version 2, then 1)."""
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            return int((_CGROUP / name).read_text())
    return None


def _reclaimable() -> int:
    """Bytes of files in the cgroup that the kernel would drop first."""
    for name in ("memory.stat", "memory/memory.stat"):
        with contextlib.suppress(OSError):
            for line in (_CGROUP / name).read_text().splitlines():
                field, _, value = line.partition(" ")
                if field in ("inactive_file", "total_inactive_file"):
                    return int(value)
    return 0


def _mib(count: int) -> int:
    return round(count / MIB)
