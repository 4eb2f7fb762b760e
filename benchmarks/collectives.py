"""The gradient of every collective and named function, and of steps that gather weights or sequences.

Each collective is differentiated from outside, and inside for a given cotangent, where an axis has several elements on
each device of all mesh axes (``split``) or of one (``half``), and one on each device (``full``).  By hand it is what
someone writes for ``jax.shard_map(check_vma=True)``: a gather is ``lax.all_gather``, whose transpose is a
reduce-scatter; a gradient inside is the transposed collective.

The loss is half the weighted squares of all results, so that a cotangent depends on the result, as that of a training
step does.  Where it does not, XLA sums it beside the results, before the backward pass begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import Case, arrays, sharded, title
from benchmarks.timing import fresh
from xmap_compat import _jax, einsum, pdot, xeinsum, xmap
from xmap_compat import numpy as xnp
from xmap_compat.lax import pgather

# Elements of the axis, and its mesh axes.
PLACEMENTS = {"split": (16, ("x", "y")), "half": (16, ("x",)), "full": (8, ("x", "y"))}


class Pair(NamedTuple):
    """A body over the axis ``i``, and what a device does.

    Attributes:
      body: of one element ``v[n, width]``, where ``n`` is the size of the axis; the result's last dimension is a width.
      on_device: of a device's elements ``x[local, n, width]`` and the mesh axes.
      each: whether its result has a first dimension for the elements; else it is one for all.
      inside: whether a derivative in a body is the sum over all elements, as legacy had it: pmax has none, and the
        cotangents of a contraction are not summed.
    """

    body: Callable[..., Any]
    on_device: Callable[..., Any]
    each: bool = False
    inside: bool = True


def _gathered(x, axes):
    return lax.all_gather(x, axes, tiled=True)


def _scattered(x, axes):
    return lax.psum_scatter(x, axes, tiled=True)


def _traded(x, axes):
    return jnp.swapaxes(lax.all_to_all(x, axes, 1, 0, tiled=True), 0, 1)


def _rotation(n, k):
    return [(j, (j + k) % n) for j in range(n)]


def _rotated(x, axes, k=1):
    """Each element to the next one (or the one before): of a device the last (first) one leaves it."""
    devices = lax.axis_size(axes)
    leaving = lax.ppermute(x[-1:] if k > 0 else x[:1], axes, _rotation(devices, k))
    return jnp.concatenate([leaving, x[:-1]] if k > 0 else [x[1:], leaving])


def _reversed(x, axes):
    devices = lax.axis_size(axes)
    return lax.ppermute(x[::-1], axes, [(d, devices - 1 - d) for d in range(devices)])


def _own(everything, axes, local):
    """Of everyone's elements those of this device."""
    return lax.dynamic_slice_in_dim(everything, lax.axis_index(axes) * local, local)


def _along(fun):
    """A function along the axis: all elements are gathered, and each device keeps its own of the result."""
    return lambda x, axes: _own(fun(_gathered(x, axes)), axes, len(x))


def _shifted_exp(x, axes):
    shift = lax.pmax(lax.stop_gradient(x).max(0), axes)
    return shift, jnp.exp(x - shift)


def _logsumexp(x, axes):
    shift, e = _shifted_exp(x, axes)
    return jnp.log(lax.psum(e.sum(0), axes)) + shift


def _softmax(x, axes):
    _, e = _shifted_exp(x, axes)
    return e / lax.psum(e.sum(0), axes)


def _mean(x, axes):
    return lax.pmean(x.mean(0), axes)


def _variance(x, axes):
    return _mean((x - _mean(x, axes)) ** 2, axes)


def _extremum(across, within):
    """Of an extremum ties share the derivative."""

    def on_device(x, axes):
        out = across(within(lax.stop_gradient(x)), axes)
        ties = (x == out).astype(x.dtype)
        return lax.psum((x * ties).sum(0), axes) / lax.psum(ties.sum(0), axes)

    return on_device


def _index(x, axes):
    return lax.axis_index(axes) * len(x) + jnp.arange(len(x))


def _indexed(x, axes):
    return x * _index(x, axes)[:, None, None]


def _gram(x, axes):
    return lax.psum(jnp.einsum("inw,inz->wz", x, x), axes)


def _backwards(n):
    return jnp.arange(n)[::-1]


def _taken(x, axes):
    everything = _gathered(x, axes)
    return jnp.take(everything, _backwards(len(everything)), axis=0, mode="clip")


PAIRS: dict[str, Pair] = {
    "psum": Pair(lambda v: lax.psum(v, "i"), lambda x, axes: lax.psum(x.sum(0), axes)),
    "pmean": Pair(lambda v: lax.pmean(v, "i"), _mean),
    "pmax": Pair(lambda v: lax.pmax(v, "i"), _extremum(lax.pmax, lambda x: x.max(0)), inside=False),
    "pmin": Pair(lambda v: lax.pmin(v, "i"), _extremum(lax.pmin, lambda x: x.min(0)), inside=False),
    "pbroadcast": Pair(
        lambda v: lax.pbroadcast(v, "i", 0),
        lambda x, axes: lax.psum(jnp.where(lax.axis_index(axes) == 0, x[0], 0), axes),
    ),
    "all_gather": Pair(lambda v: lax.all_gather(v, "i"), _gathered),
    "all_gather tiled": Pair(
        lambda v: lax.all_gather(v, "i", tiled=True),
        lambda x, axes: _gathered(x, axes).reshape(-1, x.shape[-1]),
    ),
    "psum_scatter": Pair(
        lambda v: lax.psum_scatter(v, "i"), lambda x, axes: _scattered(x.sum(0), axes), each=True
    ),
    "all_to_all": Pair(lambda v: lax.all_to_all(v, "i", 0, 0), _traded, each=True),
    "ppermute": Pair(lambda v: lax.ppermute(v, "i", _rotation(v.shape[0], 1)), _rotated, each=True),
    "pshuffle": Pair(
        lambda v: lax.pshuffle(v, "i", [k - 1 if k else len(v) - 1 for k in range(len(v))]),
        _rotated,
        each=True,
    ),
    "axis_index": Pair(lambda v: v * lax.axis_index("i"), _indexed, each=True),
    "pdot": Pair(lambda v: pdot(v, v, "i", pos_contract=((0,), (0,))), _gram, inside=False),
    "einsum": Pair(lambda v: einsum("{i}nw,{i}nz->wz", v, v), _gram, inside=False),
    "xeinsum": Pair(lambda v: xeinsum("nw{i},nz{i}->wz", v, v), _gram, inside=False),
    "jnp.sum": Pair(
        lambda v: jnp.sum(v, axis=("i", 0)), lambda x, axes: lax.psum(x.sum((0, 1)), axes)
    ),
    "jnp.mean": Pair(lambda v: jnp.mean(v, axis="i"), _mean),
    "jnp.var": Pair(lambda v: jnp.var(v, axis="i"), _variance),
    "jnp.std": Pair(lambda v: jnp.std(v, axis="i"), lambda x, axes: jnp.sqrt(_variance(x, axes))),
    "jnp.max": Pair(
        lambda v: jnp.max(v, axis="i"), _extremum(lax.pmax, lambda x: x.max(0)), inside=False
    ),
    "logsumexp": Pair(lambda v: jax.nn.logsumexp(v, axis="i"), _logsumexp),
    "softmax": Pair(lambda v: jax.nn.softmax(v, axis="i"), _softmax, each=True),
    "prod": Pair(lambda v: xnp.prod(v, axis="i"), lambda x, axes: _gathered(x, axes).prod(0)),
    "along": Pair(
        lambda v: xnp.along(lambda x: jnp.sin(x) * 2, "i", v),
        lambda x, axes: jnp.sin(_gathered(x, axes)) * 2,
    ),
    "median": Pair(lambda v: xnp.median(v, "i"), lambda x, axes: jnp.median(_gathered(x, axes), 0)),
    "cumsum": Pair(lambda v: xnp.cumsum(v, "i"), _along(lambda x: jnp.cumsum(x, 0)), each=True),
    "cumprod": Pair(lambda v: xnp.cumprod(v, "i"), _along(lambda x: jnp.cumprod(x, 0)), each=True),
    "sort": Pair(lambda v: xnp.sort(v, "i"), _along(lambda x: jnp.sort(x, 0)), each=True),
    "flip": Pair(lambda v: xnp.flip(v, "i"), _reversed, each=True),
    "roll": Pair(lambda v: xnp.roll(v, 1, axis="i"), _rotated, each=True),
    "take": Pair(lambda v: xnp.take(v, _backwards(len(v)), axis="i"), _taken),
    "pgather": Pair(lambda v: pgather(v, _backwards(len(v)), "i"), _taken),
}


