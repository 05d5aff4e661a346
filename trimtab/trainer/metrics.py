"""Names and sums of what a step reports. Knows no server and no files.

Every mean `m` comes from the server as `m/num:sum` and `m/den:sum`; here they are added over the
optimizer steps of a training step and divided, and `m` is shown. Names are tinker-cookbook's where
it has one; docs/trainer.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from trimtab.trainer.ahead import Ages
from trimtab.trainer.batch import Batch
from trimtab.trainer.trajectory import Floats, Group, Trajectory

Metrics = dict[str, float]

_JOIN: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}


def join(found: Sequence[Mapping[str, float]]) -> Metrics:
    """Add up several requests' metrics by their suffix, and divide the pairs.

    >>> join([{"x/num:sum": 1.0, "x/den:sum": 2.0}, {"x/num:sum": 2.0, "x/den:sum": 2.0}])
    {'x': 0.75}
    >>> join([{"loss:sum": 1.0, "tv:max": 0.1}, {"loss:sum": 2.0, "tv:max": 0.3}])
    {'loss:sum': 3.0, 'tv_max': 0.3}
    """
    names = dict.fromkeys(name for metrics in found for name in metrics)
    joined = {name: _reduced(name, [m[name] for m in found if name in m]) for name in names}
    shown: Metrics = {}
    for name, value in joined.items():
        base, _, suffix = name.partition(":")
        if base.endswith("/num") and f"{base[:-4]}/den:sum" in joined:
            rows = joined[f"{base[:-4]}/den:sum"]
            if rows:
                shown[base[:-4]] = value / rows
        elif base.endswith("/den"):
            continue
        else:
            shown[f"{base}_{suffix}" if suffix in ("max", "min") else name] = value
    return shown


def _reduced(name: str, values: Sequence[float]) -> float:
    suffix = name.partition(":")[2]
    return float(_JOIN[suffix](values)) if suffix in _JOIN else float(np.mean(values))


def learner_metrics(joined: Mapping[str, float]) -> Metrics:
    """The server's own under `optim/`, but for `loss:sum`, which keeps its name."""
    return {n if n == "loss:sum" else f"optim/{n}": v for n, v in joined.items()}


def sampler_gap(batch: Batch, learner_D_N: Sequence[Floats]) -> Metrics:
    """KL(q || p) between sampler and learner over action tokens, by three estimators, and the
    sampled entropy. Of q and p as they were before the update (with mini-batches: as it went on).

    k1 = mean d, k2 = ½ mean d², k3 = mean(e^-d - 1 + d), d = log q - log p.
    """
    q, p = over(batch.sampled_D_N, batch), over(learner_D_N, batch)
    d = q - p
    return {
        "optim/kl_sample_train_v1": float(d.mean()),
        "optim/kl_sample_train_v2": float(0.5 * np.square(d).mean()),
        "optim/kl_sample_train_v3": float(np.mean(np.expm1(np.clip(-d, -30, 30)) + d)),
        "optim/entropy": float(-q.mean()),
    }


def update_gap(before_D_N: Sequence[Floats], after_D_N: Sequence[Floats], batch: Batch) -> Metrics:
    """How far one step moved the policy, on the tokens that it was trained on."""
    d = over(before_D_N, batch) - over(after_D_N, batch)
    return {
        "kl_pre_post_v1": float(d.mean()),
        "kl_pre_post_v2": float(0.5 * np.square(d).mean()),
    }


def over(values_D_N: Sequence[Floats], batch: Batch) -> Floats:
    """All action tokens of the batch in one array."""
    pairs = zip(values_D_N, batch.mask_D_N, strict=True)
    return np.concatenate([values_N[mask_N] for values_N, mask_N in pairs])


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """`env/all/...` over every graded trajectory, failures counted apart."""
    everything = [t for group in groups for t in group.trajectories]
    graded = [t for t in everything if t.reward is not None]
    failures = len(everything) - len(graded)
    metrics: Metrics = {
        "env/all/total_episodes": float(len(everything)),
        "env/all/reward_failures": float(failures),
        **_failure_kinds(everything),
        **_lengths(everything),
        **_by_group(groups),
    }
    if graded:
        rewards = np.array([t.reward for t in graded], dtype=np.float64)
        metrics["env/all/reward/total"] = float(rewards.mean())
        metrics["env/all/reward/std"] = float(rewards.std())
        metrics["env/all/reward/min"] = float(rewards.min())
        metrics["env/all/reward/max"] = float(rewards.max())
    return metrics


def _failure_kinds(trajectories: Iterable[Trajectory]) -> Metrics:
    found: Metrics = {}
    for trajectory in trajectories:
        if trajectory.failure:
            name = f"env/all/reward_failures/{trajectory.failure.partition(':')[0]}"
            found[name] = found.get(name, 0.0) + 1.0
    return found


def _lengths(trajectories: Sequence[Trajectory]) -> Metrics:
    turns = sum(len(t.turns) for t in trajectories)
    actions = sum(t.action_tokens for t in trajectories)
    observed = sum(t.prompt_tokens for t in trajectories)
    return {
        "env/all/ac_tokens_per_turn": actions / turns,
        "env/all/ob_tokens_per_turn": observed / turns,
        "env/all/turns_per_episode": turns / len(trajectories),
        "env/all/total_turns": float(turns),
        "env/all/total_ac_tokens": float(actions),
        "env/all/total_ob_tokens": float(observed),
        "env/all/frac_truncated": float(np.mean([t.completion.truncated for t in trajectories])),
    }


def _by_group(groups: Sequence[Group], good: float = 0.5) -> Metrics:
    """Shares of groups whose rewards differ, are all good, are all bad; of graded groups."""
    rewards = [[t.reward for t in g.trajectories if t.reward is not None] for g in groups]
    rewards = [found for found in rewards if found]
    mixed = [len(set(found)) > 1 for found in rewards]
    all_good = [not m and found[0] >= good for m, found in zip(mixed, rewards, strict=True)]
    all_bad = [not m and found[0] < good for m, found in zip(mixed, rewards, strict=True)]
    shares = {"frac_mixed": mixed, "frac_all_good": all_good, "frac_all_bad": all_bad}
    return {f"env/all/by_group/{n}": float(np.mean(v)) for n, v in shares.items() if v}


def staleness_metrics(found: Ages, step: int) -> Metrics:
    """The weights that sampled the batch, as steps of training, and their age."""
    return {
        "sampling_client/step_min": float(step - found.high),
        "sampling_client/step_mean": step - found.mean,
        "sampling_client/step_max": float(step - found.low),
        "staleness/mean": found.mean,
        "staleness/max": float(found.high),
    }


def left_out_metrics(left_out: Mapping[str, int], sequences: int) -> Metrics:
    """How many sequences no update saw, and why."""
    found = {f"batch/left_out_{reason}": float(count) for reason, count in left_out.items()}
    return {"batch/trained_sequences": float(sequences)} | found
