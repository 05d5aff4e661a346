"""Tiny models gain nothing from sharing an operation among cores, and tests run beside others."""

import torch

torch.set_num_threads(1)
