"""The shapes of OpenAI's answers: completions and chat completions, whole and in chunks, and
errors. Knows how they look, not how they come about.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trimtab.types import Text
from trimtab.wire.openai_choice import Entry, Step, chat_logprobs, completion_logprobs

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def error_body(status: int, message: str) -> dict[str, object]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def model_body(name: str, created: float = 0.0) -> dict[str, object]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "trimtab"}


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between the two: names, and where a choice carries its text. `opening` is what
    a stream begins each choice with."""

    prefix: str
    whole: str
    chunk: str
    message: Callable[[str], dict[str, object]]
    delta: Callable[[str], dict[str, object]]
    logprobs: Callable[[Sequence[Entry], Text], dict[str, object]]
    opening: dict[str, object] | None = None


COMPLETION = Form(
    prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    message=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    logprobs=completion_logprobs,
)
CHAT = Form(
    prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    message=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=chat_logprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
)


@dataclass(frozen=True, slots=True)
class Sheet:
    """One answer's form, its name of the model, and whether log-probabilities were asked for."""

    form: Form
    model: str
    text: Text
    logprobs: bool
    usage: bool = False
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, steps: Sequence[Sequence[Step]], prompt_tokens: int, tokens: int
    ) -> dict[str, object]:
        """The answer; `steps` are those of each choice."""
        choices = [self._choice(self.form.message, found) for found in steps]
        return self._named(self.form.whole, choices) | {"usage": usage(prompt_tokens, tokens)}

    def opening(self, index: int) -> dict[str, object] | None:
        opening = self.form.opening
        if opening is None:
            return None
        choice = {"index": index, **opening, "logprobs": None, "finish_reason": None}
        return self._chunk([choice])

    def step(self, step: Step) -> dict[str, object]:
        return self._chunk([self._choice(self.form.delta, [step])])

    def used(self, prompt_tokens: int, tokens: int) -> dict[str, object]:
        return self._chunk([]) | {"usage": usage(prompt_tokens, tokens)}

    def _choice(
        self, shape: Callable[[str], dict[str, object]], steps: Sequence[Step]
    ) -> dict[str, object]:
        entries = [entry for step in steps for entry in step.entries]
        return {
            "index": steps[-1].index,
            **shape("".join(step.text for step in steps)),
            "logprobs": self.form.logprobs(entries, self.text) if self.logprobs else None,
            "finish_reason": steps[-1].finish_reason,
        }

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        named = self._named(self.form.chunk, choices)
        return named | {"usage": None} if self.usage else named

    def _named(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"{self.form.prefix}{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }
