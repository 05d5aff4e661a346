"""Arrays as they cross the wire: packed bytes, dense or CSR, to and from numpy.

Knows nothing of what an array means. Shapes: R rows, C columns, L listed cells of a CSR tensor.
Everything is little-endian. Arrays that arrive are views of the body wherever nothing has to
change; each tensor is made dense on its own, whatever pattern its neighbours have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np

from trimtab.errors import Invalid
from trimtab.types import CsrLayout
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.fields import INT64, Fields, kind_of

DType = np.dtype[Any]
INT32: DType = np.dtype("<i4")
DTYPES: dict[str, DType] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_PACKED: dict[int, DType] = {
    pb.DTYPE_FLOAT32: DTYPES["float32"],
    pb.DTYPE_INT64: DTYPES["int64"],
    pb.DTYPE_INT32: INT32,
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


class Budget:
    """Bytes one request may still unfold into: a few bytes of CSR could else become gigabytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def spend(self, nbytes: int, where: str) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise Invalid(
                f"{where}: the tensors of one request may take {self.limit} bytes when made dense"
            )


# ------------------------------------------------------------------ in: protobuf


def tokens_of(chunks: Iterable[pb.Chunk], where: str) -> np.ndarray:
    """The token ids (N,) int32 of a datum's chunks; only text is offered."""
    parts = []
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            found = kind or "nothing"
            raise Invalid(f"{where}[{index}]: holds {found}; this server reads encoded_text only")
        parts.append(_unpack(chunk.encoded_text.tokens, INT32, f"{where}[{index}].tokens"))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def tensor_of(tensor: pb.Tensor, where: str, budget: Budget) -> np.ndarray:
    """The dense array (float32 or int64) that a Tensor message stands for."""
    packed = _PACKED.get(tensor.dtype)
    if packed is None:
        raise Invalid(f"{where}.dtype: {tensor.dtype} is none of FLOAT32, INT64, INT32, BFLOAT16")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        values_L = _widen(_unpack(csr.values, packed, f"{where}.values"))
        layout = CsrLayout(
            _unpack(csr.crow_indices, DTYPES["int64"], f"{where}.crow_indices"),
            _unpack(csr.col_indices, DTYPES["int64"], f"{where}.col_indices"),
        )
        return densify(values_L, layout, shape, where, budget=budget)
    return _shaped(_widen(_unpack(tensor.dense, packed, f"{where}.dense")), shape, where)


