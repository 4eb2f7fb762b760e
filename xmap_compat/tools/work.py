"""The work of a staged program on one device: operations, bytes read and written, and bytes that are alive at once.

Formulas and their sources are in docs/costs.md.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.tools.staged import REDUCTIONS, SCATTERS, Operation, Tree, Value, itemsize, size_of, words
from xmap_compat.tools.text import by_key
from xmap_compat.tools.transfers import KINDS


@dataclasses.dataclass
class Work:
    """The work of a program on one device.

    Attributes:
      counts: ``'flops'``, of which ``('products', n, kind, width)`` are in products of elements of n bytes, of a kind
        that ``Rates.of_products`` knows; ``'accessed'``: bytes read and written; ``'kernels'``: fused operations.
      peak: bytes of temporaries and results.
      endless: whether there is a loop with an unknown trip count, which counts as one iteration.
    """

    counts: Any  # a Counter
    peak: float = 0
    endless: bool = False


# Operations whose results are other names of the same bytes.
_ALIASES = words(
    "reshape squeeze expand_dims pvary pcast stop_gradient copy copy_p optimization_barrier sharding_constraint"
    " reshard mesh_cast bitcast_convert_type device_put"
)
# Operations that compute nothing: indices and copies.
_FREE = _ALIASES | words(
    "broadcast_in_dim transpose slice dynamic_slice dynamic_update_slice concatenate gather rev iota pad"
    " convert_element_type axis_index scatter all_gather all_gather_invariant all_to_all ppermute random_wrap"
    " random_unwrap split"
)
_CHEAP = words("broadcast_in_dim iota convert_element_type neg axis_index")
_LARGE = 2 * 128**3  # FLOPs of a product that is as fast in a batch as alone
_PRODUCTS = words("dot_general conv_general_dilated")
_CUBIC = {"cholesky": 1 / 3, "lu": 2 / 3, "hessenberg": 10 / 3, "eigh": 9, "svd": 22, "eig": 25, "schur": 25}
_CUBIC |= dict.fromkeys(words("qr geqrf geqp3 householder_product tridiagonal"), 4 / 3)
# Operations that XLA computes separately: it fuses them with no operation before or after them.
_SEPARATE = (
    _PRODUCTS
    | SCATTERS
    | KINDS.keys()
    | _CUBIC.keys()
    | words("sort fft triangular_solve cumsum cumprod cummax cummin cumlogsumexp random_bits")
)


def _flops(operation: Operation) -> float:
    """Floating point operations of an ordinary equation on a device: see docs/costs.md for the formulas."""
    name, params, out = operation.name, operation.eqn.params, operation.results[0]
    operand = operation.operands[0] if operation.operands else out
    cut = max([v.blocks or 1 for v in (*operation.operands, *operation.results)])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size_of(out.aval) * math.prod(operand.aval.shape[k] for k in contracted) / cut
    if name == "conv_general_dilated":
        return 2 * _products_of_convolution(operation) / cut
    if name in REDUCTIONS:
        return max(operand.elements - out.elements, 0)
    if name in _CUBIC:
        *batch, m, n = operand.aval.shape
        return _CUBIC[name] * math.prod(batch) * m * n * min(m, n)
    if name == "triangular_solve":
        return out.elements * operand.aval.shape[-1]
    if name == "fft":
        return 5 * operand.elements * math.log2(max(math.prod(params["fft_lengths"]), 2))
    if name == "random_bits":
        return 50 * out.elements  # half of the 20 rounds of Threefry, of 5 operations each
    if name == "sort":
        return operand.elements * math.log2(max(operand.aval.shape[params["dimension"]], 2))
    if name in SCATTERS - _FREE:
        return operation.operands[2].elements
    return 0 if name in _FREE else sum(r.elements for r in operation.results)


def _kind_of_product(operation: Operation, flops: float) -> tuple[str, int]:
    """The kind and the width that ``Rates.of_products`` takes."""
    numbers, params = operation.eqn.params["dimension_numbers"], operation.eqn.params
    if operation.name == "conv_general_dilated":
        groups = params["feature_group_count"] * params["batch_group_count"]
        return "convolution", operation.results[0].aval.shape[numbers.out_spec[1]] // groups
    shapes = [v.aval.shape for v in operation.operands]
    batch = math.prod(shapes[0][k] for k in numbers[1][0])
    if numbers[1][0] and flops < _LARGE * batch:
        return "batch", 0
    inner = any(len(shape) - 1 in {*summed, *kept} for shape, summed, kept in zip(shapes, *numbers))
    if inner or not numbers[0][0]:
        return "", 0
    free = [
        math.prod(shape) // (batch * math.prod(shape[k] for k in contracted))
        for shape, contracted in zip(shapes, numbers[0])
    ]
    return "rows", min(free)


def _products_of_convolution(operation: Operation) -> int:
    """Products of an element of the input and one of the filter; zeros of padding and dilation are none."""
    params, numbers = operation.eqn.params, operation.eqn.params["dimension_numbers"]
    image, kernel, out = (v.aval.shape for v in (*operation.operands, *operation.results))
    batch, features, *spatial = numbers.out_spec
    count = out[batch] * out[features] * kernel[numbers.rhs_spec[1]]
    steps = [params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")]
    for k, (d, *given) in enumerate(zip(spatial, *steps)):
        count *= _meetings(out[d], kernel[numbers.rhs_spec[k + 2]], image[numbers.lhs_spec[k + 2]], *given)
    return count


def _meetings(results: int, kernel: int, size: int, stride: int, padding: Any, spread: int, step: int) -> int:
    """In how many pairs, of a result and an element of the filter, the latter meets an element of the input.

    Args:
      size: elements of the input along a dimension, ``spread`` apart from each other.
      step: how far elements of the filter are apart.
    """
    count = 0
    for first in range(min(spread, kernel)):  # with these and no others between them, positions differ by spread * step
        begins = np.arange(results) * stride - padding[0] + first * step
        begins = begins[begins % spread == 0] // spread
        ends = np.minimum((size - 1 - begins) // step, (kernel - 1 - first) // spread)
        count += int(np.maximum(ends - np.maximum(-(begins // step), 0) + 1, 0).sum())
    return count


def _is_separate(operation: Operation) -> bool:
    return bool(operation.branches) or operation.name in _SEPARATE


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """An operation as XLA runs it: ``reads`` are the values in memory that it needs, ``writes`` those that it makes."""

    operation: Operation
    reads: list[Value]
    writes: list[Value]
    inner: list[Work]


def work_of(tree: Tree) -> Work:
    """Count the operations of a program after fusion, and the values that are alive at the same time."""
    total = Work(collections.Counter())
    users: dict[Value, list[Operation]] = {}
    origins = _origins(tree)
    for operation in tree.operations:
        if operation.name not in _ALIASES:
            for value in dict.fromkeys(origins.get(v, v) for v in operation.operands):
                users.setdefault(value, []).append(operation)
    results = {origins.get(v, v) for v in tree.results}
    sources: dict[Value, list[Value]] = {}
    kernels: list[_Kernel] = []
    for operation in tree.operations:
        reads = list(dict.fromkeys(s for v in operation.operands for s in sources.get(v, [v])))
        writes = [r for r in operation.results if not _is_fused(operation, users.get(r, []), r in results)]
        sources.update((r, reads) for r in operation.results if r not in writes)
        kernels.append(_Kernel(operation, reads, writes, [work_of(branch.tree) for branch in operation.branches]))
        _count(kernels[-1], total)
    total.peak = _peak(kernels, {s for v in results for s in sources.get(v, [v])})
    return total


def bytes_held(tree: Tree, work: Work) -> float:
    """Bytes of a program's arguments, results and temporaries at their peak; an argument that is returned is copied."""
    origins, inputs = _origins(tree), set(tree.inputs)
    copied = [v for v in tree.results if origins.get(v, v) in inputs]
    return sum(v.nbytes for v in (*tree.inputs, *copied)) + work.peak


