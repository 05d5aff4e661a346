"""Custom losses: traced and encoded by the SDK, run here from data, beside the function itself."""

import math

import pytest
import torch

from tests.custom_losses import encoded
from trimtab.errors import Invalid
from trimtab.losses import LOSSES, LossInputs
from trimtab.losses.traced import trace
from trimtab.types import CustomLoss, CustomLossInput, CustomLossNode

# ---- what users write


def clipped(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    low = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -low.sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/rows:sum": ratio.new_ones(()).sum(),
    }


def shaped(logprobs, advantages, scale):
    n = logprobs.shape[0]
    weights = torch.arange(n) / math.sqrt(n)
    centred = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    pairs = logprobs[:, None] - logprobs[None, :]
    loss = -(weights * centred * logprobs).sum() * scale + 1e-3 * (pairs**2).mean()
    return loss, {"custom/n:sum": weights.sum().clamp(max=float("inf"))}


def masked(logprobs, advantages):
    good = advantages > 0
    chosen = logprobs[good]
    top, where = torch.max(logprobs, dim=0)
    loss = torch.where(good, -logprobs, torch.zeros_like(logprobs)).sum() - 0.1 * top
    return loss + torch.nn.functional.softplus(chosen).sum(), {
        "custom/chosen:sum": (good.sum() + 0 * where).to(torch.float32)
    }


def alternatives(logprobs, teacher):
    return torch.nn.functional.kl_div(logprobs, teacher.abs(), reduction="sum"), {
        "custom/first:sum": logprobs[..., 0].detach().sum()
    }


LENGTHS = (5, 2, 7)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        (clipped, {"old": 1, "advantages": 1}),
        (masked, {"advantages": 1}),
        (alternatives, {"teacher": 2}),
    ],
)
def test_value_gradient_and_metrics_are_the_functions_own(function, ranks):
    """Rows of three datums at once, against the function run on each."""
    generator = torch.Generator().manual_seed(0)
    wide = (3,) if 2 in ranks.values() else ()
    rows = sum(LENGTHS)
    logprobs = -torch.rand((rows, *wide), generator=generator, dtype=torch.float64).requires_grad_()
    tensors = {
        name: torch.rand((rows, *(wide if rank == 2 else ())), generator=generator) - 0.4
        for name, rank in ranks.items()
    }
    datum_N = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    loss = trace(encoded(function, logprobs=2 if wide else 1, **ranks))
    found = loss(LossInputs(logprobs, tensors, datum_N=datum_N), {})
    [gradient] = torch.autograd.grad(found.loss, logprobs)

    split = [logprobs.split(LENGTHS), *(t.split(LENGTHS) for t in tensors.values())]
    each = [function(*parts) for parts in zip(*split, strict=True)]
    expected = sum(value for value, _ in each)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0])
    for name in each[0][1]:
        total = sum(metrics[name].detach().float() for _, metrics in each)
        torch.testing.assert_close(found.metrics[name], total)


def test_scalars_shapes_and_pairs():
    logprobs = -torch.rand(6, requires_grad=True)
    tensors = {"advantages": torch.randn(6), "scale": torch.tensor(0.5)}
    loss = trace(encoded(shaped, logprobs=1, advantages=1, scale=0))
    found = loss(LossInputs(logprobs, tensors), {})
    expected, metrics = shaped(logprobs, *tensors.values())
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.metrics["custom/n:sum"], metrics["custom/n:sum"])


def test_it_is_ppo_when_it_says_what_ppo_says():
    logprobs = -torch.rand(9, requires_grad=True)
    old, advantages = logprobs.detach() + 0.3 * torch.randn(9), torch.randn(9)
    ours = trace(encoded(clipped, logprobs=1, old=1, advantages=1))
    found = ours(LossInputs(logprobs, {"old": old, "advantages": advantages}), {}).loss
    ppo = LOSSES["ppo"]
    config = {name: key.default for name, key in ppo.spec.config.items()}
    inputs = {"target_tokens": torch.zeros(9), "logprobs": old, "advantages": advantages}
    torch.testing.assert_close(found, ppo(LossInputs(logprobs, inputs), config).loss)


# ---- what is refused

GOOD = (
    CustomLossNode("placeholder", "x", "logprobs"),
    CustomLossNode("call_method", "total", "sum", ({"ref": "x"},)),
    CustomLossNode("output", "output", "output", ({"tuple": [{"ref": "total"}, {"dict": {}}]},)),
)


