"""Text to tokens and back for one tokenizer: prompts, replies between turns, completions.

What was sampled is never re-tokenised; a reply is only ever appended. Knows no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.errors import Invalid
from trimtab.trainer.task import Answer, Item, Message

# Stands for the assistant's turn while a chat template is asked what comes after it.
_PLACE = "\u2402turn\u2403"


class Renderer:
    """`Renderer(tokenizer, stop=("\\n",))`; the tokenizer is a transformers one."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)

    def prompt(self, item: Item) -> list[int]:
        """A string is encoded as it is (with the tokenizer's own opening token, if it has one);
        messages go through the chat template."""
        prompt = item["prompt"]
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = self._encode(self._template(prompt, generate=True))
        if not tokens:
            raise Invalid(f"the prompt {prompt!r} has no tokens")
        return list(tokens)

    def reply(self, item: Item, answer: Answer, last_turn: Sequence[int]) -> list[int]:
        """The tokens between the model's turn and its next: `answer` as plain text after a plain
        prompt, or what the chat template puts there."""
        if isinstance(item["prompt"], str):
            if not isinstance(answer, str):
                raise Invalid(
                    "reply returned a message, but the prompt is plain text; return a string"
                )
            return self._encode(answer)
        return self._encode(self._chat_reply(item["prompt"], answer, last_turn))

    def text(self, tokens: Sequence[int], *, stopped: bool) -> str:
        """Without special tokens and, if the turn was `stopped`, without its stop string."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        ends = [text.find(s) for s in self.stop if s in text] if stopped else []
        return text[: min(ends)] if ends else text

    def _chat_reply(self, prompt: Sequence[Message], answer: Answer, last: Sequence[int]) -> str:
        message = {"role": "user", "content": answer} if isinstance(answer, str) else answer
        turn = {"role": "assistant", "content": _PLACE}
        whole = self._template([*prompt, turn, message], generate=True)
        _, place, after = whole.partition(_PLACE)
        if not place:
            raise Invalid("the chat template drops an assistant's turn; multi-turn tasks need it")
        # The end-of-turn token that the model already wrote is not repeated.
        end = self.tokenizer.decode(list(last)[-1:], skip_special_tokens=False)
        return after.removeprefix(end) if end else after

    def _template(self, messages: Sequence[Any], *, generate: bool) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Invalid(
                "the prompt is a list of messages, but the model's tokenizer has no chat template; "
                "use plain strings as prompts"
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generate, tokenize=False
        )
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
