"""What a forward and backward pass keeps in memory, measured once a net and then computed.

M packed rows of a pass, L rows of a segment, V vocabulary. Autograd says what it
keeps: a pass of L rows and one of twice as many give the bytes a row and, where attention keeps its
scores, the bytes a pair of rows. Counts of bytes, not timings, so they are the same in every run.
Knows nothing of data or of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.engine.adapters import new_adapter
from trimtab.engine.attention import Segments
from trimtab.engine.lora import Adapter
from trimtab.engine.net import Net, features
from trimtab.engine.shared_attention import SharedCausal
from trimtab.types import LoraConfig

ROWS = 32  # of the shorter of the two passes
SPARE = 1.5  # over what autograd keeps: what is alive for a moment, and the allocator's rounding
COLUMNS = 6  # float numbers that a loss keeps for each id it asks about
CHUNKS = 4  # chunks of logits alive at once beside those kept


@dataclass(frozen=True, slots=True)
class PassCost:
    """`row` bytes a packed row, `pair` bytes a pair of rows of one segment, `rank` bytes a row and
    unit of the adapter's rank, `widest` bytes of a row in its widest layer; V and the head's own
    bounds."""

    row: float
    pair: float
    rank: int
    widest: int
    layers: int
    vocab_size: int
    chunk_bytes: int
    kept_bytes: int

    def bytes(
        self, segments: Sequence[Segments], ids: int, adapter: Adapter, *, backward: bool
    ) -> int:
        """About what a pass over these segments needs at its peak, on the high side, when it is
        asked for `ids` log-probabilities in all."""
        rows = sum(each.rows for each in segments)
        pairs = sum(each.pairs for each in segments)
        kept = rows * (self.row + self.rank * adapter.config.rank) + pairs * self.pair
        logits = rows * self.vocab_size * 4
        chunks = CHUNKS * min(self.chunk_bytes, logits)
        loss = ids * 4 * COLUMNS
        if not backward:
            return int(SPARE * (2 * kept / self.layers + 4 * rows * self.widest + chunks + loss))
        gradients = sum(p.numel() * p.element_size() for p in adapter.parameters())
        passing = 4 * rows * self.widest + 2 * gradients
        return int(SPARE * (kept + passing + min(self.kept_bytes, logits) + chunks + loss))


def measured(net: Net, device: torch.device, longest: int) -> PassCost:
    """The cost of passes through `net`, by running two; `longest` is the context."""
    short = max(1, min(ROWS, longest // 2))
    adapter = new_adapter(net, LoraConfig(rank=1, seed=0), device)
    once, twice = (kept_bytes(net, device, adapter, n) for n in (short, 2 * short))
    pair = max(0.0, (twice - 2 * once) / (2 * short * short))
    inside = [size for name in net.linears for size in features(net.linears[name].base)]
    return PassCost(
        row=once / short - pair * short,
        pair=pair,
        rank=8 * len(adapter.pairs),
        widest=4 * max(inside),
        layers=layers_of(net),
        vocab_size=net.head.vocab_size,
        chunk_bytes=net.head.chunk_bytes,
        kept_bytes=net.head.kept_bytes,
    )


def layers_of(net: Net) -> int:
    """How many layers the decoder has: the longest list of modules in it."""
    lists = [len(m) for m in net.decoder.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, default=1)


def kept_bytes(net: Net, device: torch.device, adapter: Adapter, rows: int) -> int:
    """Bytes that a pass over one segment of `rows` keeps for its backward pass, weights apart."""
    for parameter in adapter.parameters():
        parameter.requires_grad_(True)
    ours = {_place(t) for t in (*adapter.parameters(), *net.decoder.parameters())}
    ours |= {_place(t) for t in net.decoder.buffers()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _place(tensor) not in ours:
            held[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        plan = SharedCausal([Segments(0, (rows,))])
        hidden = net.hidden(tokens, torch.arange(rows, device=device), plan, [(adapter, 0, rows)])
    del hidden
    return sum(held.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
