"""Two axes and three arrays under every kind of placement on a 4x2 mesh, as several test modules run them."""

import functools

import jax
import numpy as np

from xmap_compat import Mesh, xmap

IN_AXES = ({0: "a", 1: "b"}, {0: "a"}, {})
OUT_AXES = {0: "a", 1: "b"}

# name: (size of a, size of b, axis_resources)
PLACEMENTS = {
    "vectorized": (8, 4, {}),
    "a:x": (8, 4, {"a": "x"}),
    "a:xy": (8, 4, {"a": ("x", "y")}),
    "a:yx": (16, 4, {"a": ("y", "x")}),
    "b:y": (8, 4, {"b": "y"}),
    "a:x,b:y": (8, 4, {"a": "x", "b": "y"}),
    "b:x": (8, 4, {"b": "x"}),
}


@functools.cache
def arguments(a, b):
    """x[a, b, 3] varies over a and b, u[a] over a, w[3] over nothing."""
    rng = np.random.default_rng(a * b)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in [(a, b, 3), (a,), (3,)])


def shaped(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh42():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@functools.cache
def together(programs):
    """One body that runs several programs."""
    return lambda x, u, w: {program.__name__: program(x, u, w) for program in programs}


def vmapped(body):
    """The positional function that xmap must equal."""
    over_b = jax.vmap(body, in_axes=(0, None, None), axis_name="b")
    return jax.vmap(over_b, in_axes=(0, 0, None), axis_name="a")


def around(uses, body, placement):
    """The results of every use of the mapped body, under a placement; and those of ``jax.vmap``."""
    a, b, resources = PLACEMENTS[placement]
    with mesh42():
        results = _all_around(uses, xmap(body, IN_AXES, OUT_AXES, axis_resources=resources))(
            *arguments(a, b)
        )
    return results, _around_vmap(uses, body, a, b)


@functools.cache
def _around_vmap(uses, body, a, b):
    return _all_around(uses, vmapped(body))(*arguments(a, b))


def _all_around(uses, mapped):
    """Every use of a mapped function, as one jitted function."""
    return jax.jit(lambda *args: {use.__name__: use(mapped, *args) for use in uses})
