"""When a sequence ends: stop tokens, and stop strings in the text that was generated.

EOS stops beside explicit stops; `ignore_eos` (a client's empty list) disables every stop. Strings
are looked for in the generated text alone, special tokens included; the whole token that completes
one is kept. Knows nothing of models; a tokenizer is a function from ids to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.types import SamplingParams

Decode = Callable[[Sequence[int]], str]

# Tokens before the window in which a string can lie: where a window cuts a character or loses a
# leading space, it does so in these.
_SLACK = 4
_TORN = "\ufffd"  # what a decoder puts in place of an unfinished character


def decoder(tokenizer: Any) -> Decode:
    """Ids to the text as it stands: special tokens shown, no spaces cleaned up."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: fast.decode(list(ids), skip_special_tokens=False)
    return lambda ids: tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of one request.

    Only the last tokens are decoded, as many as the longest string has bytes, because a match that
    the newest token completes lies within them. While that window reaches back to the first
    generated token it starts in the prompt instead (`before`), so that a leading space survives;
    `skip` characters of it are prompt and don't count.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Decode | None = None
    window: int = 0
    before: tuple[int, ...] = ()
    skip: int = 0

    @staticmethod
    def of(
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        prompt: Sequence[int],
        decode: Decode | None,
    ) -> Stops:
        if params.ignore_eos:
            return Stops()
        token_ids = frozenset(eos_token_ids) | frozenset(params.stop_token_ids)
        if not params.stop_strings:
            return Stops(token_ids)
        assert decode is not None, "check() refuses stop strings without a tokenizer"
        before = tuple(prompt[-_SLACK:])
        return Stops(
            token_ids=token_ids,
            strings=params.stop_strings,
            decode=decode,
            window=_SLACK + max(len(s.encode()) for s in params.stop_strings),
            before=before,
            skip=len(decode(before).rstrip(_TORN)),
        )

    def end(self, tokens: Sequence[int]) -> bool:
        """Does the newest of the generated `tokens` end the sequence?"""
        return tokens[-1] in self.token_ids or (bool(self.strings) and self._completes(tokens))

    def _completes(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None
        if len(tokens) <= self.window:
            text = self.decode([*self.before, *tokens])[self.skip :]
        else:
            text = self.decode(tokens[-self.window :])
        return any(s in text for s in self.strings)
