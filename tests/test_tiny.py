"""The tiny models load like any other, come out the same twice, and their tokenizers round-trip."""

import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab import tiny
from trimtab.errors import Invalid


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_each_architecture_loads_and_predicts(tmp_path, architecture):
    folder = tiny.build(tmp_path / "m", architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    ids = words("two and two make four", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 320) and logits.dtype == torch.float32
    assert torch.isfinite(logits).all() and logits.std() > 0.2
    eos = words.eos_token_id
    assert model.generation_config.eos_token_id == model.config.eos_token_id == eos


def test_the_same_arguments_give_the_same_files_and_leave_the_random_stream_alone(tmp_path):
    def digests(folder):
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}

    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = digests(tiny.build(tmp_path / "a"))
    assert torch.rand(1) == expected
    assert digests(tiny.build(tmp_path / "b")) == first
    other = digests(tiny.build(tmp_path / "c", seed=1))
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}


def test_byte_tokenizer_round_trips_any_text_and_has_merges(tmp_path):
    words = AutoTokenizer.from_pretrained(tiny.build(tmp_path / "m"))
    for text in ("the cat", "Ünïcödé 🦊\n\t x", "<|im_start|>user\nhi<|im_end|>"):
        assert words.decode(words(text).input_ids) == text
    assert len(words("the cat").input_ids) < len("the cat")
    assert len(words) == 320
    chat = words.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_character_tokenizer_has_a_stable_vocabulary(tmp_path):
    folder = tiny.build(tmp_path / "m", tokenizer="characters", characters="0123456789>\n ")
    words = AutoTokenizer.from_pretrained(folder)
    assert words("0 9>\n").input_ids == [2, 14, 11, 12, 13]
    assert words.decode([2, 14, 11, 12, 13, 0], skip_special_tokens=True) == "0 9>\n"
    assert words("x").input_ids == [words.unk_token_id] == [1]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(words) == 15


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"architecture": "mamba"}, "mamba"),
        ({"hidden": 66}, "hidden"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"tokenizer": "characters", "characters": "aa"}, "characters"),
    ],
)
def test_impossible_shapes_name_the_argument(tmp_path, wrong, named):
    with pytest.raises(Invalid, match=named):
        tiny.build(tmp_path / "m", **wrong)
    assert not (tmp_path / "m").exists()
