"""Which of a server's models a run trains."""

import asyncio
from types import SimpleNamespace

import pytest

from trimtab.errors import Invalid
from trimtab.trainer.connect import choose_model

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def chosen(wanted, *offered):
    models = [
        SimpleNamespace(model_name=name, max_context_length=128, trainable=name != "frozen")
        for name in offered
    ]

    async def capabilities():
        return SimpleNamespace(supported_models=models)

    rest = SimpleNamespace(get_server_capabilities=capabilities)
    return asyncio.run(choose_model(rest, wanted)).name


@pytest.mark.parametrize(
    ("wanted", "offered", "expected"),
    [
        ("a", ("a", "b"), "a"),
        ("", ("a",), "a"),
        ("", ("a", "frozen"), "a"),
        ("a=./folder", ("a",), "a"),
        ("smollm2", (SMOLLM2,), SMOLLM2),
        ("smollm2", ("a", SMOLLM2), SMOLLM2),
    ],
)
def test_a_model_is_found_by_its_names(wanted, offered, expected):
    assert chosen(wanted, *offered) == expected


@pytest.mark.parametrize(
    ("wanted", "told"),
    [("", r"several models \(a, b\); choose one"), ("c", "model is 'c'; the server offers a, b")],
)
def test_another_is_refused_with_those_on_offer(wanted, told):
    with pytest.raises(Invalid, match=told):
        chosen(wanted, "a", "b")
