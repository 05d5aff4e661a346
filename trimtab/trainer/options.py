"""Options from `key=value` words: defaults of the task, a saved run, then the command line.

Knows chz and the Config class; no server.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import chz
from chz.blueprint import InvalidBlueprintArg

from trimtab.errors import Invalid
from trimtab.trainer.config import Config

FIELDS = chz.chz_fields(Config)


def given(words: Sequence[str]) -> dict[str, str]:
    """given(["steps=50", "seed=1"]) = {"steps": "50", "seed": "1"}; refuses unknown keys."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise Invalid(f"{word!r} is not an option; write options as key=value, e.g. steps=50")
        known(name)
        found[name] = value
    return found


def known(name: str) -> None:
    if name not in FIELDS:
        close = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see trimtab train --help"
        raise Invalid(f"there is no option {name!r}{hint}")


def config(*layers: Mapping[str, Any]) -> Config:
    """A Config of these layers, later ones winning. Strings are read as on a command line.

    >>> config({"steps": 10}, {"steps": "20", "learning_rate": "3e-4"}).steps
    20
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name in layer:
            known(name)
        merged |= layer
    words = [f"{name}={_word(value)}" for name, value in merged.items()]
    try:
        return chz.Blueprint(Config).make_from_argv(words)
    except InvalidBlueprintArg as error:
        raise Invalid(_unreadable(merged, error)) from error


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(v) for v in value)
    return str(value)


def _unreadable(merged: Mapping[str, Any], error: Exception) -> str:
    name = next((n for n in merged if f"'{n}'" in str(error)), "an option")
    allowed = _kind(FIELDS[name].x_type) if name in FIELDS else "another form"
    return f"{name} is {_word(merged.get(name, ''))!r}; it must be {allowed}"


def _kind(kind: Any) -> str:
    """A type in words: "a, b or c" for a Literal."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if kind in names:
        return names[kind]
    if kind is type(None):
        return "None"
    arguments = get_args(kind)
    if arguments and all(isinstance(a, str) for a in arguments):
        return "one of " + ", ".join(arguments)
    if arguments and getattr(kind, "__origin__", None) is tuple:
        return "numbers joined by commas, e.g. -10,10"
    return " or ".join(_kind(a) for a in arguments) if arguments else str(kind)


def help_lines() -> list[tuple[str, str, str, str]]:
    """(name, type, default, what it does) of every option, in the order of Config."""
    return [(name, _type_name(f.x_type), str(f._default), f._doc) for name, f in FIELDS.items()]


def _type_name(kind: Any) -> str:
    arguments = get_args(kind)
    if arguments and all(isinstance(a, str) for a in arguments):
        return "|".join(arguments)
    plain = [a for a in arguments if a is not type(None)] if arguments else [kind]
    return "|".join(getattr(a, "__name__", str(a)) for a in plain)
