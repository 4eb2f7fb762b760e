"""What every collective over named axes means, in NumPy: the oracle of the tests.

The definitions are the only ones: ``named_arrays.py`` applies them too, to values that lack some axes.  Here a value
is stored whole: one leading dimension for each axis of the model, then its positional dimensions.  A value that does
not vary over an axis has equal entries along it.  A collective is defined by what the n participants, who hold one
array each, hold afterwards; :class:`Model` applies such a definition at every index of the remaining axes.  Its methods
are named as in ``jax.lax`` and take the operands, the axes, then options.  Nothing here knows of JAX or devices.
"""

from __future__ import annotations

import math

import numpy as np

FLOATING = {"bfloat16", "float16", "float32"}


def _is_floating(x):
    return x.dtype.name in FLOATING or np.issubdtype(x.dtype, np.complexfloating)


def _as_floating(x):
    """Integers and bools become float32 where a division or an exponential follows."""
    return x if _is_floating(x) else x.astype(np.float32)


def _as_summable(x):
    return x.astype(np.int32) if x.dtype == np.bool_ else x


def _wide(x):
    """What NumPy can multiply: half precisions become float32, and small integers int32."""
    return x.astype(np.float32 if _is_floating(x) else np.int32) if x.dtype.itemsize < 4 else x


# -------- definitions: a list of parts in, a list of parts out; by NumPy, or another ``xp`` with its functions


def permute(parts, perm, xp=np):
    out = [xp.zeros_like(parts[0]) for _ in parts]
    for source, destination in perm:
        out[destination] = parts[source]
    return out


def gather(parts, axis, tiled, xp=np):
    join = xp.concatenate if tiled else xp.stack
    return [join(parts, axis)] * len(parts)


def exchange(parts, split_axis, concat_axis, tiled, xp=np):
    """Participant i receives the i-th piece of every participant."""
    n = len(parts)
    if tiled:
        pieces = [xp.split(part, n, split_axis) for part in parts]
        return [xp.concatenate([pieces[j][i] for j in range(n)], concat_axis) for i in range(n)]
    return [xp.stack([part.take(i, split_axis) for part in parts], concat_axis) for i in range(n)]


def scatter_sum(parts, dimension, tiled, xp=np):
    """Participant i receives the i-th piece of the sum."""
    total = sum(parts[1:], parts[0])
    if tiled:
        return xp.split(total, len(parts), dimension)
    return [total.take(i, dimension) for i in range(len(parts))]


def contract(x, y, pos_contract, pos_batch, xp=np):
    """``lax.dot_general``: result dimensions are batch, rest of x, rest of y."""
    x_dims = list(range(x.ndim))
    y_dims = [x.ndim + k for k in range(y.ndim)]
    for left, right in [*zip(*pos_contract), *zip(*pos_batch)]:
        y_dims[right] = x_dims[left]
    batch = [x_dims[k] for k in pos_batch[0]]
    summed = [x_dims[k] for k in pos_contract[0]]
    rest = [d for d in [*x_dims, *y_dims] if d not in batch and d not in summed]
    return xp.einsum(x, x_dims, y, y_dims, [*batch, *rest])


# -------------------------------------------------------------------------------- the model