def cases() -> Iterator[Case]:
    """Every pair under every placement, and the steps."""
    for name, pair in PAIRS.items():
        for kind in PLACEMENTS:
            yield from_outside(name, pair, kind)
            if pair.inside:
                yield from_inside(name, pair, kind)
    for kind in GATHERS:
        for resources in [{"i": "x"}, {"i": ("x", "y")}, {"i": "x", "hidden": "y"}]:
            yield weights_step(kind, resources)
    for kind in [kind for kind in GATHERS if kind != "before scan"]:
        for resources in [{"t": "y"}, {"t": ("x", "y")}, {"t": "y", "batch": "x"}]:
            yield sequence_step(kind, resources)


def _broadcast(y, local, each):
    """A device's result with a first dimension for its elements."""
    return y if each else jnp.broadcast_to(y, (local, *y.shape))


def _weighted(y, c):
    """For each element the loss of its result, weighted along the last dimension."""
    return (y**2 * _weights(y, c)).sum(range(1, y.ndim)) / 2


def _weights(y, c):
    return c.reshape(len(c), *(1,) * (y.ndim - 2), c.shape[-1])


def _case(name, kind, named, by_hand, each_result):
    """``named`` and ``by_hand`` are made around the xmapped and the mapped function of elements and their weights."""
    n, axes = PLACEMENTS[kind]
    specs = (P(axes), P(axes))
    body, on_device = each_result
    resources = {"i": axes}
    return Case(
        f"{name} {kind}",
        lambda: jax.jit(named(xmap(fresh(body), ["i", ...], ["i", ...], axis_resources=resources))),
        lambda: jax.jit(by_hand(sharded(lambda x, c: on_device(axes, x, c), specs, P(axes)))),
        lambda k: arrays((n, n, 4 * k), (n, 4 * k)),
        specs,
    )


def from_outside(name, pair, kind):
    """The gradient of the loss of all results."""

    def body(v, c):
        return jnp.sum(pair.body(v) ** 2 * c) / 2

    def on_device(axes, x, c):
        return _weighted(_broadcast(pair.on_device(x, axes), len(x), pair.each), c)

    def gradient(mapped):
        return jax.value_and_grad(lambda x, c: mapped(x, c).sum())

    return _case(f"{name} outside", kind, gradient, gradient, (body, on_device))


def from_inside(name, pair, kind):
    """The gradient that each element takes in its body, of the loss of its result."""

    def body(v, c):
        y, pull = jax.vjp(pair.body, v)
        return jnp.sum(y**2 * c) / 2, pull(y * c)[0]

    def on_device(axes, x, c):
        def each(x):
            y = _broadcast(pair.on_device(x, axes), len(x), pair.each)
            missing = tuple(a for a in axes if a not in _jax.varying_axes(y))
            return lax.pcast(y, missing, to="varying") if missing else y

        y, pull = jax.vjp(each, x)
        return _weighted(y, c), pull(y * _weights(y, c))[0]

    return _case(f"{name} inside", kind, _identity, _identity, (body, on_device))


def _identity(fun):
    return fun


# ------------------------------------------------------------------------------- steps

LAYERS = 3


def _layer(weights, k):
    return jax.tree.map(lambda w: w[k], weights)


def _one_by_one(layer, x, weights, gather):
    for k in range(LAYERS):
        x = layer(x, gather(_layer(weights, k)))
    return x


def _checkpointed(layer, x, weights, gather):
    step = jax.checkpoint(lambda x, w: layer(x, gather(w)))
    for k in range(LAYERS):
        x = step(x, _layer(weights, k))
    return x


def _in_scan(layer, x, weights, gather):
    return lax.scan(lambda x, w: (layer(x, gather(w)), None), x, weights)[0]


def _before_scan(layer, x, weights, gather):
    everything = jnp.stack([gather(_layer(weights, k)) for k in range(LAYERS)])
    return lax.scan(lambda x, w: (layer(x, w), None), x, everything)[0]