def graph(*middle, end=GOOD[2]):
    return CustomLoss("mine", (CustomLossInput("logprobs", 1),), (*GOOD[:2], *middle, end))


def node(target, *args, op="call_function", name="bad", **kwargs):
    return CustomLossNode(op, name, target, args, kwargs)


X = {"ref": "x"}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (node("builtins.eval", "1"), "calls 'builtins.eval', which is not allowed"),
        (node("os.system", "ls"), "'os.system'"),
        (node("torch.load", "x"), "'torch.load'"),
        (node("torch.randn", 3), "'torch.randn'"),
        (node("torch.ops.aten.add", X, 1), "'torch.ops.aten.add'"),
        (node("item", X, op="call_method"), "method 'item'"),
        (node("__class__", X, op="call_method"), "method '__class__'"),
        (node("numpy", X, op="call_method"), "method 'numpy'"),
        (node("getattr", X, "grad_fn"), "attribute; allowed are shape"),
        (node("builtins.getattr", X, "__class__"), "attribute"),
        (node("weight", op="get_attr"), "'get_attr'"),
        (node("layer", X, op="call_module"), "'call_module'"),
        (node("torch.exp", X, out=X), "passes 'out'"),
        (node("torch.exp", {"ref": "later"}), "ref 'later'"),
        (node("torch.exp", {"ref": ["x"]}), "ref" ),
        (node("torch.exp", {"dtype": {}}), "dtype '{}'"),
        (node("torch.exp", {"code": "1+1"}), "kind 'code'"),
        (node("torch.exp", {"dtype": "complex64"}), "dtype 'complex64'"),
        (node("torch.exp", 2**70), "64 bits"),
        (node("torch.exp", [[[[[[[[[1]]]]]]]]]), "nested"),
        (node("torch.exp", X, name="x"), "named 'x'"),
        (node("torch.exp", X, name="a b"), "named 'a b'"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_named(bad, words):
    with pytest.raises(Invalid, match="custom loss 'mine'") as told:
        trace(graph(bad))
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (node("torch.zeros", 10**10), "more than"),
        (node("torch.arange", 10**12), "more than"),
        (node("expand", X, 10**9, 4, op="call_method"), "more than"),
        (node("operator.pow", 10, 10**9), "63 bits"),
        (node("operator.mul", [0], 10**12), "tensors and numbers"),
        (node("operator.mul", "a", 10**12), "tensors and numbers"),
        (node("torch.exp", "a"), "exp"),
        (node("torch.cat", [X, {"ref": "total"}]), "dimensions"),
        (node("torch.where", X), "two values"),
        (node("operator.truediv", 1, 0), "zero"),
        (node("sum", 3, op="call_method"), "called on a int"),
    ],
)
def test_what_would_be_too_much_or_fails_is_told_by_its_node(bad, words):
    loss = trace(graph(bad))
    with pytest.raises(Invalid, match="node 'bad'") as told:
        loss(LossInputs(-torch.rand(4, requires_grad=True), {}), {})
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"ref": "total"}, "must be"),
        ({"tuple": [1.0, {"dict": {}}]}, "must be"),
        ({"tuple": [{"ref": "total"}, {"dict": {"loss:sum": {"ref": "total"}}}]}, "custom/<name>"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/x:max": X}}]}, "custom/<name>"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/x:sum": 1.0}}]}, "custom/<name>"),
    ],
)  # fmt: skip
def test_outputs_of_another_form_are_refused(output, words):
    with pytest.raises(Invalid, match=words):
        trace(graph(end=CustomLossNode("output", "output", "output", (output,))))


def test_a_loss_that_is_no_scalar_is_refused():
    loss = trace(
        graph(end=CustomLossNode("output", "out", "output", ({"tuple": [X, {"dict": {}}]},)))
    )
    with pytest.raises(Invalid, match=r"loss as a scalar tensor, found shape \(4,\)"):
        loss(LossInputs(-torch.rand(4, requires_grad=True), {}), {})


def test_inputs_are_not_changed_in_place():
    first = node("operator.imul", {"ref": "x"}, 2.0)
    end = CustomLossNode("output", "output", "output", ({"tuple": [{"ref": "s"}, {"dict": {}}]},))
    loss = trace(graph(first, node("sum", {"ref": "bad"}, op="call_method", name="s"), end=end))
    logprobs = -torch.rand(4, requires_grad=True)
    before = logprobs.detach().clone()
    loss(LossInputs(logprobs, {}), {}).loss.backward()
    assert torch.equal(logprobs.detach(), before)
