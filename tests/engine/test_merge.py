"""A merged model answers as base model and adapter do."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab import tiny
from trimtab.engine.merge import merge
from trimtab.errors import Invalid

# PEFT asks transformers by an old name, and warns of what untying is for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie:UserWarning"),
]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 8, 9]])).logits


def adapter_on(base, folder, modules):
    """A random adapter, B included, written by PEFT itself."""
    config = LoraConfig(r=4, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(load(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, save_embedding_layers=False)
    return logits(PeftModel.from_pretrained(load(base), str(folder)).eval())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_same_logits(tmp_path, architecture, tied):
    base = tiny.build(tmp_path / "base", architecture=architecture, tied=tied)
    modules = ["q_proj", "down_proj", "lm_head"]
    expected = adapter_on(base, tmp_path / "adapter", modules)
    merge(tmp_path / "adapter", base, tmp_path / "merged")
    found = logits(load(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - logits(load(base))).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").encode("cat")


def test_what_cannot_be_merged_is_told(tmp_path):
    base = tiny.build(tmp_path / "base")
    with pytest.raises(Invalid, match="holds no adapter"):
        merge(tmp_path, base, tmp_path / "out")
    adapter_on(base, tmp_path / "adapter", ["q_proj"])
    with pytest.raises(Invalid, match="exists; name a folder that does not"):
        merge(tmp_path / "adapter", base, base)
    wider = tiny.build(tmp_path / "wider", hidden=32)
    with pytest.raises(Invalid, match="is made for weights of shape"):
        merge(tmp_path / "adapter", wider, tmp_path / "out")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "x.age")
    with pytest.raises(Invalid, match="encrypted files are decrypted first"):
        merge(tmp_path / "adapter", base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
