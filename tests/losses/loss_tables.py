"""Loss inputs from explicit tables of p and q, and gradients with respect to logits.

V vocabulary. `q_NV` is the sampler's distribution as drawn from (tempered); `logits_NV` the
learner's, untempered.
"""

import torch

from trimtab.losses import LOSSES, LossInputs, StabilityInputs
from trimtab.losses.metrics import combine

NAN, INF = float("nan"), float("inf")


def table(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def defaults(loss, **changes):
    return {name: key.default for name, key in loss.spec.config.items()} | changes


def policy_inputs(logp, logq, advantages, **tensors):
    """Inputs of the losses that need no record; `logp` is used as it is."""
    tensors = {"logprobs": logq, "advantages": advantages, **tensors}
    return LossInputs(logp, tensors)


def stable_inputs(
    logits_NV,
    q_NV,
    x,
    advantages,
    head,
    *,
    sequence=None,
    recorded=None,
    tau=1.0,
    logprobs=None,
    version=0.0,
    learner_step=0.0,
):
    """Inputs of a loss on a record. `head` (N, K) ids, -1 for an empty cell; `logprobs` is the
    caller's tensor where it shall differ from the record."""
    rows, dtype = len(logits_NV), logits_NV.dtype
    x_N, head_NK = torch.as_tensor(x), torch.as_tensor(head)
    cells_NK = head_NK.clamp(min=0)
    logp_NV, logq_NV = logits_NV.log_softmax(-1), q_NV.to(dtype).log()
    tempered_NV = (logits_NV.detach() / tau).log_softmax(-1)

    def at_target(values_NV):
        return values_NV.gather(-1, x_N[:, None])[:, 0]

    logq_N = at_target(logq_NV)
    stability = StabilityInputs(
        sequence_N=torch.as_tensor([0] * rows if sequence is None else sequence),
        recorded_N=torch.as_tensor([True] * rows if recorded is None else recorded),
        logprobs_N=logq_N,
        head_ids_NK=cells_NK,
        head_logprobs_NK=torch.where(head_NK < 0, -INF, logq_NV.gather(-1, cells_NK)),
        target_tempered_N=at_target(tempered_NV),
        head_target_logprobs_NK=logp_NV.gather(-1, cells_NK),
        head_target_tempered_NK=tempered_NV.gather(-1, cells_NK),
        temperature_N=torch.full((rows,), tau, dtype=dtype),
        version_step_N=torch.as_tensor(version, dtype=dtype).expand(rows),
        target_ids_N=x_N,
        learner_step=learner_step,
    )
    tensors = {
        "target_tokens": x_N,
        "logprobs": logq_N if logprobs is None else logprobs,
        "advantages": torch.as_tensor(advantages, dtype=dtype),
    }
    return LossInputs(at_target(logp_NV), tensors, stability)


def leaf(values):
    return torch.as_tensor(values).detach().clone().requires_grad_()


def gradient(loss, make_inputs, values, **config):
    """(loss value, d loss / d values, metrics): `make_inputs(values)` builds what the loss sees."""
    loss = LOSSES[loss] if isinstance(loss, str) else loss
    values = leaf(values)
    out = loss(make_inputs(values), defaults(loss, **config))
    (found,) = torch.autograd.grad(out.loss, values)
    return out.loss.item(), found, combine([out.metrics])


def differences(function, values, step=1e-6):
    """Central differences of `function`, entry by entry."""
    values = values.detach().clone()
    found = torch.zeros_like(values)
    for i in range(values.numel()):
        flat = values.view(-1)
        kept = flat[i].item()
        flat[i] = kept + step
        above = function(values)
        flat[i] = kept - step
        below = function(values)
        flat[i] = kept
        found.view(-1)[i] = (above - below) / (2 * step)
    return found


def close(found, wanted, within=1e-7):
    found, wanted = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=within)


def mean(metrics, name):
    """A mean as whoever shows it forms it."""
    return metrics[f"{name}/num:sum"] / metrics[f"{name}/den:sum"]


def every_metric(loss):
    """Metrics of two recorded rows under all inputs that any loss takes."""

    def inputs(logits):
        made = stable_inputs(logits, table([[0.6, 0.4]] * 2), [0, 1], [1.0, -1.0], [[0], [1]])
        tensors = {**made.tensors, "sequence_ratio_mask": torch.ones(2)}
        return LossInputs(made.target_logprobs, tensors, made.stability)

    return gradient(loss, inputs, table([[0.5, 0.5]] * 2).log())[2]