class Model:
    """Collectives over axes of the given sizes, on arrays with one leading dimension for each axis."""

    def __init__(self, **sizes):
        self.sizes = sizes
        self.names = tuple(sizes)

    def whole(self, array, names):
        """An array whose leading dimensions are ``names``, repeated over the axes that it lacks."""
        array = np.asarray(array)
        tail = array.shape[len(names) :]
        order = sorted(range(len(names)), key=lambda k: self.names.index(names[k]))
        array = array.transpose(*order, *range(len(names), array.ndim))
        lead = [self.sizes[n] if n in names else 1 for n in self.names]
        return np.broadcast_to(array.reshape(*lead, *tail), (*self.sizes.values(), *tail))

    def part(self, whole, names):
        """A whole value as an array that leads with ``names``; it must not vary over the other axes."""
        for k, name in enumerate(self.names):
            if name not in names:
                first = whole.take([0], k)
                np.testing.assert_array_equal(whole, np.broadcast_to(first, whole.shape))
        index = tuple(slice(None) if n in names else 0 for n in self.names)
        kept = [n for n in self.names if n in names]
        array = whole[index]
        return array.transpose(*(kept.index(n) for n in names), *range(len(names), array.ndim))

    def size(self, axis_name):
        return math.prod(self.sizes[n] for n in _names(axis_name))

    def spmd(self, definition, axis_name, *operands, groups=None):
        """Apply ``definition(*lists of n parts) -> list of n parts`` at every index of the other axes."""
        names = _names(axis_name)
        front = [self.names.index(n) for n in names]
        others = [k for k in range(len(self.names)) if k not in front]
        lead = len(self.names)
        n = self.size(names)

        def participants(x):
            x = x.transpose(*others, *front, *range(lead, x.ndim))
            return x.reshape(-1, n, *x.shape[lead:])

        members = [list(range(n))] if groups is None else groups
        results = []
        for parts in zip(*map(participants, operands)):
            held = [None] * n
            for group in members:
                for member, value in zip(
                    group, definition(*[[p[k] for k in group] for p in parts])
                ):
                    held[member] = np.asarray(value)
            results.append(np.stack(held))
        out = np.stack(results)
        sizes = list(self.sizes.values())
        out = out.reshape(*(sizes[k] for k in [*others, *front]), *out.shape[2:])
        return out.transpose(*np.argsort([*others, *front]), *range(lead, out.ndim))

    def _reduce(self, function, x, axis, groups=None):
        """``function(array, dimensions)`` over named and positional axes; every participant gets the result."""
        axes = axis if isinstance(axis, (tuple, list)) else (axis,)
        names = tuple(a for a in axes if not isinstance(a, int))
        rank = x.ndim - len(self.names)
        dims = (0, *(1 + a % rank for a in axes if isinstance(a, int)))

        def definition(parts):
            return [function(np.stack(parts), dims)] * len(parts)

        return self.spmd(definition, names, x, groups=groups)

    # jax.lax

    def psum(self, x, axis_name, axis_index_groups=None):
        x = _as_summable(x)
        return self._reduce(
            lambda v, dims: v.sum(dims, dtype=x.dtype), x, axis_name, axis_index_groups
        )

    def pmax(self, x, axis_name, axis_index_groups=None):
        return self._reduce(np.max, x, axis_name, axis_index_groups)

    def pmin(self, x, axis_name, axis_index_groups=None):
        return self._reduce(np.min, x, axis_name, axis_index_groups)

    def pmean(self, x, axis_name, axis_index_groups=None):
        n = self.size(axis_name) if axis_index_groups is None else len(axis_index_groups[0])
        total = _as_floating(self.psum(x, axis_name, axis_index_groups))
        return total / np.asarray(n, total.dtype)

    def axis_index(self, axis_name):
        return self.spmd(
            lambda parts: np.arange(len(parts), dtype=np.int32), axis_name, self.whole(0, ())
        )

    def ppermute(self, x, axis_name, perm):
        return self.spmd(lambda parts: permute(parts, perm), axis_name, x)

    def pshuffle(self, x, axis_name, perm):
        return self.spmd(lambda parts: [parts[k] for k in perm], axis_name, x)

    def pbroadcast(self, x, axis_name, source):
        return self.spmd(lambda parts: [parts[source]] * len(parts), axis_name, x)

    def all_gather(self, x, axis_name, axis=0, tiled=False, axis_index_groups=None):
        return self.spmd(
            lambda parts: gather(parts, axis, tiled), axis_name, x, groups=axis_index_groups
        )

    def all_to_all(
        self, x, axis_name, split_axis, concat_axis, tiled=False, axis_index_groups=None
    ):
        def definition(parts):
            return exchange(parts, split_axis, concat_axis, tiled)

        return self.spmd(definition, axis_name, x, groups=axis_index_groups)

    def pswapaxes(self, x, axis_name, axis, axis_index_groups=None):
        """Row i of the result along ``axis`` is what participant i held for me."""

        def definition(parts):
            whole = np.stack(parts)
            return np.swapaxes(whole, 0, 1 + axis)

        return self.spmd(definition, axis_name, x, groups=axis_index_groups)

    def psum_scatter(self, x, axis_name, scatter_dimension=0, tiled=False, axis_index_groups=None):
        def definition(parts):
            return scatter_sum(parts, scatter_dimension, tiled)

        return self.spmd(definition, axis_name, x, groups=axis_index_groups)

    def pdot(
        self,
        x,
        y,
        axis_name,
        pos_contract=((), ()),
        pos_batch=((), ()),
        preferred_element_type=None,
    ):
        dtype = preferred_element_type or x.dtype

        def definition(xs, ys):
            products = [
                contract(_wide(x), _wide(y), pos_contract, pos_batch) for x, y in zip(xs, ys)
            ]
            return [sum(products[1:], products[0]).astype(dtype)] * len(xs)

        return self.spmd(definition, axis_name, x, y)

    def pargmax(self, x, axis_name):
        return self.spmd(
            lambda parts: [np.argmax(parts, 0).astype(np.int32)] * len(parts), axis_name, x
        )

    def pargmin(self, x, axis_name):
        return self.spmd(
            lambda parts: [np.argmin(parts, 0).astype(np.int32)] * len(parts), axis_name, x
        )


def _names(axis):
    return tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
