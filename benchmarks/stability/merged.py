"""A sampler that rounds what the learner has become: adapter merged into the base, each row of each
matrix then rounded to a few bits, anew for every version.

trimtab's own samplers round the base once and keep adapters as they are. Many other systems export
merged weights and quantise those; this stands for them, in the benchmark alone.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.engine.base import SampleWork
from trimtab.engine.checkpoint import ADAPTER
from trimtab.engine.lora import ALPHA
from trimtab.engine.models import BaseModel
from trimtab.engine.torch_sampler import TorchSampler
from trimtab.types import SampleResult, WeightsRef

BITS = {"merged 3 bit": 3}
PREFIX = "base_model.model."


class MergedSampler:
    """As much of a TorchSampler as a cell uses: one for each version."""

    def __init__(self, folder: Path, scratch: Path, numerics: str, rank: int) -> None:
        self._folder, self._scratch = folder, scratch
        self._bits, self._scale = BITS[numerics], ALPHA / rank
        self._versions: dict[str, TorchSampler] = {}

    def publish(self, version: str, ref: WeightsRef) -> None:
        assert ref.path is not None
        made = self._scratch / f"merged-{version}"
        shutil.copytree(self._folder, made)
        weights = merged(load_file(made / "model.safetensors"), ref.path, self._scale)
        rounded = {name: round_rows(name, w, self._bits) for name, w in weights.items()}
        save_file(rounded, made / "model.safetensors", {"format": "pt"})
        base = BaseModel.load(ref.base_model, made, learner_dtype="float32")
        self._versions[version] = sampler = TorchSampler(base)
        sampler.start()
        sampler.publish(version, WeightsRef(version, ref.base_model))
        shutil.rmtree(made)

    def submit(self, work: SampleWork) -> Future[SampleResult]:
        return self._versions[work.target].submit(work)

    def retire(self, version: str) -> None:
        if version in self._versions:
            self._versions.pop(version).stop()

    def start(self) -> None: ...

    def stop(self) -> None:
        for version in list(self._versions):
            self.retire(version)


def merged(weights: dict[str, Tensor], adapter: Path, scale: float) -> dict[str, Tensor]:
    pairs = load_file(adapter / ADAPTER)
    for name, down in pairs.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = pairs[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * up @ down
    return weights


def round_rows(name: str, weight: Tensor, bits: int) -> Tensor:
    """Symmetric, one scale a row; embeddings and norms stay."""
    if weight.ndim != 2 or "embed" in name:
        return weight
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return torch.round(weight / scale).mul(scale).contiguous()
