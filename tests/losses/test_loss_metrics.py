"""Metrics of datums, micro-batches and chunks join exactly, and carry names the SDK accepts."""

import math

import pytest
import torch
from loss_tables import every_metric
from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP

from trimtab.losses import LOSSES
from trimtab.losses.experimental import EXPERIMENTAL
from trimtab.losses.metrics import combine, counts, highest, lowest, means


def test_sums_add_and_extremes_compare():
    parts = [
        {"n:sum": 2.0, "tv:max": torch.tensor(0.25), "age:min": torch.tensor(3.0)},
        {"n:sum": torch.tensor(3.0), "tv:max": torch.tensor(0.5), "age:min": 1.0},
        {"n:sum": 0.0, "tv:max": torch.tensor(-math.inf), "age:min": math.inf, "only:sum": 1.0},
    ]
    wanted = {"n:sum": 5.0, "tv:max": 0.5, "age:min": 1.0, "only:sum": 1.0}
    assert combine(parts) == combine([combine(parts[:1]), combine(parts[1:])]) == wanted
    assert combine([{"tv:max": -math.inf}, {}]) == combine([]) == {}


def test_a_mean_is_two_sums_over_its_rows():
    rows = torch.tensor([True, False, True])
    values = torch.tensor([1.0, math.nan, 4.0])
    columns = means(rows, {"w": values}) | means(torch.zeros(3) > 0, {"none": values})
    columns |= highest("w", values, rows) | lowest("w", values, rows) | counts({"n": rows})
    found = combine([columns])
    assert found == {
        "w/num:sum": 5.0,
        "w/den:sum": 2.0,
        "none/num:sum": 0.0,
        "none/den:sum": 0.0,
        "w:max": 4.0,
        "w:min": 1.0,
        "n:sum": 2.0,
    }


@pytest.mark.parametrize("name", sorted(LOSSES | EXPERIMENTAL))
def test_every_name_has_one_colon_and_a_reduction_of_the_sdk(name):
    metrics = every_metric((LOSSES | EXPERIMENTAL)[name])
    assert metrics
    for key, value in metrics.items():
        stem, reduction = key.split(":")
        assert reduction in REDUCE_MAP and reduction in ("sum", "max", "min")
        assert not stem.endswith("/num") or f"{stem[:-4]}/den:sum" in metrics
        assert math.isfinite(value)
