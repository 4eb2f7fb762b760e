"""Chains of xmaps with results that go from one to the next, for jax 0.4.30 and xmap_compat alike.

A chain is a row of a table: whether the value before the last xmap is undeclared, how it is fed on, and how the axes
are placed.  The last xmap has collectives.  Each chain runs under the mesh ``x: 4, y: 2``.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tables import expressions

# ------------------------------------------------------------------------------- the table

# For each placement: resources, sizes, the axes of reductions, and the axis of exchanges.
PLACEMENTS = {
    "one axis": ({"i": "x"}, {"i": 4}, "i", "i"),
    "over two mesh axes": ({"i": ("x", "y")}, {"i": 8}, "i", "i"),
    "two axes": ({"i": "x", "j": "y"}, {"i": 4, "j": 2}, ("i", "j"), "i"),
    "in part": ({"i": "x"}, {"i": 8}, "i", "i"),
}


def _ranked(s, axis):
    return s * jnp.arange(1.0, 1.0 + lax.psum(1, axis))


def _rotation(axis):
    size = lax.psum(1, axis)
    return [(k, (k + 1) % size) for k in range(size)]


# Functions of a value, the axes of reductions, and the axis of exchanges.
COLLECTIVES = expressions(
    """
psum: lax.psum(s, over)
pmean: lax.pmean(s, over)
pmax: lax.pmax(s, over)
pmin: lax.pmin(s, over)
all_gather: lax.all_gather(s, along)
ppermute: lax.ppermute(s, along, _rotation(along))
pshuffle: lax.pshuffle(s, along, list(range(lax.psum(1, along)))[::-1])
all_to_all: lax.all_to_all(_ranked(s, along), along, 0, 0)
psum_scatter: lax.psum_scatter(_ranked(s, along), along)
pdot: lax.pdot(s, s + 1, over)
jnp.sum: jnp.sum(s, axis=over if isinstance(over, tuple) else (over,))
axis_index: s + lax.axis_index(along)
last axis: lax.psum(s, over[-1])
gradient: jax.grad(lambda w: lax.psum(w, over) ** 2 / 8)(s)
""",
    "s, over, along",
    globals(),
)

STATES = ("undeclared", "declared")
FEEDS = ("as {}", "named", "in a scan", "donated", "through no mesh", "after other operations")
CHAINS = [", ".join(cell) for cell in itertools.product(STATES, FEEDS, PLACEMENTS)]


def chain(name, xmap, collectives):
    """The results of one chain, with all of the collectives in its last xmap."""
    state, feed, placement = name.split(", ")
    resources, sizes, over, along = PLACEMENTS[placement]
    named, split = list(sizes), {"axis_resources": resources}
    functions = {c: COLLECTIVES[c] for c in collectives}

    def results(s):
        return {c: fun(s, over, along) for c, fun in functions.items()}

    def stepped(states):
        return {
            c: states[c] + jnp.sum(fun(states[c], over, along)) / 64 for c, fun in functions.items()
        }

    spec = named if feed == "named" else {}
    s = _state(xmap, state, placement, spec)
    last = {"axis_sizes": sizes, **split}
    if feed == "in a scan":
        step = lambda s, _: (s + lax.pmean(s, over) / 4, results(s))
        return xmap(lambda s: lax.scan(step, s, None, length=3), {}, {}, **last)(s)
    if feed == "donated":
        step = xmap(stepped, {}, {}, donate_argnums=0, **last)
        return step(step({c: s + 0 * k for k, c in enumerate(functions)}))  # buffers of their own
    if feed == "through no mesh":
        s = xmap(lambda s: s + 1, {}, {}, axis_sizes={"k": 3})(s)
    if feed == "after other operations":
        s = jax.jit(lambda s: s * 2)(s) + 1
    return xmap(results, spec, {}, **last)(s)


def _state(xmap, state, placement, spec):
    resources, sizes, over, _ = PLACEMENTS[
        "one axis" if (state, placement) == ("undeclared", "in part") else placement
    ]
    values = np.arange(np.prod([*sizes.values()]), dtype=np.float32).reshape([*sizes.values()]) + 10
    if state == "declared":
        fun = (lambda v: v) if spec else (lambda v: lax.psum(v, over))
        return xmap(fun, list(sizes), spec, axis_resources=resources)(values)
    # Each device keeps its own; to be named, it has dimensions for that.
    fun = (lambda v: jnp.full(values.shape, v)) if spec else (lambda v: v)
    return xmap(fun, list(sizes), {}, axis_resources=resources)(values)


def buffers(out):
    """What each device holds of each result."""
    leaves = jax.tree_util.tree_leaves(out)
    return [
        [np.asarray(s.data) for s in sorted(leaf.addressable_shards, key=lambda s: s.device.id)]
        for leaf in leaves
    ]
