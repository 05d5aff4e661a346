"""What is refused of a custom loss before any of it runs, and by which words.

Knows which operations are allowed from `traced_ops`, and runs none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.errors import Invalid
from trimtab.losses.traced_ops import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    GETATTR,
    METHODS,
    REFUSED_KEYWORDS,
)
from trimtab.types import CustomLoss, CustomLossNode

MOST_NODES = 2_000
MOST_INPUTS = 16
DEEPEST = 8
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check(loss: CustomLoss) -> None:
    def refuse(what: str) -> Invalid:
        return Invalid(f"custom loss {loss.name!r}: {what}")

    names = [i.name for i in loss.inputs]
    if not names or names[0] != "logprobs" or len(set(names)) < len(names):
        raise refuse(f"inputs must begin with logprobs and differ, found {names}")
    if len(names) > MOST_INPUTS:
        raise refuse(f"it has {len(names)} inputs; allowed are {MOST_INPUTS}")
    if loss.inputs[0].rank not in (1, 2) or any(i.rank not in (0, 1, 2) for i in loss.inputs):
        raise refuse("ranks are 0, 1 or 2, and that of logprobs 1 or 2")
    if not 1 <= len(loss.nodes) <= MOST_NODES:
        raise refuse(f"it has {len(loss.nodes)} nodes; allowed are 1 to {MOST_NODES}")
    known: set[str] = set()
    given = []
    for i, node in enumerate(loss.nodes):
        if not _NAME.fullmatch(node.name) or node.name in known:
            raise refuse(f"node {i} is named {node.name!r}, which is no name or there already")
        _check_node(node, known, refuse)
        known.add(node.name)
        if node.op == "placeholder":
            given.append(node.target)
        if (node.op == "output") != (i == len(loss.nodes) - 1):
            raise refuse(f"node {node.name!r}: the output must be the last node, and only there")
    if given != names:
        raise refuse(f"its placeholders are {given}, but its inputs {names}")


def _check_node(node: CustomLossNode, known: set[str], refuse: Callable[[str], Invalid]) -> None:
    if node.op == "call_function":
        if node.target in GETATTR:
            if len(node.args) != 2 or node.args[1] not in ATTRIBUTES or node.kwargs:
                allowed = ", ".join(ATTRIBUTES)
                raise refuse(f"node {node.name!r} asks for an attribute; allowed are {allowed}")
        elif node.target not in FUNCTIONS:
            raise refuse(f"node {node.name!r} calls {node.target!r}, which is not allowed")
    elif node.op == "call_method":
        if node.target not in METHODS or not node.args:
            raise refuse(
                f"node {node.name!r} calls the method {node.target!r}, which is not allowed"
            )
    elif node.op not in ("placeholder", "output"):
        raise refuse(f"node {node.name!r} is a {node.op!r}, which is not allowed")
    for key in node.kwargs.keys() & set(REFUSED_KEYWORDS):
        raise refuse(f"node {node.name!r} passes {key!r}, which is not allowed")
    for arg in [*node.args, *node.kwargs.values()]:
        _check_arg(node, arg, known, refuse, DEEPEST)
    if node.op == "output":
        _check_output(node, refuse)


def _check_arg(
    node: CustomLossNode, arg: Any, known: set[str], refuse: Callable[[str], Invalid], depth: int
) -> None:
    where = f"node {node.name!r}"
    if depth == 0:
        raise refuse(f"{where}: an argument is nested more than {DEEPEST} deep")
    if isinstance(arg, (list, tuple)):
        for part in arg:
            _check_arg(node, part, known, refuse, depth - 1)
        return
    if not isinstance(arg, Mapping):
        if isinstance(arg, int) and abs(arg) >= 2**63:
            raise refuse(f"{where}: {arg} does not fit into 64 bits")
        if not (arg is None or isinstance(arg, (bool, int, float, str))):
            raise refuse(f"{where}: an argument is a {type(arg).__name__}")
        return
    if len(arg) != 1:
        raise refuse(f"{where}: an argument is an object of {len(arg)} keys; it must have one")
    [(kind, inner)] = arg.items()
    good = {
        "ref": lambda: isinstance(inner, str) and inner in known,
        "tuple": lambda: isinstance(inner, (list, tuple)),
        "dict": lambda: isinstance(inner, Mapping),
        "slice": lambda: isinstance(inner, (list, tuple)) and len(inner) == 3,
        "ellipsis": lambda: inner is True,
        "float": lambda: inner in ("inf", "-inf", "nan"),
        "dtype": lambda: isinstance(inner, str) and inner in DTYPES,
        "device": lambda: isinstance(inner, str),
    }.get(kind)
    if good is None or not (isinstance(inner, (str, list, tuple, Mapping)) or inner is True):
        raise refuse(f"{where}: an argument of kind {kind!r} is not allowed")
    if not good():
        raise refuse(f"{where}: {kind} {str(inner)[:80]!r} is not allowed here")
    parts = inner.values() if isinstance(inner, Mapping) else inner
    if isinstance(parts, Iterable) and not isinstance(parts, str):
        for part in parts:
            _check_arg(node, part, known, refuse, depth - 1)


def _check_output(node: CustomLossNode, refuse: Callable[[str], Invalid]) -> None:
    [output] = node.args if len(node.args) == 1 else [None]
    parts = output.get("tuple") if isinstance(output, Mapping) else output
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not _is_ref(parts[0]):
        raise refuse("its output must be (loss, metrics)")
    metrics = parts[1].get("dict") if isinstance(parts[1], Mapping) else None
    if not isinstance(metrics, Mapping):
        raise refuse("its metrics must be a dict")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name) or not _is_ref(value):
            raise refuse(
                f"metric {name!r} must be a tensor named custom/<name>:sum or custom/<name>:mean"
            )


def _is_ref(arg: Any) -> bool:
    return isinstance(arg, Mapping) and list(arg) == ["ref"]
