"""The one table of losses; the server, the docs and the tests read it.

To add a loss: a function in this folder, its `Loss` in the table, a row in docs/losses.md, and
tests of its value, its gradient and one identity.
"""

from trimtab.losses.base import Loss, LossInputs, LossOutputs, StabilityInputs
from trimtab.losses.policy import POLICY_LOSSES
from trimtab.losses.stable_reinforce import STABLE_REINFORCE

LOSSES: dict[str, Loss] = {loss.spec.name: loss for loss in (*POLICY_LOSSES, STABLE_REINFORCE)}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutputs", "StabilityInputs"]
