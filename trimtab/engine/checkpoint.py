"""Adapters and optimizers as files: safetensors for tensors, JSON for the rest, nothing else read.

A folder holds adapter.safetensors (PEFT's tensor names), perhaps optimizer.safetensors, for a
snapshot in mid-window also window.safetensors (accumulated gradients), and state.json, written
last, with the size and SHA-256 of the others, so that a cut-off or altered file is found before a
tensor is used. Knows nothing of paths' names, of sessions or of training.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.engine.adapters import check_lora, targets
from trimtab.engine.lora import ALPHA, Adapter
from trimtab.engine.net import Net
from trimtab.errors import Invalid, NotFound
from trimtab.types import LoraConfig

FORMAT = 1
ADAPTER, OPTIMIZER, STATE = "adapter.safetensors", "optimizer.safetensors", "state.json"
WINDOW = "window.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

Moments = dict[str, dict[str, Tensor]]
"""tensor name -> exp_avg, exp_avg_sq and step of AdamW; empty before the first step."""


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Gradients between two steps, by tensor name, with the requests they come from and the
    (seq_id, datum) whose gradient was not finite."""

    gradients: Mapping[str, Tensor]
    seq_ids: tuple[int, ...]
    culprits: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """What a folder holds. `steps` counts the optimizer steps behind the weights."""

    adapter: Adapter
    steps: int
    moments: Moments | None
    window: Accumulated | None = None


def tensor_names(module: str) -> tuple[str, str]:
    """PEFT's names of A and B.

    >>> tensor_names("lm_head")
    ('base_model.model.lm_head.lora_A.weight', 'base_model.model.lm_head.lora_B.weight')
    """
    return tuple(f"base_model.model.{module}.lora_{half}.weight" for half in "AB")


def adapter_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Every tensor of the adapter by PEFT's name, in the order of `Adapter.parameters`."""
    return {
        name: tensor
        for module, pair in adapter.pairs.items()
        for name, tensor in zip(tensor_names(module), pair, strict=True)
    }


# --------------------------------------------------------------------------- writing


def write(
    folder: Path,
    base_model: str,
    adapter: Adapter,
    steps: int,
    moments: Moments | None = None,
    *,
    window: Accumulated | None = None,
) -> int:
    """Write `folder` (created; the caller renames it into place) and return the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {ADAPTER: adapter_tensors(adapter)}
    if moments is not None:
        files[OPTIMIZER] = {
            f"{name}.{part}": value
            for name, each in moments.items()
            for part, value in each.items()
        }
    if window is not None:
        files[WINDOW] = dict(window.gradients)
    described = {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
    state = {
        "format": FORMAT,
        "base_model": base_model,
        "lora": asdict(adapter.config) | {"alpha": ALPHA},
        "optimizer": None if moments is None else "adamw",
        "steps": steps,
        "files": described,
    }
    if window is not None:
        state["window"] = {"seq_ids": window.seq_ids, "culprits": window.culprits}
    written = write_bytes(folder / STATE, json.dumps(state, indent=1).encode())
    return written + sum(entry["bytes"] for entry in described.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return describe(path)


def write_bytes(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content)


def describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


# --------------------------------------------------------------------------- reading


def read(
    folder: Path,
    net: Net,
    base_model: str,
    *,
    max_rank: int,
    device: torch.device,
    optimizer: bool = False,
    window: bool = False,
) -> Saved:
    """The adapter of `folder` (and its optimizer and accumulated gradients when asked), checked
    against `net`.

    Raises NotFound for a folder that is none, Invalid for one that is not whole or does not fit.

        >>> adapter = read(folder, base.sampler_net, "tiny", max_rank=128, device=cpu).adapter
    """
    state = read_state(folder)
    if state["base_model"] != base_model:
        raise Invalid(
            f"the checkpoint was made on base model {state['base_model']!r}, not on {base_model!r}"
        )
    config = lora_config(state["lora"])
    check_lora(net, config, max_rank)
    found = read_tensors(folder, ADAPTER, state, device)
    pairs = {}
    for module, (wide, out) in targets(net, config).items():
        a, b = tensor_names(module)
        A = take(found, ADAPTER, a, (config.rank, wide))
        pairs[module] = (A, take(found, ADAPTER, b, (out, config.rank)))
    refuse_rest(found, ADAPTER)
    adapter = Adapter(config, pairs)
    moments = read_moments(folder, state, adapter, device) if optimizer else None
    gradients = read_window(folder, state, adapter, device) if window else None
    return Saved(adapter, state["steps"], moments, gradients)


def read_state(folder: Path) -> dict[str, Any]:
    """state.json, its fields and their kinds checked."""
    try:
        state = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"checkpoint {folder.name!r} has no {STATE}") from error
    except (ValueError, OSError) as error:
        raise Invalid(
            f"checkpoint {folder.name!r}: {STATE} is not readable JSON: {error}"
        ) from error
    kinds = {"format": int, "base_model": str, "lora": dict, "steps": int, "files": dict}
    for field, kind in kinds.items():
        if not isinstance(state, dict) or not isinstance(state.get(field), kind):
            raise Invalid(f"checkpoint {folder.name!r}: {STATE} lacks a {kind.__name__} {field!r}")
    if state["format"] != FORMAT:
        raise Invalid(
            f"checkpoint {folder.name!r} has format {state['format']}; this version reads {FORMAT}"
        )
    return state


def lora_config(fields: Mapping[str, Any]) -> LoraConfig:
    """The LoRA configuration of a state.json; one of another alpha is refused, not rescaled."""
    kinds = {"rank": int, "train_attn": bool, "train_mlp": bool, "train_unembed": bool}
    for field, kind in kinds.items():
        if type(fields.get(field)) is not kind:
            raise Invalid(
                f"checkpoint: lora {field} is {fields.get(field)!r}, not a {kind.__name__}"
            )
    if fields.get("alpha") != ALPHA:
        raise Invalid(
            f"checkpoint: lora alpha is {fields.get('alpha')!r}; only {ALPHA} is supported"
        )
    return LoraConfig(seed=fields.get("seed"), **{field: fields[field] for field in kinds})


def read_tensors(
    folder: Path, name: str, state: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """The tensors of one file, after its size and hash."""
    path, expected = folder / name, state["files"].get(name)
    if expected is None or not path.is_file():
        raise Invalid(f"checkpoint {folder.name!r} has no {name}")
    found = describe(path)
    if found != expected:
        raise Invalid(
            f"checkpoint {folder.name!r}: {name} is damaged ({found['bytes']} bytes found, "
            f"{expected.get('bytes')} written, or other contents)"
        )
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise Invalid(
            f"checkpoint {folder.name!r}: {name} is no safetensors file: {error}"
        ) from error


def take(found: dict[str, Tensor], file: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Remove and return one float32 tensor of the expected shape."""
    tensor = found.pop(name, None)
    if tensor is None:
        raise Invalid(f"checkpoint: {file} lacks {name}")
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
        raise Invalid(
            f"checkpoint: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; this model "
            f"needs float32 of shape {shape}"
        )
    return tensor


