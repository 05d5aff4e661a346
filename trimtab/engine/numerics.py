"""Which dtype to compute in, by a short measurement.

float32 is what agreement is promised in. "auto" takes bfloat16 only for a checkpoint stored in 16
bits and on a device that multiplies it clearly faster, which CPUs without bfloat16 units do not (by
a factor of 0.01 on some). Knows nothing of models.
"""

from __future__ import annotations

import time

import torch

from trimtab.errors import Invalid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZE = 384
GAIN = 1.5


def choose_dtype(
    field: str, asked: str, device: torch.device, stored: torch.dtype | str
) -> torch.dtype:
    """The dtype `asked` names; for "auto", the faster one that loses nothing of a checkpoint
    `stored` like this."""
    if asked in DTYPES:
        return DTYPES[asked]
    if asked != "auto":
        more = ", int8, int4" if field == "sampler_dtype" else ""
        raise Invalid(f"{field} is {asked!r}; allowed are auto, {', '.join(DTYPES)}{more}")
    if str(stored).removeprefix("torch.") not in ("bfloat16", "float16"):
        return torch.float32
    fast = seconds(torch.bfloat16, device) * GAIN < seconds(torch.float32, device)
    return torch.bfloat16 if fast else torch.float32


def seconds(dtype: torch.dtype, device: torch.device) -> float:
    """The best of three products of SIZE x SIZE matrices."""
    x = torch.ones(SIZE, SIZE, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        (x @ x)[0, 0].item()  # waits for an accelerator to finish
        best = min(best, time.perf_counter() - started)
    return best
