"""What a run optimises, settled before it begins: algorithm, loss, thresholds, π_old.

Checks that these fit together. The numbers sent to the server are made here; the token mean divides
them by the action tokens of an optimizer step. Knows no server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.errors import Invalid
from trimtab.trainer.algorithms import Algorithm, algorithm
from trimtab.trainer.config import Config

# Loss -> the options it takes, as (Config field, key of loss_fn_config).
_CLIP = (
    ("clip_low_threshold", "clip_low_threshold"),
    ("clip_high_threshold", "clip_high_threshold"),
)
LOSSES: dict[str, tuple[tuple[str, str], ...]] = {
    "importance_sampling": (),
    "ppo": _CLIP,
    "cispo": _CLIP,
    "gspo": _CLIP,
    "dro": (("dro_beta", "beta"),),
    "stable_reinforce": (("kl_coeff", "kl_coeff"),),
}
KL_COEFF = 0.01  # stable_reinforce's default, sent because the token mean divides it
CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # ppo's own defaults, needed by the client-side loss


@dataclass(frozen=True)
class Objective:
    """`custom`: the loss runs on this side, because it has a dual clip or a reference loss."""

    algorithm: Algorithm
    loss: str
    thresholds: dict[str, float]
    old_logprobs: Literal["sampler", "recompute"]
    custom: bool

    @property
    def records(self) -> bool:
        """Sampling clients must record stability information."""
        return self.loss == "stable_reinforce"

    def loss_config(self, divisor: float) -> dict[str, float]:
        """`loss_fn_config` of a request whose advantages were divided by `divisor`. The penalty of
        stable_reinforce is a sum over tokens as well, so it is divided with them."""
        if self.loss != "stable_reinforce":
            return dict(self.thresholds)
        return {"kl_coeff": self.thresholds.get("kl_coeff", KL_COEFF) / divisor}


def objective(config: Config) -> Objective:
    chosen = algorithm(config.algorithm)
    if chosen.smallest_group > config.group_size:
        raise Invalid(
            f"{chosen.name} takes a baseline over the completions of a prompt, but group_size is "
            f"{config.group_size}; use group_size=2 or more, or algorithm=reinforce_pp"
        )
    loss = config.loss or chosen.loss
    if loss not in LOSSES:
        raise Invalid(f"loss is {loss!r}; it must be one of {', '.join(LOSSES)}")
    custom = config.dual_clip is not None or config.kl_loss_coef > 0
    _check_custom(config, loss, custom)
    return Objective(
        chosen, loss, _thresholds(config, loss), _old_logprobs(config, chosen, loss), custom
    )


def _thresholds(config: Config, loss: str) -> dict[str, float]:
    names = {name for options in LOSSES.values() for name, _ in options}
    taken = dict(LOSSES[loss])
    for name in sorted(names - taken.keys()):
        if getattr(config, name) is not None:
            allowed = [other for other, options in LOSSES.items() if name in dict(options)]
            raise Invalid(
                f"{name} is {getattr(config, name)}, but the loss {loss} does not take it; it is "
                f"for {', '.join(allowed)}"
            )
    given = {key: getattr(config, name) for name, key in taken.items()}
    found = {key: float(value) for key, value in given.items() if value is not None}
    for key, value in found.items():
        if not 0 <= value < float("inf"):
            raise Invalid(f"{key} is {value}; it must be a finite number of 0 or more")
    return found


def _old_logprobs(config: Config, chosen: Algorithm, loss: str) -> Literal["sampler", "recompute"]:
    if loss == "stable_reinforce":
        if config.old_logprobs == "recompute":
            raise Invalid(
                "old_logprobs is recompute, but stable_reinforce compares the learner with the "
                "sampler itself; use old_logprobs=sampler"
            )
        return "sampler"
    return chosen.old_logprobs if config.old_logprobs == "auto" else config.old_logprobs


def _check_custom(config: Config, loss: str, custom: bool) -> None:
    if config.dual_clip is not None and not 1 < config.dual_clip < float("inf"):
        raise Invalid(f"dual_clip is {config.dual_clip}; it must be a finite number above 1")
    if custom and loss != "ppo":
        name = "dual_clip" if config.dual_clip is not None else "kl_loss_coef"
        raise Invalid(f"{name} runs as a client-side loss, for ppo only, but the loss is {loss}")
