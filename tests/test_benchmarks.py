"""The benchmarks' arithmetic: floors by hand, ratios, targets read from results."""

import json
import sys

import pytest

from benchmarks import report, targets
from benchmarks.floors import Rates, Shape
from benchmarks.learning import MEMBERS, batches, shared_tokens
from benchmarks.turns import versus
from trimtab import tiny

SHAPE = Shape(parameters=100, lora=10, layers=2, queries=4, keys=2, vocabulary=9)


def test_a_shape_counts_every_linear_once_and_the_head_apart_from_lora(tmp_path):
    path = tiny.build(
        tmp_path / "m", hidden=8, layers=1, heads=2, kv_heads=1, intermediate=16, vocab_size=300
    )
    shape = Shape.of(path)
    inside = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 16), (8, 16), (16, 8)]
    assert shape.parameters == sum(i * o for i, o in inside) + 8 * 300
    assert shape.lora == sum(i + o for i, o in inside)
    assert (shape.queries, shape.keys, shape.vocabulary) == (8, 4, 300)


def test_a_decode_step_reads_weights_once_and_a_prompt_once_for_its_samples():
    by_bytes, by_flops = SHAPE.decode_seconds(Rates(1.0, 1.0), 2, 3, prompt=5, own=7)
    assert by_bytes == 4 * 100 + (2 * 5 + 6 * 7) * 2 * 2 * 2 * 4
    assert by_flops == 6 * (2 * 100 + 4 * 12 * 4 * 2)


def test_a_shared_prompt_needs_its_flops_once():
    apart = SHAPE.learning_flops([(0, [4]), (0, [4])], rank=3)
    together = SHAPE.learning_flops([(2, [2, 2])], rank=3)
    linear, pair = 4 * 100 + 6 * 3 * 10, 12 * 4 * 2
    assert apart == 8 * linear + 2 * (1 + 2 + 3 + 4) * pair
    assert together == 6 * linear + ((1 + 2) + 2 * (3 + 4)) * pair


def test_groups_share_half_of_what_they_are_made_of(tmp_path):
    path = tiny.build(tmp_path / "m", hidden=8, layers=1, heads=2, kv_heads=1, intermediate=16)
    made = batches(path, datums=2 * MEMBERS, length=10)
    assert shared_tokens(made["groups"]) == 5
    assert shared_tokens(made["unrelated"]) == 0


def test_a_ratio_is_taken_within_a_round():
    ticks = iter([0, 1, 1, 3, 3, 5, 5, 6, 0, 10, 10, 30, 30, 50, 50, 60])
    found = versus(lambda: 8, lambda: 8, 2, lambda: next(ticks))
    assert found["ratio"] == 2.0 and found["one, tok/s"] == pytest.approx((8 + 0.8) / 2)


def test_targets_are_read_from_the_results_and_written_between_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    results = {"trimtab --help, s": 0.7, "trimtab serve: first step, s": 9.5}
    (tmp_path / "startup-tiny.json").write_text(json.dumps(results))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{targets.BEGIN}\nold\n{targets.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["targets", "--into", str(page)])
    targets.main()
    text = page.read_text()
    assert "| `trimtab --help`, s | tiny | ≤ 0.5 | 0.7 | missed |" in text
    assert "| `trimtab serve` to the first training step, s | tiny | ≤ 10 | 9.5 | met |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_every_target_names_a_number_that_the_kept_results_have():
    """But for opponents that were not installed then."""
    for target in targets.targets():
        file = report.RESULTS / f"{target.benchmark}-{target.model}.json"
        kept = file.exists() and "against TRL" not in target.path
        assert not kept or target.value() is not None, target
