"""Fresh adapters for a net, and which modules a LoRA configuration reaches.

A is uniform in +-1/sqrt(in), B is zero, so a fresh adapter changes nothing. Every module draws from
a stream of its own, seeded by (seed, module name): flags and architectures do not shift each
other's draws. Knows nothing of files or optimizers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from trimtab.engine.lora import Adapter
from trimtab.engine.net import Net, features
from trimtab.errors import Invalid
from trimtab.types import LoraConfig

FLAGS = ("train_attn", "train_mlp", "train_unembed")


def flag_of(net: Net, name: str) -> str:
    """The flag that decides whether `name` gets an adapter."""
    if name == net.head.name:
        return "train_unembed"
    inside = name.split(".")
    attends = any("attn" in part or "attention" in part for part in inside)
    return "train_attn" if attends else "train_mlp"


def targets(net: Net, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each module that `config` adapts, by name, the head last."""
    shapes = {name: features(linear.base) for name, linear in net.linears.items()}
    shapes[net.head.name] = net.head.shape
    return {n: s for n, s in shapes.items() if getattr(config, flag_of(net, n))}


def check_lora(net: Net, config: LoraConfig, max_rank: int) -> None:
    """Raise Invalid for a configuration that this net cannot honour in full."""
    if not 1 <= config.rank <= max_rank:
        raise Invalid(f"lora rank is {config.rank}; allowed are 1 to {max_rank}")
    asked = [flag for flag in FLAGS if getattr(config, flag)]
    if not asked:
        raise Invalid(f"{', '.join(FLAGS)} are all false; at least one must be true")
    reached = {flag_of(net, name) for name in targets(net, config)}
    for flag in asked:
        if flag not in reached:
            raise Invalid(f"{flag} is true, but this model has no module for it; set it to false")


def new_adapter(net: Net, config: LoraConfig, device: torch.device) -> Adapter:
    """A fresh float32 adapter; `config.seed` must be set."""
    if config.seed is None:
        raise Invalid("lora seed is not set")
    pairs = {}
    for name, (wide, out) in targets(net, config).items():
        A = first_weights(config.seed, name, config.rank, wide).to(device)
        pairs[name] = (A, torch.zeros(out, config.rank, device=device))
    return Adapter(config, pairs)


def adapter_bytes(net: Net, config: LoraConfig) -> int:
    """What a float32 adapter of this configuration takes."""
    return sum(4 * config.rank * (wide + out) for wide, out in targets(net, config).values())


def first_weights(seed: int, name: str, rank: int, wide: int) -> Tensor:
    """(rank, in) uniform in +-1/sqrt(in), drawn on the CPU so that devices agree."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = wide**-0.5
    return torch.empty(rank, wide).uniform_(-bound, bound, generator=generator)