def _checkpointed_in_scan(layer, x, weights, gather):
    step = jax.checkpoint(lambda x, w: (layer(x, gather(w)), None))
    return lax.scan(step, x, weights)[0]


GATHERS = {
    "": _one_by_one,
    "checkpoint": _checkpointed,
    "scan": _in_scan,
    "before scan": _before_scan,
    "checkpoint in scan": _checkpointed_in_scan,
}


def _loss(x):
    return jnp.mean(x**2)


def _step(program, kind, resources, body, on_device, in_axes, specs, shapes):
    """A loss that is equal for all elements, and its gradient from outside for all arguments."""
    gradient = functools.partial(jax.value_and_grad, argnums=tuple(range(len(specs))))
    return Case(
        title(" ".join(filter(None, [program, kind])), resources),
        lambda: jax.jit(gradient(xmap(fresh(body), in_axes, {}, axis_resources=resources))),
        lambda: jax.jit(gradient(sharded(fresh(on_device), specs, P()))),
        lambda k: arrays(*shapes(k)),
        specs,
    )


def weights_step(kind, resources):
    """FSDP: of each weight a device holds rows, and gathers all when it is used; ``hidden`` cuts the columns."""
    axes, hidden = resources["i"], resources.get("hidden")
    run = GATHERS[kind]

    def named(weights, x):
        total = (lambda v, w: pdot(v, w, "hidden")) if hidden else (lambda v, w: v @ w.T)
        layer = lambda x, w: x + total(jnp.tanh(x @ w), w)  # noqa: E731
        out = run(layer, x, weights, lambda w: lax.all_gather(w, "i", tiled=True))
        return lax.pmean(_loss(out), "i")

    def on_device(weights, x):
        total = (lambda v: lax.psum(v, hidden)) if hidden else _identity
        layer = lambda x, w: x + total(jnp.tanh(x @ w) @ w.T)  # noqa: E731
        out = run(layer, x, weights, lambda w: _gathered(w, axes).reshape(-1, w.shape[-1]))
        return lax.pmean(jax.vmap(_loss)(out).mean(), axes)

    in_axes, specs = (
        ({1: "i", 3: "hidden"} if hidden else {1: "i"}, ["i", ...]),
        (P(None, axes, None, hidden), P(axes)),
    )
    shapes = lambda k: [(LAYERS, 8, 2 * k, 8 * k), (8, 2, 16 * k)]  # noqa: E731
    return _step("fsdp", kind, resources, named, on_device, in_axes, specs, shapes)


def sequence_step(kind, resources):
    """Megatron: sequences are gathered before two weights, which are cut over ``t``, and their sum is scattered."""
    axes, batch = resources["t"], resources.get("batch")
    run = GATHERS[kind]

    def named(ups, downs, x):
        def layer(x, weights):
            up, down = weights
            return x + lax.psum_scatter(
                jnp.tanh(lax.all_gather(x, "t", tiled=True) @ up) @ down, "t", tiled=True
            )

        return lax.pmean(_loss(run(layer, x, (ups, downs), _identity)), ("t", "batch"))

    def on_device(ups, downs, x):
        def layer(x, weights):
            up, down = weights
            whole = _gathered(x, axes).swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])
            parts = jax.vmap(lambda up, down: jnp.tanh(whole @ up) @ down)(up, down).sum(0)
            own = lax.psum_scatter(parts, axes, scatter_dimension=1, tiled=True)
            return x + own.reshape(x.shape[1], len(x), -1, x.shape[-1]).swapaxes(0, 1)

        if batch:
            ups, downs = (lax.pcast(w, batch, to="varying") for w in (ups, downs))
        out = run(layer, x, (ups, downs), _identity)
        everywhere = (*(axes if isinstance(axes, tuple) else (axes,)), *filter(None, [batch]))
        return lax.pmean(jax.vmap(jax.vmap(_loss))(out).mean(), everywhere)

    in_axes = ({1: "t"}, {1: "t"}, {0: "t", 1: "batch"})
    specs = (P(None, axes), P(None, axes), P(axes, batch))
    shapes = lambda k: [(LAYERS, 8, 4 * k, 2 * k), (LAYERS, 8, 2 * k, 4 * k), (8, 4, k, 4 * k)]  # noqa: E731
    return _step("sequence", kind, resources, named, on_device, in_axes, specs, shapes)
