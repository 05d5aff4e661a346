"""How metrics are named and joined. Knows no loss.

Every mean `m` travels as two sums, `m/num:sum` and `m/den:sum`, so that datums, micro-batches and
chunks of a request add up exactly; whoever shows it divides. Extremes travel as `m:max`, `m:min`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trimtab.losses.base import Metrics

REDUCE: Mapping[str, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "mean": sum,  # over datums; see `combine`
    "max": max,
    "min": min,
}
EXTREMES = (":max", ":min")


def combine(
    outputs: Sequence[Mapping[str, float | Tensor]], datums: int | None = None
) -> dict[str, float]:
    """Join the metrics of several datums (or of several micro-batches) by their suffixes, with one
    transfer from the device. An extreme that is infinite (taken over no rows) is left out. A
    `:mean` (only custom losses have them) comes as a sum over datums, divided here by their number.

    combine([{"n:sum": 1.0, "tv:max": 0.2}, {"n:sum": 2.0, "tv:max": -inf}])
    == {"n:sum": 3.0, "tv:max": 0.2}
    """
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in _to_floats(outputs):
        values[name].append(value)
    joined = {name: REDUCE[name.split(":")[1]](found) for name, found in values.items()}
    if datums is not None:
        joined = {n: v / datums if n.endswith(":mean") else v for n, v in joined.items()}
    return {n: v for n, v in joined.items() if not (n.endswith(EXTREMES) and math.isinf(v))}


def _to_floats(outputs: Sequence[Mapping[str, float | Tensor]]) -> list[tuple[str, float]]:
    pairs = [(name, value) for metrics in outputs for name, value in metrics.items()]
    tensors = [value for _, value in pairs if isinstance(value, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    return [(name, next(moved) if isinstance(v, Tensor) else float(v)) for name, v in pairs]


def means(rows_N: Tensor, values: Mapping[str, Tensor]) -> Metrics:
    """The two sums of the mean of each (N,) value over `rows_N` (bool)."""
    masked = torch.where(rows_N, torch.stack(list(values.values())), 0.0)
    sums = dict(zip(values, masked.float().sum(dim=-1).unbind(), strict=True))
    count = rows_N.sum().float()
    found: Metrics = {f"{name}/num:sum": sums[name] for name in sums}
    return found | {f"{name}/den:sum": count for name in sums}


def counts(rows: Mapping[str, Tensor]) -> Metrics:
    """`name:sum`, the number of rows, for each (N,) bool."""
    sums = torch.stack(list(rows.values())).sum(dim=-1).float().unbind()
    return {f"{name}:sum": found for name, found in zip(rows, sums, strict=True)}


def highest(name: str, values_N: Tensor, rows_N: Tensor) -> Metrics:
    """`name:max` over `rows_N`, -inf over no rows."""
    return {f"{name}:max": torch.where(rows_N, values_N, -math.inf).float().amax()}


def lowest(name: str, values_N: Tensor, rows_N: Tensor) -> Metrics:
    """`name:min` over `rows_N`, +inf over no rows."""
    return {f"{name}:min": torch.where(rows_N, values_N, math.inf).float().amin()}
