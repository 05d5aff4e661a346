"""Every promise names the tests that prove it, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.compile(r"^`(tests/\S+\.py)::(\w+)`$", re.MULTILINE)
DEFINED = re.compile(r"^def (\w+)\(", re.MULTILINE)


def functions(file):
    return set(DEFINED.findall((ROOT / file).read_text()))


def test_the_tests_that_are_named_exist():
    named = NAMED.findall(PAGE)
    assert len(named) > 20
    missing = [f"{file}::{name}" for file, name in named if name not in functions(file)]
    assert missing == []


def test_every_promise_names_one():
    promised = PAGE[: PAGE.index("## What is not promised")]
    for part in re.split(r"\n\n(?=\*\*)", promised)[1:]:
        assert NAMED.search(part), part