def _origins(tree: Tree) -> dict[Value, Value]:
    """The values that are other names of the same bytes, each with the value that has these bytes."""
    origins: dict[Value, Value] = {}
    for operation in tree.operations:
        if operation.name in _ALIASES:
            origins.update((alias, origins.get(v, v)) for alias, v in zip(operation.results, operation.operands))
    return origins


def _is_fused(operation: Operation, users: Sequence[Operation], returned: bool) -> bool:
    """Whether a result is never written, because XLA computes it where it is used, under any of its names."""
    if operation.name in _ALIASES:
        return True
    if returned or _is_separate(operation) or any(map(_is_separate, users)):
        return False
    return operation.name in _CHEAP or (len(users) == 1 and operation.name not in REDUCTIONS)


def _count(kernel: _Kernel, total: Work) -> None:
    operation, works = kernel.operation, kernel.inner
    if isinstance(operation.found, _jax.Cond):
        works = [max(works, key=lambda w: (w.counts["flops"], w.counts["accessed"]))]
    turns = 1 if operation.turns is None else operation.turns
    for work in works:
        total.counts.update({key: count * turns for key, count in work.counts.items()})
    total.endless |= operation.turns is None or any(work.endless for work in works)
    if operation.branches or operation.eqn is None:
        return
    flops = _flops(operation) if operation.results else 0
    total.counts["flops"] += flops
    if operation.name in _PRODUCTS:
        kind = _kind_of_product(operation, flops)
        total.counts["products", max(itemsize(v.aval.dtype) for v in operation.operands), *kind] += flops
    if kernel.writes:
        written = sum(v.nbytes for v in kernel.writes)
        if operation.name == "dynamic_update_slice" or operation.name in SCATTERS:
            written = operation.operands[1 if operation.name == "dynamic_update_slice" else 2].nbytes  # in place
        sliced = operation.name in ("slice", "dynamic_slice", "gather", "dynamic_update_slice")
        total.counts["accessed"] += written + (written if sliced else sum(v.nbytes for v in kernel.reads))
        total.counts["kernels"] += 1


def _peak(kernels: Sequence[_Kernel], results: set[Value]) -> float:
    """The most bytes of temporaries and results at one time; an operand after its last use may become the result."""
    temporary = {value for kernel in kernels for value in kernel.writes if value not in results}
    last = {value: k for k, kernel in enumerate(kernels) for value in kernel.reads if value in temporary}
    ends = by_key(last, last.__getitem__)
    alive = peak = 0.0
    for k, kernel in enumerate(kernels):
        ended = sum(v.nbytes for v in ends.get(k, []))
        new = sum(v.nbytes for v in kernel.writes)
        inner = max((work.peak for work in kernel.inner), default=0)
        peak = max(peak, alive + inner + (max(new - ended, 0) if not _is_separate(kernel.operation) else new))
        alive += new - ended - sum(v.nbytes for v in kernel.writes if v not in last and v not in results)
    return peak
