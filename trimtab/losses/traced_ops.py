"""The operations that a traced custom loss may name, and the call of one.

What is in no table is refused; a graph never chooses freely what is looked up. Knows no graphs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import _get_qualified_name
from torch.nn import functional as F

from trimtab.types import CustomLossNode

_TORCH = """
abs add sub subtract mul multiply div divide true_divide floor_divide pow exp expm1 exp2 log log1p
log2 log10 sqrt rsqrt square reciprocal sigmoid tanh sin cos atan erf neg negative sign clamp clip
clamp_min clamp_max minimum maximum fmin fmax min max where sum mean prod std var cumsum cumprod
logcumsumexp logsumexp softmax log_softmax logaddexp logical_and logical_or logical_not
logical_xor bitwise_and bitwise_or bitwise_not eq ne lt le gt ge isnan isfinite isinf nan_to_num
nansum nanmean zeros_like ones_like full_like zeros ones full arange tensor as_tensor
scalar_tensor cat concat stack squeeze unsqueeze reshape flatten transpose permute movedim flip
roll gather index_select sort argsort topk argmax argmin amax amin median quantile any all numel
norm linalg.vector_norm dot diff round floor ceil trunc remainder fmod relu masked_fill
count_nonzero broadcast_to chunk split narrow clone detach xlogy lerp hypot heaviside
"""
_FUNCTIONAL = """
relu relu6 softplus logsigmoid sigmoid tanh silu gelu elu leaky_relu hardtanh softmax log_softmax
softmin smooth_l1_loss mse_loss l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits kl_div normalize threshold softsign pad
"""
_MATH = """
sqrt exp expm1 log log1p log2 log10 pow floor ceil fabs sin cos tanh isfinite isnan isinf copysign
fmod hypot
"""
_OPERATOR = """
add sub mul truediv floordiv mod pow neg pos abs lt le gt ge eq ne and_ or_ xor invert not_ iadd
isub imul itruediv getitem
"""
_METHODS = """
abs add sub mul div true_divide pow exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal
sigmoid tanh sin cos erf neg sign clamp clip clamp_min clamp_max minimum maximum min max where sum
mean prod std var cumsum cumprod logsumexp softmax log_softmax logical_and logical_or logical_not
logical_xor eq ne lt le gt ge isnan isfinite isinf nan_to_num squeeze unsqueeze reshape view
view_as reshape_as flatten transpose t permute flip roll gather index_select sort argsort topk
argmax argmin amax amin median quantile any all numel norm dot diff round floor ceil trunc
remainder fmod relu masked_fill expand expand_as broadcast_to chunk split narrow clone contiguous
detach float double half bfloat16 int long bool to type_as size dim new_zeros new_ones new_full
new_tensor logaddexp count_nonzero xlogy lerp unbind cpu
"""
METHODS = frozenset(_METHODS.split())
ATTRIBUTES = ("shape", "dtype", "device", "ndim", "T", "mT")
REFUSED_KEYWORDS = ("out", "generator", "pin_memory", "layout", "memory_format")


def _functions() -> dict[str, Callable[..., Any]]:
    found: list[Callable[..., Any]] = [operator.attrgetter(name)(torch) for name in _TORCH.split()]
    found += [getattr(F, name) for name in _FUNCTIONAL.split()]
    table = {_get_qualified_name(function): function for function in found}
    table |= {f"math.{name}": getattr(math, name) for name in _MATH.split()}
    table |= {f"operator.{name}": getattr(operator, name) for name in _OPERATOR.split()}
    return table | {f"torch.{name}": operator.attrgetter(name)(torch) for name in _TORCH.split()}


FUNCTIONS: Mapping[str, Callable[..., Any]] = _functions()
GETATTR = ("builtins.getattr", "getattr", "_operator.getattr")
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool")
}


def call(node: CustomLossNode, args: list[Any], kwargs: dict[str, Any], *, laid_out: bool) -> Any:
    if node.op == "call_method":
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{node.target} is called on a {type(args[0]).__name__}")
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.target in GETATTR:
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{args[1]} is asked of a {type(args[0]).__name__}")
        return getattr(args[0], args[1])
    if node.target.startswith("operator."):
        _check_operands(node.target, args)
        if node.target == "operator.getitem":
            return _item(args[0], args[1], laid_out=laid_out)
    if node.target == "torch.where" and len(args) + len(kwargs) != 3:
        raise TypeError("torch.where needs a condition and two values")
    return FUNCTIONS[node.target](*args, **kwargs)


def _check_operands(target: str, args: Sequence[Any]) -> None:
    """Plain operators work on tensors and numbers: sequences and huge powers can grow without
    bound."""
    if target == "operator.getitem":
        return
    for arg in args:
        if not isinstance(arg, (Tensor, bool, int, float)):
            raise TypeError(f"{target} takes tensors and numbers, found {type(arg).__name__}")
    if target == "operator.pow" and all(isinstance(arg, int) for arg in args):
        base, exponent = args
        if exponent * max(1, abs(base).bit_length()) > 63:
            raise ValueError(f"{base} to the power of {exponent} does not fit into 63 bits")


def _item(value: Any, index: Any, *, laid_out: bool) -> Any:
    if not isinstance(value, Tensor):
        return value[index]  # of a shape, or of what max, sort and split return
    masks = [i for i in (index if isinstance(index, tuple) else (index,)) if _is_mask(i)]
    if not masks or not laid_out:
        return value[index]
    if isinstance(index, tuple):
        raise ValueError("a mask must be the whole index")
    if index.shape != value.shape[: index.ndim]:
        raise IndexError(f"a mask of shape {tuple(index.shape)} on {tuple(value.shape)}")
    return value.new_empty((index.numel(), *value.shape[index.ndim :]))  # at most so many


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool
