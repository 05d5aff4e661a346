"""What a reward function sees of a rollout: text, with the rest as attributes.

Knows no tokens and no server.
"""

from __future__ import annotations

from typing import Self


class Completion(str):
    """The model's last turn as text: special tokens and the stop string that ended it removed.

    turns      all the model's turns, first to last
    replies    what the environment answered after each turn but the last
    truncated  the last turn was cut by max_tokens or by the context

    >>> c = Completion("7", turns=["5", "7"], replies=["higher"])
    >>> c.strip() == "7", c.turns, c.truncated
    (True, ('5', '7'), False)
    """

    turns: tuple[str, ...]
    replies: tuple[str, ...]
    truncated: bool

    def __new__(
        cls,
        text: str,
        *,
        turns: list[str] | tuple[str, ...] | None = None,
        replies: list[str] | tuple[str, ...] = (),
        truncated: bool = False,
    ) -> Self:
        completion = super().__new__(cls, text)
        completion.turns = (text,) if turns is None else tuple(turns)
        completion.replies = tuple(replies)
        completion.truncated = truncated
        return completion
