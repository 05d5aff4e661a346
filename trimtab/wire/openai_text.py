"""Text of tokens as they come: no torn characters, no markup, nothing past a stop string.

    tokens -> Pieces -> pieces of text, some not to be shown -> Cut -> what may go out

A piece goes out when no token to come can change it: characters must be whole, and an end that a
stop string could begin with is held back. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.types import Text

TORN = "\ufffd"  # what a decoder puts in place of an unfinished character
SLACK = 4  # tokens before new ones that decide how these are decoded: a space, half a character
LONGEST = 64  # tokens that may be waited for before what is torn counts as broken


@dataclass(frozen=True, slots=True)
class Piece:
    """`shown` is False for markup: stop strings see it, readers do not."""

    text: str
    shown: bool = True


class Pieces:
    """Generated tokens of one sample, to text. A window of the last ones is decoded, which starts
    in the prompt, so that a first word keeps its space.

    >>> pieces = Pieces(text, prompt)
    >>> "".join(p.text for token in tokens for p in pieces.add(token)) + pieces.rest()
    """

    def __init__(self, text: Text, prompt: Sequence[int]) -> None:
        self._text = text
        self._window = list(prompt[-SLACK:])
        self._sent = len(text.decode(self._window).rstrip(TORN))
        self.waiting = 0  # characters, torn as yet, that stand between what is sent and the end

    def add(self, token: int, *, shown: bool = True) -> list[Piece]:
        """What has become whole with this token. One that is not shown is a piece of its own."""
        if shown:
            self._window.append(token)
            return self._whole()
        before = self.rest()
        self._window = [token]
        text = self._text.decode(self._window)
        self._sent = len(text)
        self.waiting = 0
        return [*([Piece(before)] if before else []), Piece(text, shown=False)]

    def rest(self) -> str:
        """What is left, torn or not; nothing comes after it."""
        text = self._text.decode(self._window)
        left, self._sent = text[self._sent :], len(text)
        return left

    def _whole(self) -> list[Piece]:
        text = self._text.decode(self._window)
        whole = text if len(self._window) > LONGEST else text.rstrip(TORN)
        new = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        self.waiting = len(text) - self._sent
        if len(self._window) > 4 * SLACK and len(whole) == len(text):
            self._window = self._window[-SLACK:]
            self._sent = len(self._text.decode(self._window))
        return [Piece(new)] if new else []


class Cut:
    """Lets text through up to the first stop string; it and what follows never goes out.

    >>> cut = Cut(("END",))
    >>> [cut.add([Piece("tree E")]), cut.add([Piece("ND!")]), cut.found]
    ['tree ', '', True]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held: list[Piece] = []
        self.found = False

    def add(self, pieces: Sequence[Piece], *, last: bool = False) -> str:
        """What may be shown now; with `last` nothing is held back."""
        if self.found:
            return ""
        self._held += pieces
        text = "".join(piece.text for piece in self._held)
        at = min((i for i in map(text.find, self._stops) if i >= 0), default=-1)
        self.found = at >= 0
        if not self.found:
            at = len(text) if last else len(text) - self._begun(text)
        return self._release(at)

    def _begun(self, text: str) -> int:
        """Characters at the end that a stop string begins with."""
        most = max(map(len, self._stops), default=1) - 1
        for count in range(min(most, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

    def _release(self, count: int) -> str:
        out, held = [], []
        for piece in self._held:
            here = piece.text[: max(count, 0)]
            count -= len(piece.text)
            if piece.shown:
                out.append(here)
            if len(here) < len(piece.text):
                held.append(Piece(piece.text[len(here) :], piece.shown))
        self._held = held
        return "".join(out)
