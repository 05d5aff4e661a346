"""Every option of a training run, declared once: the command line, `--help`, the saved copy and the
report all read this class. Knows no server, no task and no tokens.

Options of the REINFORCE++ mathematics carry the names, defaults and words of `ReinforcePPConfig`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import chz

from trimtab.errors import Invalid
from trimtab.trainer.reinforce_pp_config import (
    ReinforcePPConfig,
    RewardNorm,
    ScaleMode,
    Whiten,
)

OldLogprobs = Literal["auto", "sampler", "recompute"]
Schedule = Literal["constant", "linear", "cosine"]
Progress = Literal["auto", "live", "plain", "none"]

_SHAPING = {f.name: f for f in dataclasses.fields(ReinforcePPConfig)}

# Set by the algorithm (`group_baseline`) or under another name here (`kl_coef`).
NOT_OPTIONS = ("group_baseline", "kl_coef")


def _option(default: Any, doc: str) -> Any:
    return chz.field(default=default, doc=doc)


def _shaping(name: str) -> Any:
    field = _SHAPING[name]
    return chz.field(default=field.default, doc=field.metadata["doc"])


@chz.chz
class Config:
    """A training run. Give what differs from the defaults: `Config(task="my_task.py", steps=50)`,
    or on the command line `trimtab train my_task.py steps=50`.

    Groups: each step samples `group_size` completions of each of `groups_per_batch` prompts.
    """

    # ---- task, model, server
    task: str = _option("", "my_task.py, prompts.jsonl (with reward=), or reasoning_gym:NAME")
    reward: str = _option("", "file.py:function, the reward for prompts from a JSONL file")
    task_options: str = _option("", "JSON object of options for a reasoning_gym task")
    model: str = _option("", "base model; may be left out where the server offers one only")
    base_url: str | None = _option(
        None, "server; without it $TINKER_BASE_URL, else a server started here for this run"
    )
    start_from: str | None = _option(
        None, "tinker:// training checkpoint to take the weights from (fresh optimizer)"
    )
    lora_rank: int = _option(32, "rank of the adapter")
    seed: int = _option(0, "of the adapter, the order of prompts, sampling and mini-batches")

    # ---- algorithm and loss
    algorithm: str = _option(
        "reinforce_pp", "reinforce_pp, reinforce_pp_baseline, stable_reinforce, grpo or rloo"
    )
    loss: str | None = _option(None, "loss on the server (None: the algorithm's own)")
    clip_low_threshold: float | None = _option(
        None, "lower bound of the ratio in ppo, cispo and gspo (None: the loss's default)"
    )
    clip_high_threshold: float | None = _option(
        None, "upper bound of the ratio; above 1.2 in ppo this is clip-higher, e.g. 1.28"
    )
    dual_clip: float | None = _option(
        None, "c > 1: with ppo, a negative advantage costs at most c|A|; a client-side loss"
    )
    kl_coeff: float | None = _option(
        None, "stable_reinforce: pull to the sampler (None: 0.01); divided as advantages are"
    )
    dro_beta: float | None = _option(None, "dro: weight of the squared log-ratio (None: 0.05)")
    old_logprobs: OldLogprobs = _option(
        "auto", "π_old: the sampler's, or recomputed by the learner (auto: the algorithm's choice)"
    )
    token_mean: bool = _option(
        True, "divide each optimizer step's sum by its action tokens (kl_coeff as well)"
    )
    group_std: bool = _option(True, "grpo: divide by the standard deviation of the group")
    shuffle_rewards: bool = _option(
        False, "control experiment: rewards are dealt to sequences at random; must not learn"
    )

    # ---- KL to a reference
    reference: str = _option("", "π_ref: base, or a tinker:// sampler checkpoint; empty: none")
    kl_penalty_coef: float = _option(
        0.0, "β: KL to the reference, taken off the reward; 0 skips scoring it"
    )
    kl_loss_coef: float = _option(
        0.0, "λ: ½(log π − log π_ref)² as a loss of its own, with ppo; a client-side loss"
    )

    # ---- reward processing of reinforce_pp and reinforce_pp_baseline
    reward_norm: RewardNorm = _shaping("reward_norm")
    reward_mean: float | None = _shaping("reward_mean")
    reward_std: float | None = _shaping("reward_std")
    reward_clip: tuple[float, float] | None = _shaping("reward_clip")
    clip_before_norm: bool = _shaping("clip_before_norm")
    reward_scale: float = _shaping("reward_scale")
    reward_scale_mode: ScaleMode = _shaping("reward_scale_mode")
    truncated_reward: float | None = _shaping("truncated_reward")
    mask_truncated: bool = _shaping("mask_truncated")
    kl_clamp: float | None = _shaping("kl_clamp")
    gamma: float = _shaping("gamma")
    whiten: Whiten = _shaping("whiten")

    # ---- batches and optimizer
    steps: int = _option(100, "training steps: batches of rollouts")
    groups_per_batch: int = _option(16, "prompts a step")
    group_size: int = _option(4, "completions a prompt")
    epochs: int = _option(1, "passes over each batch, π_old fixed")
    minibatches: int = _option(1, "optimizer steps a pass, over shuffled whole sequences")
    learning_rate: float = _option(1e-4, "of Adam")
    lr_schedule: Schedule = _option("constant", "to 0 at the last step, or constant")
    warmup_steps: int = _option(0, "steps over which the learning rate rises from 0")
    beta1: float = _option(0.9, "of Adam")
    beta2: float = _option(0.95, "of Adam")
    eps: float = _option(1e-8, "of Adam")
    weight_decay: float = _option(0.0, "of AdamW")
    grad_clip_norm: float = _option(1.0, "bound of the global gradient norm; 0: none")

    # ---- sampling
    max_tokens: int = _option(64, "longest completion, or longest turn")
    temperature: float = _option(1.0, "of sampling while training")
    max_turns: int = _option(8, "most model turns of a multi-turn task")
    max_steps_off_policy: int = _option(
        0, "K: sampling may run ahead of training by this many steps; 0: in turns"
    )
    inflight: bool = _option(False, "sampling clients that take up new weights in mid-sequence")
    max_groups_in_flight: int = _option(0, "groups sampled at once; 0: all that K allows")
    long_prompts: Literal["refuse", "skip"] = _option(
        "refuse", "prompts that leave no room for max_tokens in the context"
    )

    # ---- rewards and evaluation
    reward_timeout: float = _option(60.0, "seconds a reward (or reply) may take")
    held_out: float = _option(
        0.0, "share of the prompts kept for evaluation, if the task has no held_out of its own"
    )
    eval_every: int = _option(10, "steps between evaluations on the held-out prompts; 0: never")
    eval_samples: int = _option(1, "sampled completions a held-out prompt, beside the greedy one")
    eval_limit: int = _option(0, "held-out prompts to use, from the first; 0: all")

    # ---- the run's folder
    log_path: str = _option("", "folder of the run (empty: runs/TASK-ALGORITHM-SEED)")
    resume: bool = _option(False, "go on with the run in that folder")
    save_every: int = _option(
        1, "steps between checkpoints; a killed run loses what came after the last one"
    )
    keep_every: int = _option(50, "of those, keep one in so many steps; 0: only the newest")
    transcripts: int = _option(4, "completions a step written to transcripts.jsonl")
    compute_post_kl: bool = _option(False, "measure the KL of each update (one more forward pass)")
    progress: Progress = _option("auto", "live display, a line a step, or nothing")
    report: bool = _option(True, "write report.html and report.png at the end")
    tensorboard: bool = _option(False, "also log to TensorBoard, in the run's folder")
    wandb_project: str | None = _option(None, "also log to this Weights & Biases project")
    trackio_project: str | None = _option(None, "also log to this Trackio project")

    @chz.validate
    def _check(self) -> None:
        _check_counts(self)
        _check_rates(self)
        _check_reference(self)
        shaping(self)


def shaping(config: Config, *, group_baseline: bool = False) -> ReinforcePPConfig:
    """The REINFORCE++ options of a run. A contradiction among them raises Invalid."""
    names = [name for name in _SHAPING if name not in NOT_OPTIONS]
    options = {name: getattr(config, name) for name in names}
    return ReinforcePPConfig(
        **options, kl_coef=config.kl_penalty_coef, group_baseline=group_baseline
    )


def learning_rate(config: Config, step: int) -> float:
    """The rate of step 0, 1, ... of the run.

    >>> learning_rate(Config(learning_rate=1.0, steps=4, lr_schedule="linear"), 1)
    0.75
    """
    done = min(step / config.steps, 1.0)
    factors = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * factors[config.lr_schedule] * warmup


_AT_LEAST = {
    "lora_rank": 1,
    "steps": 1,
    "groups_per_batch": 1,
    "group_size": 1,
    "epochs": 1,
    "minibatches": 1,
    "warmup_steps": 0,
    "max_tokens": 1,
    "max_turns": 1,
    "max_steps_off_policy": 0,
    "max_groups_in_flight": 0,
    "eval_every": 0,
    "eval_samples": 0,
    "eval_limit": 0,
    "save_every": 1,
    "keep_every": 0,
    "transcripts": 0,
    "seed": 0,
}


def _check_counts(config: Config) -> None:
    for name, low in _AT_LEAST.items():
        value = getattr(config, name)
        if value < low:
            raise Invalid(f"{name} is {value}; it must be at least {low}")
    most = config.groups_per_batch * config.group_size
    if config.minibatches > most:
        raise Invalid(
            f"minibatches is {config.minibatches}, but a batch has only {most} sequences "
            "(groups_per_batch × group_size)"
        )


def _check_rates(config: Config) -> None:
    positive = ("learning_rate", "eps", "reward_timeout")
    for name in (*positive, "weight_decay", "grad_clip_norm", "temperature"):
        value = getattr(config, name)
        low = "above 0" if name in positive else "0 or more"
        if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
            raise Invalid(f"{name} is {value}; it must be a finite number {low}")
    for name in ("beta1", "beta2", "held_out"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise Invalid(f"{name} is {value}; it must be in [0, 1)")
    if config.temperature == 0:
        raise Invalid(
            "temperature is 0, so every completion of a group would be the same and nothing could "
            "be learned; use 1 (held-out prompts are decoded greedily as well)"
        )


def _check_reference(config: Config) -> None:
    for name in ("kl_penalty_coef", "kl_loss_coef"):
        value = getattr(config, name)
        if not math.isfinite(value) or value < 0:
            raise Invalid(f"{name} is {value}; it must be a finite number of 0 or more")
        if value > 0 and not config.reference:
            raise Invalid(
                f"{name} is {value}, but there is no reference to measure KL against; set "
                f"reference=base (or a tinker:// sampler checkpoint), or {name}=0"
            )
    if config.reference not in ("", "base") and not config.reference.startswith("tinker://"):
        raise Invalid(
            f"reference is {config.reference!r}; it must be empty, base, or a tinker:// path"
        )
