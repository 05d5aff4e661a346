"""Reading JSON objects field by field: unknown fields are ignored, a wrong type names its field.

Knows nothing of what the fields mean. `null` counts as absent; the SDK never means more by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from trimtab.errors import Invalid

INT64 = range(-(2**63), 2**63)


def kind_of(value: object) -> str:
    """What a JSON value is called in an error: `kind_of([1]) == "a list"`."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and where it stands.

    `Fields.parse(b'{"rank": "4"}').integer("rank")` raises Invalid
    ("rank: an integer is required, found text").
    """

    values: Mapping[str, object]
    where: str = ""

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Invalid(f"body: not valid JSON ({error})") from None
        return cls.of(value, "body", "")

    @classmethod
    def of(cls, value: object, where: str, prefix: str | None = None) -> Fields:
        if not isinstance(value, dict):
            raise Invalid(f"{where}: an object is required, found {kind_of(value)}")
        return cls(value, f"{where}." if prefix is None else prefix)

    def name(self, field: str) -> str:
        """Where the field stands; a name that would break the line is quoted."""
        return f"{self.where}{field if field.isprintable() else repr(field)}"

    def wrong(self, field: str, wanted: str) -> Invalid:
        found = kind_of(self.values.get(field))
        return Invalid(f"{self.name(field)}: {wanted} is required, found {found}")

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def only(self, *names: str) -> None:
        """Refuse options nothing here would honour; for objects that hold nothing but options."""
        unknown = sorted(set(self.values) - set(names))
        if unknown:
            raise Invalid(f"{self.name(unknown[0])}: unknown; allowed are {', '.join(names)}")

    def text(self, field: str) -> str:
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "text")
        return value

    def text_or_none(self, field: str) -> str | None:
        return self.text(field) if self.has(field) else None

    def integer(self, field: str, default: int | None = None, allowed: range = INT64) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise self.wrong(field, "an integer")
        if value not in allowed:
            raise Invalid(
                f"{self.name(field)}: {value} is outside {allowed.start} to {allowed.stop - 1}"
            )
        return value

    def integer_or_none(self, field: str, allowed: range = INT64) -> int | None:
        return self.integer(field, allowed=allowed) if self.has(field) else None

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.wrong(field, "a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise Invalid(f"{self.name(field)}: a finite number is required, found {number}")
        return number

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def items(self, field: str) -> list[object]:
        value = self.values.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, "a list")
        return value

    def sub(self, field: str) -> Fields | None:
        """The object under `field`, or None where there is none."""
        if not self.has(field):
            return None
        return Fields.of(self.values[field], self.name(field))

    def subs(self, field: str) -> list[Fields]:
        """A list of objects."""
        name = self.name(field)
        return [Fields.of(value, f"{name}[{i}]") for i, value in enumerate(self.items(field))]

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of texts; absent means empty."""
        values = self.items(field) if self.has(field) else []
        for index, value in enumerate(values):
            if not isinstance(value, str):
                where, found = f"{self.name(field)}[{index}]", kind_of(value)
                raise Invalid(f"{where}: text is required, found {found}")
        return tuple(str(value) for value in values)

    def text_map(self, field: str) -> dict[str, str] | None:
        """An object whose values are all text, such as user_metadata."""
        found = self.sub(field)
        if found is None:
            return None
        return {name: found.text(name) for name in found.values}