def refuse_rest(found: Mapping[str, Tensor], file: str) -> None:
    if found:
        raise Invalid(f"checkpoint: {file} holds {min(found)}, which this model has no place for")


def read_moments(
    folder: Path, state: Mapping[str, Any], adapter: Adapter, device: torch.device
) -> Moments:
    """AdamW's state by tensor name, or nothing at all when it was saved before the first step."""
    if state.get("optimizer") != "adamw":
        raise Invalid(f"checkpoint {folder.name!r} holds no optimizer; load its weights alone")
    found = read_tensors(folder, OPTIMIZER, state, device)
    if not found:
        return {}
    moments = {}
    for name, tensor in adapter_tensors(adapter).items():
        shapes = {part: () if part == "step" else tuple(tensor.shape) for part in MOMENTS}
        moments[name] = {
            part: take(found, OPTIMIZER, f"{name}.{part}", shapes[part]) for part in MOMENTS
        }
    refuse_rest(found, OPTIMIZER)
    return moments


def read_window(
    folder: Path, state: Mapping[str, Any], adapter: Adapter, device: torch.device
) -> Accumulated | None:
    """The gradients accumulated when a snapshot was taken; None where there were none."""
    noted = state.get("window")
    if noted is None:
        return None
    found = read_tensors(folder, WINDOW, state, device)
    gradients = {
        name: take(found, WINDOW, name, tuple(tensor.shape))
        for name, tensor in adapter_tensors(adapter).items()
    }
    refuse_rest(found, WINDOW)
    culprits = tuple((seq_id, datum) for seq_id, datum in noted["culprits"])
    return Accumulated(gradients, tuple(noted["seq_ids"]), culprits)


def check_same(mine: LoraConfig, saved: LoraConfig) -> None:
    """Raise Invalid unless a checkpoint has the shape of the model it is loaded into."""
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        if getattr(mine, name) != getattr(saved, name):
            raise Invalid(
                f"the checkpoint's lora {name} is {getattr(saved, name)}, this model's is "
                f"{getattr(mine, name)}; load it into a new model"
            )
