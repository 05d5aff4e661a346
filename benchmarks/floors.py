"""How fast this machine could be: reading memory, multiplying matrices, and what a model needs of
both. B rows of a decode step, P linear parameters (head included), N tokens of a sequence.

The floor of a decode step is the larger of bytes / read bandwidth (weights and the keys and values
of the rows, once) and FLOPs / float32 matmul rate; of learning it is FLOPs / rate. Both rates are
measured when asked for, beside what they are compared with. No tool on the same machine can be
faster in float32 without computing less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.turns import on_its_own

Clock = Callable[[], float]
SQUARE = 1024  # of the matrices multiplied


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second read and float32 FLOPs a second multiplied, at best, with all threads."""

    bandwidth: float
    flops: float


class Meter:
    """Measures both rates; the buffers are made once. `size` is the bytes that are read over and
    over, so that a small model's floor counts on the caches it lives in."""

    @on_its_own
    def __init__(self, size: int, clock: Clock = time.perf_counter) -> None:
        columns = 1024
        self._clock = clock
        self._read_RC = torch.ones(max(1, size // 4 // columns), columns)
        self._ones_C = torch.ones(columns)
        self._square = torch.randn(SQUARE, SQUARE)

    @on_its_own
    def __call__(self, seconds: float = 0.15) -> Rates:
        """The best of what fits into `seconds` for each of three ways."""
        size = self._read_RC.numel() * 4
        reading = min(
            best(self._read_RC.sum, seconds, self._clock),
            best(lambda: torch.mv(self._read_RC, self._ones_C), seconds, self._clock),
        )
        multiplying = best(lambda: self._square @ self._square, seconds, self._clock)
        return Rates(size / reading, 2 * SQUARE**3 / multiplying)


def best(run: Callable[[], object], seconds: float, clock: Clock) -> float:
    """The least time of one call among those that fit, three at least."""
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < ends:
        started = clock()
        run()
        times.append(clock() - started)
    return min(times)


@dataclass(frozen=True, slots=True)
class Shape:
    """`parameters` of every linear and the head, `lora` features in plus out summed over the
    linears an adapter sits on, `queries`/`keys` heads times head size, a layer."""

    parameters: int
    lora: int
    layers: int
    queries: int
    keys: int
    vocabulary: int

    @staticmethod
    def of(path: Path) -> Shape:
        config = AutoConfig.from_pretrained(path).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return Shape(
            parameters=sum(m.in_features * m.out_features for m in linears),
            lora=sum(m.in_features + m.out_features for m in linears if m is not head),
            layers=config.num_hidden_layers,
            queries=heads * size,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * size,
            vocabulary=config.vocab_size,
        )

    @property
    def weight_bytes(self) -> int:
        return 4 * self.parameters

    def decode_seconds(
        self, rates: Rates, prompts: int, samples: int, prompt: int, own: int
    ) -> tuple[float, float]:
        """(seconds by bytes, seconds by FLOPs) of one step of prompts x samples rows that have
        drawn `own` tokens each; a prompt's keys and values are read once for its samples."""
        rows = prompts * samples
        remembered = prompts * prompt + rows * own
        size = self.weight_bytes + remembered * 2 * self.keys * self.layers * 4
        flops = rows * (2 * self.parameters + 4 * (prompt + own) * self.queries * self.layers)
        return size / rates.bandwidth, flops / rates.flops

    def learning_flops(self, groups: Sequence[tuple[int, Sequence[int]]], rank: int) -> float:
        """FLOPs that one forward and backward pass cannot do without: 4 a parameter and token (no
        gradient of frozen weights), 6 a LoRA parameter, 12 a pair of positions that see each other.
        `groups` are (shared tokens, own tokens of each member)."""
        tokens = pairs = 0
        for shared, members in groups:
            tokens += shared + sum(members)
            pairs += shared * (shared + 1) // 2
            pairs += sum(own * shared + own * (own + 1) // 2 for own in members)
        linear = 4 * self.parameters + 6 * rank * self.lora
        return float(tokens * linear + pairs * 12 * self.queries * self.layers)
