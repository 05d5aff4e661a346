"""What is loaded, what it reports, and what is refused at load."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
)

from trimtab.engine import models, net, selfcheck
from trimtab.engine.models import BaseModel
from trimtab.engine.numerics import choose_dtype
from trimtab.errors import Invalid, NotFound
from trimtab.tiny import quiet

CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.1,
)


def load(path, **options):
    options = {"learner_dtype": "float32", "sampler_dtype": "float32"} | options
    return BaseModel.load("tiny", path, **options)


def saved(config, folder):
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def copied(source, target):
    return shutil.copytree(source, target / "copy")


def test_two_nets_share_every_base_tensor_and_none_is_trained(base):
    mine, theirs = base.learner_net, base.sampler_net
    pairs = zip(mine.decoder.parameters(), theirs.decoder.parameters(), strict=True)
    assert all(a is b and not a.requires_grad for a, b in pairs)
    assert mine.head.base.weight is theirs.head.base.weight
    assert mine.decoder is not theirs.decoder


def test_info_reports_the_model(base):
    info = base.info
    assert (info.vocab_size, info.max_context, info.max_lora_rank) == (300, 64, 128)
    assert info.architecture.lower().startswith(info.name)
    assert info.eos_token_ids == (base.tokenizer.eos_token_id,)
    tensors = load_file(info.path / "model.safetensors")
    assert info.parameters == sum(t.numel() for t in tensors.values())


def test_stops_of_generation_config_and_tokenizer_are_joined(folder_of, tmp_path):
    folder = copied(folder_of("llama"), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load(folder).info.eos_token_ids == (0, 2, 7)


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path):
    base = load(saved(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97), tmp_path))
    assert base.tokenizer is None
    assert "transformer.h.1.attn.c_attn" in base.learner_net.linears


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SHAPE, logit_scale=0.125),
        GraniteConfig(**SHAPE, logits_scaling=8.0, embedding_multiplier=3.0),
        MistralConfig(**SHAPE, sliding_window=4),
        MixtralConfig(**SHAPE, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_pass_the_check_at_load(config, tmp_path):
    assert load(saved(config, tmp_path)).info.max_context == 32


def test_max_context_caps(folder_of):
    assert load(folder_of("llama"), max_context=20).info.max_context == 20
    assert load(folder_of("llama"), max_context=2000).info.max_context == 64


def test_bfloat16_sampler_beside_a_float32_learner(base_of, folder_of):
    mixed = load(folder_of("qwen3"), sampler_dtype="bfloat16")
    assert (mixed.info.learner_dtype, mixed.info.sampler_dtype) == ("float32", "bfloat16")
    tokens, rows = torch.arange(5), torch.arange(5)
    plan = selfcheck.PackedCausal([5])
    with torch.no_grad():
        exact = mixed.learner_net.hidden(tokens, rows, plan, [])
        short = mixed.sampler_net.hidden(tokens, rows, plan, [])
        whole = base_of("qwen3").learner_net.hidden(tokens, rows, plan, [])
    assert short.dtype == torch.bfloat16
    assert torch.equal(exact, whole)  # the learner's weights were not rounded on the way
    torch.testing.assert_close(short.float(), exact, atol=0.1, rtol=0.1)


# --------------------------------------------------------------------------- refused


def test_attention_sinks_are_refused(tmp_path):
    with pytest.raises(Invalid, match="asks for s_aux"):
        load(saved(GptOssConfig(**SHAPE, num_local_experts=4), tmp_path))


def test_numbers_unlike_transformers_are_refused(folder_of, monkeypatch):
    def one_percent_off(tree, output):
        head = build_head(tree, output)
        head.scale *= 1.01
        return head

    build_head = net.build_head
    monkeypatch.setattr(net, "build_head", one_percent_off)
    with pytest.raises(Invalid, match="differ from plain transformers' by 1"):
        load(folder_of("llama"))


def test_missing_weights_are_refused_not_drawn(folder_of, tmp_path):
    folder = copied(folder_of("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Invalid, match=r"lacks 1 of its weights.*layers\.1\.mlp\.up_proj"):
        load(folder)


def test_a_window_the_attention_is_not_told_of_is_refused():
    config = MistralConfig(**SHAPE, sliding_window=16)
    selfcheck.check_architecture(config, {0: 16, 1: 16}, 32)
    selfcheck.check_architecture(config, {0: None, 1: None}, 16)
    with pytest.raises(Invalid, match="set max_context to 16 or less"):
        selfcheck.check_architecture(config, {0: None, 1: None}, 32)


def test_layers_that_are_not_attention_are_refused():
    config = MistralConfig(**SHAPE)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(Invalid, match="layers of kind linear_attention"):
        selfcheck.check_architecture(config, {0: None, 1: None}, 32)


def test_a_path_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(NotFound, match=r"neither a folder with a config\.json"):
        load(tmp_path)


def test_dtypes(monkeypatch):
    assert choose_dtype("learner_dtype", "bfloat16", CPU, torch.float32) == torch.bfloat16
    assert choose_dtype("learner_dtype", "auto", CPU, torch.float32) == torch.float32
    seconds = {torch.bfloat16: 1.0, torch.float32: 2.0}
    monkeypatch.setattr("trimtab.engine.numerics.seconds", lambda dtype, _: seconds[dtype])
    assert choose_dtype("learner_dtype", "auto", CPU, "bfloat16") == torch.bfloat16
    seconds[torch.bfloat16] = 100.0
    assert choose_dtype("learner_dtype", "auto", CPU, "bfloat16") == torch.float32
    with pytest.raises(Invalid, match="sampler_dtype is 'int3'; allowed are auto, float32"):
        choose_dtype("sampler_dtype", "int3", CPU, torch.float32)


def test_progress_ends_at_one(folder_of):
    seen = []
    load(folder_of("llama"), progress=lambda what, done: seen.append((what, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert models.MAX_LORA_RANK == 128