def _unpack(data: bytes, dtype: DType, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        size = dtype.itemsize
        raise Invalid(f"{where}: {len(data)} bytes are no whole number of {size}-byte values")
    return np.frombuffer(data, dtype)


def _widen(values: np.ndarray) -> np.ndarray:
    """int32 to int64, and bfloat16 (the upper half of a float32) to float32."""
    if values.dtype == INT32:
        return values.astype("<i8")
    if values.dtype == np.dtype("<u2"):
        return (values.astype("<u4") << 16).view("<f4")
    return values


def _shaped(values: np.ndarray, shape: Sequence[int], where: str) -> np.ndarray:
    if not shape:
        return values
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise Invalid(f"{where}.shape: {list(shape)} does not hold {values.size} values")
    try:
        return values.reshape(shape)
    except ValueError:
        raise Invalid(f"{where}.shape: {list(shape)} is no shape of an array") from None


# ------------------------------------------------------------------ CSR


def densify(
    values_L: np.ndarray,
    layout: CsrLayout,
    shape: Sequence[int],
    where: str,
    *,
    budget: Budget,
    fill: int = 0,
) -> np.ndarray:
    """The dense (R, C) array of a CSR tensor, `fill` in every cell it does not list.

    >>> layout = CsrLayout(np.array([0, 1, 2]), np.array([1, 0]))
    >>> densify(np.array([5., 6.]), layout, (2, 2), "x", budget=Budget(99)).tolist()
    [[0.0, 5.0], [6.0, 0.0]]
    """
    check_layout(layout, shape, values_L.size, where)
    rows, columns = shape
    budget.spend(rows * columns * values_L.dtype.itemsize, where)
    dense_RC = np.full((rows, columns), fill, values_L.dtype)
    dense_RC[rows_of(layout), layout.col_indices] = values_L
    return dense_RC


def rows_of(layout: CsrLayout) -> np.ndarray:
    """The row of each listed cell (L,)."""
    return np.repeat(np.arange(layout.crow_indices.size - 1), np.diff(layout.crow_indices))


def check_layout(layout: CsrLayout, shape: Sequence[int], listed: int, where: str) -> None:
    if len(shape) != 2 or min(shape) < 0:
        raise Invalid(f"{where}.shape: a sparse tensor needs two sizes, found {list(shape)}")
    rows, columns = shape
    crow, col = layout.crow_indices, layout.col_indices
    if crow.size != rows + 1 or col.size != listed:
        raise Invalid(
            f"{where}: {rows} rows and {listed} values need {rows + 1} crow_indices and {listed} "
            f"col_indices, found {crow.size} and {col.size}"
        )
    if crow[0] != 0 or crow[-1] != listed or (np.diff(crow) < 0).any():
        raise Invalid(f"{where}.crow_indices: must rise from 0 to the {listed} values listed")
    if listed and (col.min() < 0 or col.max() >= columns):
        raise Invalid(f"{where}.col_indices: must lie in 0 to {columns - 1}")
    same_row = np.diff(rows_of(layout)) == 0
    if (np.diff(col)[same_row] <= 0).any():
        raise Invalid(f"{where}.col_indices: must rise within each row")


# ------------------------------------------------------------------ in: JSON


def tokens_of_json(prompt: Fields) -> np.ndarray:
    """The token ids (P,) int32 of a prompt's chunks."""
    tokens: list[object] = []
    for index, value in enumerate(prompt.items("chunks")):
        chunk = Fields.of(value, f"{prompt.name('chunks')}[{index}]")
        kind = chunk.text("type") if chunk.has("type") else "encoded_text"
        if kind != "encoded_text":
            raise Invalid(f"{chunk.name('type')}: {kind!r}; this server reads encoded_text only")
        found = chunk.items("tokens")
        _integers(found, chunk.name("tokens"), range(-(2**31), 2**31))
        tokens += found
    return np.array(tokens, np.int32)


def tensor_of_json(
    tensor: Fields, budget: Budget, fill: int = 0
) -> tuple[np.ndarray, CsrLayout | None]:
    """A TensorData object made dense, and the CSR layout it came in, if any."""
    where = tensor.where.removesuffix(".")
    dtype = tensor.text("dtype")
    if dtype not in DTYPES:
        raise Invalid(f"{tensor.name('dtype')}: {dtype!r} is none of {', '.join(DTYPES)}")
    values = _values(tensor.items("data"), dtype, tensor.name("data"))
    shape = _integer_list(tensor, "shape").tolist() if tensor.has("shape") else []
    if not tensor.has("sparse_crow_indices"):
        return _shaped(values, shape, where), None
    layout = CsrLayout(
        _integer_list(tensor, "sparse_crow_indices"), _integer_list(tensor, "sparse_col_indices")
    )
    return densify(values, layout, shape, where, budget=budget, fill=fill), layout


def _values(found: list[object], dtype: str, where: str) -> np.ndarray:
    if dtype == "int64":
        _integers(found, where, INT64)
    elif not set(map(type, found)) <= {int, float}:
        raise Invalid(f"{where}: numbers are required")
    return np.array(found, DTYPES[dtype])


def _integer_list(tensor: Fields, field: str) -> np.ndarray:
    found = tensor.items(field)
    _integers(found, tensor.name(field), INT64)
    return np.array(found, np.int64)


def _integers(found: list[object], where: str, allowed: range) -> None:
    """Types first, in C; a list of 100,000 ids is common."""
    if not set(map(type, found)) <= {int}:
        index = next(i for i, value in enumerate(found) if type(value) is not int)
        raise Invalid(f"{where}[{index}]: an integer is required, found {kind_of(found[index])}")
    ids = cast("list[int]", found)
    if ids and not (min(ids) in allowed and max(ids) in allowed):
        raise Invalid(f"{where}: ids must lie in {allowed.start} to {allowed.stop - 1}")


# ------------------------------------------------------------------ out


def tensor_message(array: np.ndarray, layout: CsrLayout | None = None) -> pb.Tensor:
    """A Tensor message, in `layout` where the client asked in CSR: the same cells in order."""
    dtype = pb.DTYPE_FLOAT32 if array.dtype.kind == "f" else pb.DTYPE_INT32
    packed = _PACKED[dtype]
    message = pb.Tensor(dtype=dtype, shape=array.shape)
    if layout is None:
        message.dense = array.astype(packed, copy=False).tobytes()
        return message
    listed_L = array[rows_of(layout), layout.col_indices]
    message.sparse_csr.values = listed_L.astype(packed, copy=False).tobytes()
    message.sparse_csr.crow_indices = layout.crow_indices.astype("<i8", copy=False).tobytes()
    message.sparse_csr.col_indices = layout.col_indices.astype("<i8", copy=False).tobytes()
    return message


def batched(arrays: Sequence[np.ndarray]) -> pb.BatchedTensor:
    """Arrays that differ in their first size only, laid end to end; offsets count bytes."""
    packed = [np.ascontiguousarray(array, "<f4") for array in arrays]
    ends = np.cumsum([0, *(array.nbytes for array in packed)], dtype="<i8")
    return pb.BatchedTensor(
        data=b"".join(array.tobytes() for array in packed),
        offsets=ends.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=packed[0].shape[1:],
    )
