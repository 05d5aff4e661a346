"""The cookbook's way out: download a checkpoint, merge it, and find the same model there."""

import json

import pytest
from safetensors.torch import load_file, save_file

from .hubdata import conversations
from .kit import SMOLLM2, TINY

pytestmark = pytest.mark.nightly

OUT = """
import sys
from tinker_cookbook import weights
path, adapter, base, merged = sys.argv[1:]
weights.download(tinker_path=path, output_dir=adapter)
weights.build_hf_model(base_model=base, adapter_path=adapter, output_path=merged)
"""

COMPARE = """
import json, sys, tinker, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
sampler_path, merged, base = sys.argv[1:]
words = AutoTokenizer.from_pretrained(merged)
ids = words.encode("How many are 2 and 3? They are 5, counted on the fingers.")
client = tinker.ServiceClient().create_sampling_client(model_path=sampler_path)
ours = torch.tensor(client.compute_logprobs(tinker.ModelInput.from_ints(ids)).result()[1:])

@torch.no_grad()
def of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

gap, moved = (ours - of(merged)).abs().max(), (ours - of(base)).abs().max()
print("RESULT", json.dumps([gap.item(), moved.item()]))
"""


def untied(folder, to):
    """The model of `folder` with an output head of its own. The adapter is on the head alone, which
    a model whose head is its embedding cannot hold: the cookbook refuses to merge it into one."""
    weights = load_file(folder / "model.safetensors")
    if "lm_head.weight" in weights:
        return folder
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for name in ("config.json", "model.safetensors"):
        (to / name).unlink()
    (to / "config.json").write_text(json.dumps(config))
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_downloaded_and_merged_checkpoint_is_the_model_that_is_served(
    cookbook, model_folder, tmp_path
):
    chats = conversations(tmp_path / "chats.jsonl")
    run = cookbook.recipe(
        "chat_sl.train", "exported", **TINY, model_name=SMOLLM2, renderer_name="qwen3_instruct",
        dataset=chats, batch_size=4, max_steps=3,
    )  # fmt: skip
    final = run.checkpoints()[-1]
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    base = untied(model_folder, tmp_path / "untied")
    cookbook.script(OUT, final["state_path"], str(adapter), str(base), str(merged))
    assert {file.name for file in adapter.iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    compared = cookbook.script(COMPARE, final["sampler_path"], str(merged), str(model_folder))
    gap, moved = _result(compared.printed)
    assert gap < 1e-3
    assert moved > 0.1


def _result(printed):
    line = next(line for line in printed.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))
