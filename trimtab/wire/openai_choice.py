"""One sample as a choice of an answer: its text as it grows, its log-probabilities in the two
forms, and why it ended. Knows no HTTP and no request but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.types import Drawn, Text
from trimtab.wire.openai_text import TORN, Cut, Piece, Pieces


@dataclass(frozen=True, slots=True)
class Entry:
    """One token's log-probability; `offset` is where its text begins in the choice's."""

    drawn: Drawn
    offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a token adds to a choice. `entries` are those of every token since the last step that
    had any text or ended it."""

    index: int
    text: str
    entries: tuple[Entry, ...]
    finish_reason: str | None


class Choice:
    """Choice `index`: tokens in, steps out. Special tokens and the end-of-sequence token have no
    text; the text ends before the first stop string."""

    def __init__(
        self,
        index: int,
        text: Text,
        prompt: Sequence[int],
        stops: Sequence[str],
        eos: Sequence[int],
    ) -> None:
        self.index = index
        self._special, self._eos = text.special, frozenset(eos)
        self._pieces = Pieces(text, prompt)
        self._cut = Cut(stops)
        self._length = 0
        self._entries: list[Entry] = []

    def take(self, drawn: Drawn) -> Step | None:
        """None while nothing can be said yet."""
        self._entries.append(Entry(drawn, self._length + self._pieces.waiting))
        pieces = self._pieces.add(drawn.token, shown=not self._markup(drawn))
        if drawn.end is not None and (rest := self._pieces.rest()):
            pieces.append(Piece(rest))
        self._length += sum(len(piece.text) for piece in pieces if piece.shown)
        text = self._cut.add(pieces, last=drawn.end is not None)
        if not text and drawn.end is None:
            return None
        entries, self._entries = tuple(self._entries), []
        return Step(self.index, text, entries, drawn.end)

    def _markup(self, drawn: Drawn) -> bool:
        ends = drawn.end == "stop" and drawn.token in self._eos
        return ends or drawn.token in self._special


def chat_logprobs(entries: Sequence[Entry], text: Text) -> dict[str, object]:
    """As in chat completions."""
    content = [
        {
            **_named(entry.drawn.token, entry.drawn.logprob, text),
            "top_logprobs": [_named(token, logprob, text) for token, logprob in entry.drawn.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Entry], text: Text) -> dict[str, object]:
    """As in completions; the token that was drawn is always among the alternatives."""
    drawn = [entry.drawn for entry in entries]
    return {
        "tokens": [name_of(each.token, text) for each in drawn],
        "token_logprobs": [each.logprob for each in drawn],
        "top_logprobs": [_alternatives(each, text) for each in drawn],
        "text_offset": [entry.offset for entry in entries],
    }


def _alternatives(drawn: Drawn, text: Text) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in dict([*drawn.top, (drawn.token, drawn.logprob)]).items():
        name = name_of(token, text)
        found[name if name not in found else f"token_id:{token}"] = logprob
    return found


def _named(token: int, logprob: float, text: Text) -> dict[str, object]:
    piece = text.piece(token)
    whole = list(piece.encode()) if TORN not in piece else None
    return {"token": name_of(token, text), "logprob": logprob, "bytes": whole}


def name_of(token: int, text: Text) -> str:
    """A token's text, or its number where it is no text by itself."""
    piece = text.piece(token)
    return f"token_id:{token}" if TORN in piece else piece
