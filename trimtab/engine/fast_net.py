"""A net for sampling: the Llama family's decoder written flat, for when a step is small.

M packed rows, d hidden size, Hq query and H key/value heads, D head size.

A decode step of a small model is mostly the cost of asking: module calls, separate projections,
masks nobody needs. This runs the same weights with far fewer operations. Which models it fits is
not decided by name: a decoder of this structure is tried on a probe and taken only if its hidden
states are those of the net it replaces. Knows nothing of caches, prompts or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.engine.attention import AttentionPlan, PackedCausal, Rule
from trimtab.engine.head import Head
from trimtab.engine.kernels import Int8Linear
from trimtab.engine.lora import AdapterPlan, LoraLinear
from trimtab.engine.net import Net
from trimtab.engine.packed import LEAST, PackedLinear, can_pack
from trimtab.engine.structure import Parts, RmsNorm

PROBE = (9, 4)
TOLERANCE = 1e-5
DIGITS_TOLERANCE = (
    1e-3  # int8's activations have 15 bits: a last bit of float32 may move a whole step
)


@torch.inference_mode()
def faster(net: Net, *, packed_bytes: int = 0) -> Net | FastNet:
    """A FastNet with the numbers of `net`, or `net` itself where its decoder is another kind. The
    weights are packed if the copy of them takes no more than `packed_bytes`."""
    bases = [linear.base for linear in net.linears.values()] + [net.head.base]
    pack = all(map(can_pack, bases)) and sum(b.weight.nbytes for b in bases) <= packed_bytes
    try:
        fast = FastNet(net, pack=pack)
        return fast if agrees(fast, net) else net
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError):
        return net  # not of this structure


class FastNet:
    """Net's `hidden` and `head` for decoders of attention and gated MLP, each after an RMS norm."""

    def __init__(self, net: Net, *, pack: bool) -> None:
        decoder = net.decoder
        rules = rules_of(net)
        self.embed: nn.Module = decoder.embed_tokens
        self.rotary: nn.Module = decoder.rotary_emb
        self.norm = RmsNorm.of(decoder.norm)
        self.layers = [
            Layer.of(layer, rules[i], pack=pack) for i, layer in enumerate(decoder.layers)
        ]
        self.head: Head = (
            replace(net.head, base=PackedLinear.of(net.head.base)) if pack else net.head
        )
        self.least = LEAST if pack else 1
        self.given: tuple[AdapterPlan, int] = ((), 0)  # the last pass's
        self.plan: AdapterPlan = ()  # and what became of it

    def hidden(
        self,
        tokens_M: Tensor,
        positions_M: Tensor,
        attention: AttentionPlan,
        adapters: AdapterPlan,
    ) -> Tensor:
        """(M,) int64 tokens and positions -> (M, d), what the head takes."""
        rows, short = len(tokens_M), max(0, self.least - len(tokens_M))
        if short:  # rows that attend to nothing and that nobody sees
            tokens_M, positions_M = F.pad(tokens_M, (0, short)), F.pad(positions_M, (0, short))
            attention = _Shortened(attention, rows)
        if self.given[0] is not adapters or self.given[1] != short:  # not the same batch's
            self.given = adapters, short
            self.plan = [(a, i, j + short * (j == rows)) for a, i, j in adapters if a is not None]
        x_Md = self.embed(tokens_M)
        cos, sin = self.rotary(x_Md[None], positions_M[None])
        half = sin.shape[-1] // 2
        turn = (cos[0][:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[0][:, None])
        for i, layer in enumerate(self.layers):
            x_Md = layer.forward(i, x_Md, turn, attention, self.plan)
        return self.norm(x_Md[:rows] if short else x_Md)

    def forget(self) -> None:
        """Let go of the last pass's adapters."""
        self.given, self.plan = ((), 0), ()
        for layer in self.layers:
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                projection.plan, projection.products = (), []


class _Shortened:
    """A plan for the first rows of a pass; the others get zeros."""

    def __init__(self, plan: AttentionPlan, rows: int) -> None:
        self.plan = plan
        self.rows = rows

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **rule: Any) -> Tensor:
        short = q.shape[2] - self.rows
        q, k, v = (x[:, :, : self.rows] for x in (q, k, v))
        return F.pad(self.plan.attend(layer, q, k, v, **rule), (0, 0, 0, 0, 0, short))


