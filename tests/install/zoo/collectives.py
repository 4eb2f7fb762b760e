"""The collectives of a library of parallel algorithms, each over an axis that fills its mesh axis: a ring, an
exchange, a transposition, and reductions by groups of arguments."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_leaves, tree_util
from jax.experimental.maps import xmap
from jax.sharding import Mesh
from jax.util import safe_zip, split_list, unzip2

SIZE = 4
over = partial(xmap, in_axes=["i", ...], axis_resources={"i": "x"})


def ring_sum(x):
    """A sum that goes around."""
    ring = [(k, (k + 1) % SIZE) for k in range(SIZE)]

    def body(carry, _):
        total, moving = carry
        moving = lax.ppermute(moving, "i", ring)
        return (total + moving, moving), moving.sum()

    (total, _), seen = lax.scan(body, (x, x), None, length=SIZE - 1)
    return total, seen


def sorted_between(x):
    """Neighbours exchange their smaller and larger halves, in turns."""
    index = lax.axis_index("i")
    for turn in range(SIZE):
        partners = [(k, k + 1) if k % 2 == turn % 2 else (k, k - 1) for k in range(SIZE)]
        partners = [(a, b) for a, b in partners if 0 <= b < SIZE]
        other = lax.ppermute(x, "i", partners)
        low = (index % 2) == (turn % 2)
        partner = jnp.where(low, index + 1, index - 1)
        both = jnp.sort(jnp.concatenate([x, other]))
        half = jnp.where(low, both[: len(x)], both[len(x) :])
        x = jnp.where((partner >= 0) & (partner < SIZE), half, x)
    return x


def statistics(tree):
    leaves, treedef = jax.tree_flatten(tree)
    means = [lax.pmean(leaf, "i") for leaf in leaves]
    extremes = [(lax.pmin(leaf, "i"), lax.pmax(leaf, "i")) for leaf in leaves]
    low, high = unzip2(extremes)
    spread = [jnp.max(h - m) for h, m in safe_zip(high, means)]
    return jax.tree_unflatten(treedef, means), list(low), spread


def main():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(SIZE, 4)).astype(np.float32)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        total, seen = over(ring_sum, out_axes=(["i", ...], ["i", ...]))(x)
        ordered = over(sorted_between, out_axes=["i", ...])(x)
        transposed = over(lambda v: lax.all_to_all(v, "i", 0, 0), out_axes=["i", ...])(x)
        gathered = over(lambda v: lax.all_gather(v, "i").sum(axis=0), out_axes=["i", ...])(x)
        scattered = over(lambda v: lax.psum_scatter(v, "i"), out_axes=["i", ...])(x)
        tree = {"a": x, "b": x[:, ::-1] * 2}
        means, low, spread = over(statistics, out_axes=({}, {}, {}))(tree)
    assert (np.asarray(ordered).ravel() == np.sort(x.ravel())).all()
    first, rest = split_list(tree_leaves(means), [1])
    assert tree_util.tree_structure(means) == jax.tree_structure(tree)
    found = {
        "total": total,
        "seen": seen,
        "transposed": transposed,
        "gathered": gathered[0],
        "scattered": scattered,
        "first": first[0],
        "rest": rest[0],
        "low": low[0],
    }
    found = {name: np.asarray(value).round(5).tolist() for name, value in found.items()}
    print(json.dumps({**found, "spread": float(reduce(jnp.maximum, spread))}))


if __name__ == "__main__":
    main()
