"""Tiny models gain nothing from sharing an operation among cores, and tests run beside others."""

# Python 3.11 can fail to parse a module while it collects garbage, and hypothesis, left to itself,
# is parsed at the end of a run, when there is most of it.
import hypothesis  # noqa: F401
import torch

torch.set_num_threads(1)