class Projection:
    """Linears of one input, side by side in one product where the weights may be packed."""

    def __init__(self, linears: Sequence[LoraLinear], *, pack: bool) -> None:
        bases = [linear.base for linear in linears]
        self.bases: list[Callable[[Tensor], Tensor]] = bases
        if pack:
            self.bases = [PackedLinear.of(*bases)]
        elif all(isinstance(base, Int8Linear) for base in bases):
            self.bases = [Int8Linear.of(*bases)]
        self.parts: list[tuple[str, int, int]] = []
        start = 0
        for linear in linears:
            stop = start + linear.base.out_features
            self.parts.append((linear.name, start, stop))
            start = stop
        self.plan: AdapterPlan = ()  # the last one, and its products
        self.products: list[_LowRank] = []

    def __call__(self, x_MI: Tensor, plan: AdapterPlan) -> Tensor:
        """(M, in) -> (M, out of all)."""
        made = [base(x_MI) for base in self.bases]
        y_MO = made[0] if len(made) == 1 else torch.cat(made, -1)
        if plan:
            if plan is not self.plan:
                self.plan, self.products = plan, self._products(plan, x_MI.shape[0])
            for rows, columns, A_Ir, B_rO, scale in self.products:
                x, y = (x_MI, y_MO) if rows is None else (x_MI[rows], y_MO[rows])
                (y if columns is None else y[:, columns]).addmm_(x @ A_Ir, B_rO, alpha=scale)
        return y_MO

    def _products(self, plan: AdapterPlan, rows: int) -> list[_LowRank]:
        """A plan as its products, once a batch: with many adapters in a step, finding and turning
        the factors takes as long as multiplying them. Only views are kept."""
        out = []
        for adapter, i, j in plan:
            for name, start, stop in self.parts:
                if adapter is not None and name in adapter.pairs:
                    A, B = adapter.pairs[name]
                    out.append(
                        _LowRank(
                            None if j - i == rows else slice(i, j),
                            None if len(self.parts) == 1 else slice(start, stop),
                            A.t(),
                            B.t(),
                            adapter.scale,
                        )
                    )
        return out


class _LowRank(NamedTuple):
    """y[rows, columns] += scale * (x[rows] A) B; None: all of them."""

    rows: slice | None
    columns: slice | None
    A_Ir: Tensor
    B_rO: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    before: RmsNorm
    qkv: Projection
    turned: RmsNorm | None  # of queries and keys, (Hq + H, D)
    out: Projection
    between: RmsNorm
    gate_up: Projection
    down: Projection
    act: Callable[[Tensor], Tensor]
    queries: int
    keys: int
    rule: Rule

    @staticmethod
    def of(layer: Any, rule: tuple[Rule, int, int], *, pack: bool) -> Layer:
        how, queries, keys = rule
        parts = Parts.of(layer, queries, keys)
        return Layer(
            before=parts.before,
            qkv=Projection(parts.qkv, pack=pack),
            turned=parts.heads,
            out=Projection([parts.out], pack=pack),
            between=parts.between,
            gate_up=Projection(parts.gate_up, pack=pack),
            down=Projection([parts.down], pack=pack),
            act=parts.act,
            queries=queries,
            keys=keys,
            rule=how,
        )

    def forward(
        self,
        index: int,
        x_Md: Tensor,
        turn: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        adapters: AdapterPlan,
    ) -> Tensor:
        x_Md = x_Md + self.out(self._attend(index, x_Md, turn, plan, adapters), adapters)
        gate, up = self.gate_up(self.between(x_Md), adapters).chunk(2, -1)
        return x_Md.add_(self.down(self.act(gate) * up, adapters))

    def _attend(
        self,
        index: int,
        x_Md: Tensor,
        turn: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        adapters: AdapterPlan,
    ) -> Tensor:
        heads = self.queries + 2 * self.keys
        qkv_MHD = self.qkv(self.before(x_Md), adapters).unflatten(-1, (heads, -1))
        qk_MHD, v_MHD = qkv_MHD[:, : -self.keys], qkv_MHD[:, -self.keys :]
        if self.turned is not None:
            qk_MHD = self.turned(qk_MHD)
        cos, sin = turn
        size = qk_MHD.shape[-1]
        qk_MHD = torch.addcmul(qk_MHD * cos, qk_MHD.roll(size // 2, -1), sin)
        q, k = qk_MHD[:, : self.queries], qk_MHD[:, self.queries :]
        out = plan.attend(
            index,
            *(part.transpose(0, 1)[None] for part in (q, k, v_MHD)),
            scale=self.rule.scale,
            window=self.rule.window,
            softcap=self.rule.softcap,
        )
        return out.flatten(2)[0]


# --------------------------------------------------------------------------- fitting


class _Watched(PackedCausal):
    """A PackedCausal that notes what each layer asks for: its rule, and how many heads."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.rules: dict[int, tuple[Rule, int, int]] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.rules[layer] = (Rule(scale, window, softcap), q.shape[1], k.shape[1])
        return super().attend(layer, q, k, v, scale=scale, window=window, softcap=softcap)


def run_probe(net: Net | FastNet, plan: AttentionPlan) -> Tensor:
    """Hidden states of fixed tokens, two sequences of different lengths."""
    rows = sum(PROBE)
    device = next(
        iter(net.embed.parameters() if isinstance(net, FastNet) else net.decoder.parameters())
    ).device
    tokens = (torch.arange(rows, device=device) * 7919 + 11) % net.head.vocab_size
    positions = torch.cat([torch.arange(n, device=device) for n in PROBE])
    return net.hidden(tokens, positions, plan, [])


def rules_of(net: Net) -> dict[int, tuple[Rule, int, int]]:
    plan = _Watched(PROBE)
    run_probe(net, plan)
    return plan.rules


def agrees(fast: FastNet, net: Net) -> bool:
    expected = run_probe(net, PackedCausal(PROBE))
    found = run_probe(fast, PackedCausal(PROBE))
    if found.dtype != torch.float32 or expected.dtype != torch.float32:
        return False
    coarse = any(isinstance(linear.base, Int8Linear) for linear in net.linears.values())
    allowed = DIGITS_TOLERANCE if coarse else TOLERANCE
    return bool((found - expected).abs().max() <= allowed * expected.abs().max().clamp(min=1.0))
