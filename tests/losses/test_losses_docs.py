"""docs/losses.md lists every loss, key, default and metric of the tables, and nothing else."""

import re
from pathlib import Path

import pytest
from loss_tables import every_metric

from trimtab.losses import LOSSES
from trimtab.losses.experimental import EXPERIMENTAL

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "losses.md").read_text()
DERIVATION = (DOCS / "stable_reinforce.md").read_text()


def rows(heading):
    """{first cell: the other cells} of the table whose head starts with `heading`."""
    _, found, after = PAGE.partition(f"\n| {heading} |")
    assert found, f"no table of {heading}"
    lines = [line for line in after.split("\n\n")[0].splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in cells}


def words(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_the_table_of_losses_is_the_table():
    table = rows("loss")
    assert list(table) == list(LOSSES)
    for name, (_, _, inputs, config) in table.items():
        spec = LOSSES[name].spec
        assert set(words(inputs)) == set(spec.inputs)
        wanted = [(key, str(value.default)) for key, value in spec.config.items()]
        assert re.findall(r"`(\w+)` ([\d.]+)", config) == wanted


def test_the_table_of_keys_is_the_specs():
    table = rows("key")
    found = {
        (loss, key, float(default))
        for key, (losses, defaults, *_) in table.items()
        for loss, default in zip(words(losses), defaults.split(", "), strict=True)
    }
    specs = [loss.spec for loss in LOSSES.values()]
    assert found == {(s.name, key, value.default) for s in specs for key, value in s.config.items()}
    assert all(value.low == 0 for s in specs for value in s.config.values())
    for spec in specs:
        assert spec.ordered == (
            (("clip_low_threshold", "clip_high_threshold"),) if len(spec.config) == 2 else ()
        )


@pytest.mark.parametrize("name", LOSSES)
def test_the_table_of_metrics_is_what_is_sent(name):
    documented = set()
    for metric, (sent, losses, _) in rows("metric").items():
        if name in words(losses) if not losses.startswith("all") else name not in words(losses):
            for form in sent.split(", "):
                mean = {f"{metric}/num:sum", f"{metric}/den:sum"}
                documented |= mean if form == "mean" else {f"{metric}:{form}"}
    assert set(every_metric(LOSSES[name])) == documented


def test_the_alternatives_are_listed():
    assert set(EXPERIMENTAL) <= set(words(PAGE.partition("## Alternatives")[2]))


def test_the_derivation_names_tests_that_exist():
    source = (Path(__file__).parent / "test_stable_reinforce.py").read_text()
    named = re.findall(r"`(test_\w+)`", DERIVATION)
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in source] == []
