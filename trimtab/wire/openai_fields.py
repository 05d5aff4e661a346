"""What an OpenAI client asks for, read field by field.

Nothing is ignored: an option that is not honoured here is refused by name, unless its value asks
for nothing (`frequency_penalty: 0`); a field nobody knows is refused too. `null` counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.errors import Invalid
from trimtab.types import SamplingParams, Text
from trimtab.wire.fields import Fields, kind_of

COMPLETION_TOKENS = 16  # max_tokens of a completion where none is given, as in OpenAI's API
MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_CHOICES = 1024
SEED = 2**63 - 1

COMMON = ("model", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop")
COMPLETION = (*COMMON, "prompt", "max_tokens", "logprobs")
CHAT = (
    *COMMON, "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
)  # fmt: skip
# Options that are not offered, and the values with which they ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """`logprobs` is the number of alternatives a token, None where none of it is asked for."""

    model: str
    n: int
    params: SamplingParams
    logprobs: int | None
    stream: bool
    usage: bool


def completion(fields: Fields) -> Asked:
    _refuse(fields, COMPLETION)
    logprobs = fields.integer_or_none("logprobs", range(MOST_LOGPROBS + 1))
    most = fields.integer("max_tokens", COMPLETION_TOKENS, range(1, 2**31))
    return _asked(fields, most, logprobs)


def chat(fields: Fields) -> Asked:
    _refuse(fields, CHAT)
    top = fields.integer_or_none("top_logprobs", range(MOST_LOGPROBS + 1))
    wanted = fields.flag("logprobs", False)
    if top is not None and not wanted:
        raise Invalid("top_logprobs: given, but logprobs is not true")
    return _asked(fields, _most(fields), (top or 0) if wanted else None)


def prompts(fields: Fields, text: Text) -> list[list[int]]:
    """The prompts of a completion: text, a list of texts, token ids, or a list of such lists."""
    value = fields.values.get("prompt")
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    found = value if several else [value]
    assert isinstance(found, list)
    if len(found) > MOST_CHOICES:
        raise Invalid(f"prompt: {len(found)} prompts; allowed are 1 to {MOST_CHOICES}")
    names = [f"prompt[{i}]" if several else "prompt" for i in range(len(found))]
    return [_prompt(each, name, text) for each, name in zip(found, names, strict=True)]


def messages(fields: Fields) -> list[dict[str, object]]:
    """Messages as templates read them: role and text."""
    found = fields.subs("messages")
    if not found:
        raise Invalid("messages: empty; at least one is required")
    return [_message(message) for message in found]


def _message(message: Fields) -> dict[str, object]:
    for name in message.values:
        if name not in ("role", "content") and message.has(name):
            raise Invalid(f"{message.name(name)}: not offered; messages have role and content")
    content = message.values.get("content")
    if isinstance(content, list):
        parts = message.subs("content")
        for part in parts:
            kind = part.text("type")
            if kind != "text":
                raise Invalid(f"{part.name('type')}: {kind[:40]!r} is not offered, only 'text'")
            part.only("type", "text")
        content = "".join(part.text("text") for part in parts)
    elif not isinstance(content, str):
        raise message.wrong("content", "text or a list of text parts")
    return {"role": message.text("role"), "content": content}


def _prompt(value: object, name: str, text: Text) -> list[int]:
    if isinstance(value, str):
        ids = text.encode(value)
    elif isinstance(value, list) and all(type(each) is int for each in value):
        ids = value
    else:
        raise Invalid(f"{name}: text or a list of token ids is required, found {kind_of(value)}")
    if not ids:
        raise Invalid(f"{name}: empty; at least one token is required")
    wrong = [each for each in ids if not 0 <= each < 2**31]
    if wrong:
        raise Invalid(f"{name}: {wrong[0]} is no token id")
    return ids


def _most(fields: Fields) -> int | None:
    """The two names of one limit; without it an answer may fill the context."""
    allowed = range(1, 2**31)
    old = fields.integer_or_none("max_tokens", allowed)
    new = fields.integer_or_none("max_completion_tokens", allowed)
    if old is not None and new is not None and old != new:
        raise Invalid(f"max_tokens: {old}, but max_completion_tokens is {new}; give one of them")
    return old if new is None else new


def _asked(fields: Fields, most: int | None, logprobs: int | None) -> Asked:
    stream = fields.flag("stream", False)
    seed = fields.integer_or_none("seed")
    params = SamplingParams(
        max_tokens=most,
        seed=None if seed is None else seed & SEED,
        temperature=fields.number("temperature", 1.0),
        top_k=fields.integer("top_k", -1, range(-1, 2**31)),
        top_p=fields.number("top_p", 1.0),
        stop_strings=_stops(fields),
    )
    n = fields.integer("n", 1, range(1, MOST_CHOICES + 1))
    usage = _with_usage(fields, stream)
    return Asked(fields.text("model"), n, params, logprobs, stream, usage)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    found = (value,) if isinstance(value, str) else fields.texts("stop")
    if len(found) > MOST_STOPS:
        raise Invalid(f"stop: {len(found)} strings; allowed are {MOST_STOPS}")
    return found


def _with_usage(fields: Fields, stream: bool) -> bool:
    options = fields.sub("stream_options")
    if options is None:
        return False
    if not stream:
        raise Invalid("stream_options: given, but stream is not true")
    options.only("include_usage", "include_obfuscation")
    if options.flag("include_obfuscation", False):
        raise Invalid("stream_options.include_obfuscation: not offered; leave it out")
    return options.flag("include_usage", False)


def _refuse(fields: Fields, known: tuple[str, ...]) -> None:
    for name, value in fields.values.items():
        if name in known or value is None:
            continue
        if name not in NEUTRAL:
            raise Invalid(f"{fields.name(name)[:80]}: not offered; allowed are {', '.join(known)}")
        if not any(_same(value, each) for each in NEUTRAL[name]):
            allowed = " or ".join(repr(each) for each in NEUTRAL[name])
            raise Invalid(f"{name}: not offered; leave it out or give {allowed}")


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
