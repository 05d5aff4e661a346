"""A tokenizer as `types.Text`: encode, decode, the chat template. Knows no model and no request.

Fast tokenizers are read through their Rust half, which any thread may use as long as nobody sets
truncation or padding on it; both are switched off once, here. Slow ones take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from trimtab.engine.stops import decoder
from trimtab.errors import Invalid

ANCHOR = "a"  # a text before a token, so that a decoder keeps the token's leading space


class TokenizerText:
    """types.Text over a transformers tokenizer.

    >>> text = TokenizerText(AutoTokenizer.from_pretrained(folder))
    >>> text.decode(text.encode("the cat")) == "the cat"
    True
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()
        self._decode = decoder(tokenizer)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marked = {token_id for token_id, token in added.items() if token.special}
        self.special = frozenset(marked | set(tokenizer.all_special_ids))
        self._anchor = self._ids(ANCHOR, specials=False)[-1:]
        self._before = len(self.decode(self._anchor))
        self._pieces: dict[int, str] = {}

    @staticmethod
    def of(tokenizer: Any) -> TokenizerText | None:
        """None for a model without a tokenizer."""
        return None if tokenizer is None else TokenizerText(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._ids(text, specials=True)

    def decode(self, ids: Sequence[int]) -> str:
        if self._fast is not None:
            return self._decode(ids)
        with self._lock:
            return self._decode(ids)

    def piece(self, token: int) -> str:
        found = self._pieces.get(token)
        if found is None:
            found = self.decode([*self._anchor, token])[self._before :]
            self._pieces[token] = found
        return found

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise Invalid("messages: this model's tokenizer has no chat template; send a prompt")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise Invalid(f"messages: the model's chat template refuses them ({error})") from None
        return self._ids(text, specials=False)  # the template wrote them

    def _ids(self, text: str, *, specials: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=specials).ids)
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=specials))
