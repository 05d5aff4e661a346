"""Completions and chat completions as OpenAI's clients speak them, for base models and sampler
checkpoints. Streams go out token by token, as the sampler draws them.

Errors have OpenAI's form; one that happens within a stream is its last event. Knows no session:
what is drawn here is recorded nowhere, see `service/direct.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trimtab.errors import Invalid, TrimtabError
from trimtab.service.core import Drawable, Drawing
from trimtab.types import Drawn, Sample, Text
from trimtab.wire import openai_fields
from trimtab.wire.calls import Call, answer
from trimtab.wire.openai_choice import Choice, Step
from trimtab.wire.openai_fields import Asked
from trimtab.wire.openai_forms import CHAT, COMPLETION, Form, Sheet, error_body, model_body

CHECKPOINTS = 1000  # the newest that are looked through for the list of models
DONE = b"data: [DONE]\n\n"


def refusal(status: int, message: str) -> Response:
    """An error as OpenAI's clients read it."""
    return answer(error_body(status, message), status)


# ------------------------------------------------------------------ handlers


async def models(call: Call) -> Response:
    """The base models and the caller's own sampler checkpoints."""
    found = await call.service.listing.checkpoints(call.owner, CHECKPOINTS, 0)
    data = [model_body(info.name) for info in call.service.models()]
    data += [
        model_body(record.path, record.created_at)
        for record in found.items
        if record.kind == "sampler_weights"
    ]
    return answer({"object": "list", "data": data})


async def model(call: Call) -> Response:
    found = call.service.drawable(call.owner, call.path["model"])
    return answer(model_body(call.path["model"], found.created_at))


async def completions(call: Call) -> Response:
    fields = call.fields()
    asked = openai_fields.completion(fields)
    found, text = _drawable(call, asked.model)
    prompts = await asyncio.to_thread(openai_fields.prompts, fields, text)
    return await _answered(call, Talk(COMPLETION, asked, found, text, prompts))


async def chat_completions(call: Call) -> Response:
    fields = call.fields()
    asked = openai_fields.chat(fields)
    found, text = _drawable(call, asked.model)
    prompt = await asyncio.to_thread(text.chat, openai_fields.messages(fields))
    return await _answered(call, Talk(CHAT, asked, found, text, [prompt]))


def _drawable(call: Call, name: str) -> tuple[Drawable, Text]:
    found = call.service.drawable(call.owner, name)
    if found.text is None:
        raise Invalid(f"model: {found.info.name} has no tokenizer, so it cannot be asked in text")
    return found, found.text


async def _answered(call: Call, talk: Talk) -> Response:
    drawing = await call.service.draw(call.owner, talk.model, talk.requests())
    if talk.asked.stream:
        return Events(_events(talk, drawing), drawing)
    return answer(await call.held(_whole(talk, drawing)))


# ------------------------------------------------------------------ one call


@dataclass(frozen=True, slots=True)
class Talk:
    """What was asked of which model, the prompts as tokens. Choice `p * n + i` is sample i of
    prompt p."""

    form: Form
    asked: Asked
    model: Drawable
    text: Text
    prompts: Sequence[Sequence[int]]

    def requests(self) -> list[Sample]:
        asked, most = self.asked, openai_fields.MOST_CHOICES
        if len(self.prompts) * asked.n > most:
            raise Invalid(f"n: {len(self.prompts)} prompts times {asked.n} are more than {most}")
        return [
            Sample(
                sampling_session_id="",
                seq_id=0,
                prompt=np.array(prompt, np.int32),
                num_samples=asked.n,
                params=asked.params,
                topk_sample_logprobs=asked.logprobs or 0,
            )
            for prompt in self.prompts
        ]

    def choices(self) -> list[Choice]:
        stops, eos = self.asked.params.stop_strings, self.model.info.eos_token_ids
        prompts = [prompt for prompt in self.prompts for _ in range(self.asked.n)]
        return [Choice(i, self.text, prompt, stops, eos) for i, prompt in enumerate(prompts)]

    def sheet(self) -> Sheet:
        asked = self.asked
        return Sheet(self.form, asked.model, self.text, asked.logprobs is not None, asked.usage)

    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class _Choices:
    """All choices of a call, and the count of their tokens."""

    def __init__(self, talk: Talk) -> None:
        self._choices = talk.choices()
        self._n = talk.asked.n
        self.tokens = 0

    def take(self, number: int, drawn: Drawn) -> Step | None:
        self.tokens += 1
        return self._choices[number * self._n + drawn.index].take(drawn)

    def __len__(self) -> int:
        return len(self._choices)


async def _whole(talk: Talk, drawing: Drawing) -> dict[str, object]:
    choices = _Choices(talk)
    steps: list[list[Step]] = [[] for _ in range(len(choices))]
    try:
        async for number, drawn in drawing:
            if step := choices.take(number, drawn):
                steps[step.index].append(step)
    finally:
        await drawing.close()
    return talk.sheet().whole(steps, talk.prompt_tokens(), choices.tokens)


async def _events(talk: Talk, drawing: Drawing) -> AsyncGenerator[bytes, None]:
    choices, sheet = _Choices(talk), talk.sheet()
    for opening in _openings(sheet, len(choices)):
        yield opening
    try:
        async for number, drawn in drawing:
            if step := choices.take(number, drawn):
                yield _event(sheet.step(step))
    except TrimtabError as error:
        yield _event(error_body(error.status, error.message))
        return
    if talk.asked.usage:
        yield _event(sheet.used(talk.prompt_tokens(), choices.tokens))
    yield DONE


def _openings(sheet: Sheet, count: int) -> Iterator[bytes]:
    for index in range(count):
        if opening := sheet.opening(index):
            yield _event(opening)


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Events(StreamingResponse):
    """Server-sent events. When the client leaves, drawing stops, whatever is waited for."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], drawing: Drawing) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._events = events
        self._drawing = drawing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        left = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            left.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            await self._events.aclose()
            await self._drawing.close()
