"""The numbers and tables of docs/reinforce_pp.md, and the examples in docstrings, are true."""

import dataclasses
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.trainer.reinforce_pp import ReinforcePPConfig, advantages

DOC = Path(__file__).parents[2] / "docs" / "reinforce_pp.md"
MODULES = (
    "reinforce_pp",
    "reinforce_pp_config",
    "reinforce_pp_state",
    "returns",
    "reward_shaping",
    "stats",
)


def test_the_worked_example_of_the_page():
    found = doctest.testfile(str(DOC), module_relative=False)
    assert found.attempted >= 12 and found.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"trimtab.trainer.{name}"))
    assert found.attempted >= 1 and found.failed == 0


def section(title):
    return DOC.read_text().split(f"### {title}\n")[1].split("\n#")[0]


def test_every_option_stands_in_the_page_with_its_default():
    table = section("Options")
    for field in dataclasses.fields(ReinforcePPConfig):
        assert f"`{field.name}`" in table and len(field.metadata["doc"]) > 10
    for name, default in (("kl_clamp", "10"), ("gamma", "1"), ("whiten", "full")):
        assert f"| `{name}` | {default} |" in table
        assert str(getattr(ReinforcePPConfig(), name)).removesuffix(".0") == default


def test_every_metric_stands_in_the_page():
    config = ReinforcePPConfig(
        group_baseline=True, truncated_reward=0.0, reward_norm="batch", kl_coef=0.1
    )
    ones = [[1.0]] * 2
    found = advantages(
        [1, 0], ones, ones, ones, config=config, group_ids=[0, 0], truncated=[True, False]
    )
    table = section("Metrics")
    for name in found.metrics:
        step = re.sub(r"/(mean|std|min|max)$", "/", name)
        assert f"`{name}`" in table or f"`{step}mean`" in table or f"`{step}…`" in table, name


def test_the_mathematics_loads_neither_a_model_nor_a_client():
    code = (
        "import sys, trimtab.trainer.reinforce_pp, trimtab.trainer.ppo\n"
        "rooms = ('torch', 'tinker', 'transformers', 'trimtab.wire', 'trimtab.service', "
        "'trimtab.engine', 'trimtab.losses')\n"
        "print([room for room in rooms if room in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
