"""Prompts, replies and completions as tokens of a small tokenizer."""

import pytest
from transformers import PreTrainedTokenizerFast

from trimtab.errors import Invalid
from trimtab.tiny import CHAT_TEMPLATE, END, EOS, byte_tokenizer
from trimtab.trainer.prompts import fitting
from trimtab.trainer.renderer import Renderer
from trimtab.trainer.rollouts import Limits
from trimtab.trainer.task import Task

PLAIN = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=EOS)
CHAT = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=EOS)
CHAT.chat_template = CHAT_TEMPLATE
MESSAGES = {"prompt": [{"role": "user", "content": "guess"}]}


def test_text_is_sent_as_it_is():
    assert PLAIN.decode(Renderer(PLAIN).prompt({"prompt": "1+1="})) == "1+1="


def test_messages_go_through_the_template():
    text = CHAT.decode(Renderer(CHAT).prompt(MESSAGES))
    assert text == "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(Invalid, match="no chat template; use plain strings"):
        Renderer(PLAIN).prompt(MESSAGES)


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_completes_the_conversation(ended):
    """Whether or not the model wrote its own end of turn, there is exactly one."""
    renderer = Renderer(CHAT, stop=(END,))
    turn = CHAT.encode("5" + (END if ended else ""))
    tokens = [*renderer.prompt(MESSAGES), *turn, *renderer.reply(MESSAGES, "higher", turn)]
    assert CHAT.decode(tokens) == (
        "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tool_message_keeps_its_role():
    renderer = Renderer(CHAT)
    found = renderer.reply(MESSAGES, {"role": "tool", "content": "42"}, [CHAT.encode("x")[0]])
    assert "<|im_start|>tool\n42<|im_end|>" in CHAT.decode(found)


def test_a_reply_to_plain_text_is_appended():
    renderer = Renderer(PLAIN)
    assert PLAIN.decode(renderer.reply({"prompt": "p"}, " no\n", [1])) == " no\n"
    with pytest.raises(Invalid, match="return a string"):
        renderer.reply({"prompt": "p"}, {"role": "tool", "content": ""}, [1])


def test_a_completion_ends_before_its_stop_string():
    renderer = Renderer(PLAIN, stop=("\n", ";"))
    tokens = PLAIN.encode("12;\n")
    assert renderer.text(tokens, stopped=True) == "12"
    assert renderer.text(tokens, stopped=False) == "12;\n"
    assert renderer.text(PLAIN.encode("7" + EOS), stopped=True) == "7"


def test_prompts_over_the_context_are_told_before_the_run():
    task = Task(["short", "x" * 40], len, name="t")
    limits = Limits(max_tokens=8, max_turns=1, context=40)
    renderer = Renderer(PLAIN)
    with pytest.raises(Invalid, match=r"prompts\[1\] has 40 tokens.*context of 40; shorten it"):
        fitting(task, renderer, limits, skip=False)
    fitted, skipped = fitting(task, renderer, limits, skip=True)
    assert ([i["prompt"] for i in fitted.prompts], skipped) == (["short"], 1)
    with pytest.raises(Invalid, match="every prompt is too long"):
        fitting(task, renderer, Limits(40, 1, context=40), skip=True)
