"""Random programs of what JAX has beside named axes, in each other and in vmaps inside of bodies.

Control flow, custom rules, linear algebra, random numbers and narrow floats.  The oracle is the body under ``vmap``;
it is a loop over the elements where vmap draws other bits.  ``XMAP_COMPAT_EXAMPLES`` says how many programs each test
tries, and ``XMAP_COMPAT_SEED`` where to start.
"""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_bodies import (
    ALGEBRA,
    COLLECTIVE,
    ELEMENTWISE,
    RANDOM,
    SIMPLE,
    UNMAPPED,
    WRAPPERS,
    body,
    chains_of,
    communicates_in_branches,
    draw,
    mentioned,
    modes,
)

from xmap_compat import Mesh, SerialLoop, xmap

EXAMPLES = int(os.environ.get("XMAP_COMPAT_EXAMPLES", 0))
SEED = int(os.environ.get("XMAP_COMPAT_SEED", 0))

SIZES = {"a": 4, "b": 2}
ASSIGNMENTS = (
    {},
    {"a": "x"},
    {"a": "x", "b": "y"},
    {"b": "x"},
    {"a": ("x", "y")},
    {"a": ("y", "x")},
    {"a": SerialLoop(2)},
    {"a": "y", "b": SerialLoop(2)},
    {"a": ("x", SerialLoop(2))},
)
TOLERANCE = {
    "float32": 1e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
    "float8_e4m3fn": 0.1,
    "float8_e5m2": 0.2,
}


def drawn_names(rng):
    return str(rng.choice(["", "a", "b", "ab"]))


def arguments(rng, dtype, w_names, key_names, implementation):
    v = rng.normal(size=(4, 2, 3))
    shape = (*sizes_of(w_names), 3)
    w = rng.choice([-1, 1], size=shape) * rng.uniform(0.5, 1.2, size=shape)
    keys = jax.random.key(int(rng.integers(99)), impl=implementation)
    if key_names:
        keys = jax.random.split(keys, sizes_of(key_names))
    return jnp.asarray(v, dtype), jnp.asarray(w, dtype), keys


def sizes_of(names):
    return tuple(SIZES[name] for name in names)


def xmapped(f, names, resources):
    specs = tuple(dict(enumerate(n)) for n in names)
    return xmap(f, specs, {0: "a", 1: "b"}, axis_sizes=SIZES, axis_resources=resources)


def vmapped(f, names):
    for axis in "ba":
        f = jax.vmap(
            f, [0 if axis in n else None for n in names], axis_name=axis, axis_size=SIZES[axis]
        )
    return f


def looped(f, names):
    """The function of each element, one after another: of keys that are not threefry's, vmap draws one stream."""

    def element(args, k):
        place = dict(zip("ab", divmod(k, SIZES["b"])))
        return f(*(x[tuple(place[n] for n in own)] for x, own in zip(args, names)))

    return lambda *args: lax.map(lambda k: element(args, k), jnp.arange(8)).reshape(4, 2, 3)


def value(f, v, w, key):
    return (f(v, w, key),)


def reverse(f, v, w, key):
    weights = jnp.cos(jnp.arange(24, dtype=jnp.float32)).reshape(4, 2, 3)
    return jax.grad(lambda v, w: jnp.sum(f(v, w, key).astype(jnp.float32) * weights), (0, 1))(v, w)


def forward(f, v, w, key):
    return (jax.jvp(lambda v, w: f(v, w, key), (v, w), (jnp.cos(v), jnp.sin(w)))[1],)


def uses_of(words, rng):
    """The value, and a derivative that all pieces have.

    There is none of collectives in branches: vmap takes it only through the elements that take a branch, though the
    others contribute to its collectives as well.
    """
    kept = set.intersection(*map(modes, chains_of(words)))
    derivatives = [
        use
        for use in (reverse, forward)
        if use.__name__ in kept and not communicates_in_branches(words)
    ]
    return [value, derivatives[rng.integers(len(derivatives))]] if derivatives else [value]


def assert_near(got, want, tolerance):
    for g, w in zip(got, want):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(
            g, w, rtol=tolerance, atol=tolerance * (1 + np.abs(w[np.isfinite(w)]).max(initial=0))
        )


def check(rng, words, dtype, implementation, family):
    names = ("ab", drawn_names(rng), drawn_names(rng))
    args = arguments(rng, dtype, *names[1:], implementation)
    fits = [
        r for r in ASSIGNMENTS if not any(n in mentioned(words) and "Loop" in repr(r[n]) for n in r)
    ]
    resources = fits[rng.integers(len(fits))]
    print(
        f"body({words!r}), {dtype}, {implementation}, in_axes {names}, axis_resources {resources}"
    )
    # JAX (to 0.12) does not map every derivative of a custom_vmap.
    f = body(words)
    reference = body(
        words.replace("custom_batched ", "").replace("shared ", "shared_without_rule ")
    )
    for use in family.uses(words, rng):
        try:
            want = jax.jit(lambda *args, use=use: use(family.oracle(reference, names), *args))(
                *args
            )
        except (NameError, NotImplementedError, TypeError) as error:
            # vmap has forgotten its axis where JAX traces a rule inside of a rule; a switch that is mapped in the rule
            # of a custom_jvp has no derivative, nor a mapped solver whose operator is a constant in part (to 0.12).
            of_jax = (
                "ad_util.Zero" if use is value else "ad_util.Zero|unbound axis name|'stop_gradient'"
            )
            assert re.search(of_jax, str(error))
            continue
        with Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")):
            got = use(xmapped(f, names, resources), *args)
        assert_near(got, want, TOLERANCE[dtype] * (1 if use is value else 10))


# ------------------------------------------------------------------------------ families


class Family(NamedTuple):
    """Which programs a test draws, and what they are compared with.

    Attributes:
      quick, all: how many seeds are tried in a quick run, and how many with ``--slow``.
      leaves, wrappers: of what programs are made.
      uses: what is computed; by default the value, and a derivative that all pieces have.
      dtypes, implementations: of operands and keys, in turn.
      first: a word that the program begins with, which takes its first chain only.
    """

    quick: int
    all: int
    leaves: Any
    wrappers: Any
    oracle: Callable = vmapped
    uses: Callable = uses_of
    dtypes: tuple = ("float32",)
    implementations: tuple = ("threefry2x32",)
    first: str = ""


RULES = {"custom_jvp", "custom_vjp"}
BRANCHES = {"scan", "counted", "cond", "switch", "jit", "remat"}
NOT_OF_KEYS = {"custom_batched", "custom_vjp_summing"}


def only_values(words, rng):
    return [value]


def value_and_reverse(words, rng):
    return [value, reverse]


def value_and_a_derivative(words, rng):
    return [value, forward if modes(words.split()) == {"forward"} else reverse]


# Their order is part of the seeds.
FAMILIES = {
    "structures": Family(5, 80, ELEMENTWISE | COLLECTIVE | ALGEBRA, WRAPPERS),
    "linear algebra": Family(2, 30, ALGEBRA, WRAPPERS),
    "random numbers": Family(
        quick=3,
        all=30,
        leaves=RANDOM,
        wrappers=set(WRAPPERS) - NOT_OF_KEYS,
        oracle=looped,
        implementations=("threefry2x32", "rbg", "unsafe_rbg"),
    ),
    "narrow floats": Family(
        quick=2,
        all=40,
        leaves=ELEMENTWISE | COLLECTIVE | RANDOM,
        wrappers=set(WRAPPERS) - {"gradient"},
        dtypes=("float16", "bfloat16"),
    ),
    "floats of eight bits": Family(
        quick=2,
        all=30,
        leaves=SIMPLE,
        wrappers=BRANCHES | {"loop", "custom_jvp"},
        uses=only_values,
        dtypes=("float8_e4m3fn", "float8_e5m2"),
    ),
    # JAX's own vmap loses custom_vjp rules under a vmap in a branch: test_jax_bugs.py.
    "branches that are not differentiable where they are not taken": Family(
        quick=3,
        all=60,
        leaves=ELEMENTWISE,
        wrappers=BRANCHES | RULES | {"vmapped", "gradient"},
        oracle=looped,
        uses=value_and_a_derivative,
        first="guarded",
    ),
    "rules of weights": Family(
        quick=3,
        all=40,
        leaves=ELEMENTWISE,
        wrappers={"scan", "counted", "cond", "jit", "remat", "vmapped"},
        uses=value_and_reverse,
        first="shared",
    ),
    "operations that jax does not map": Family(
        quick=3,
        all=40,
        leaves=UNMAPPED,
        wrappers=BRANCHES | RULES | {"loop"},
        oracle=looped,
        uses=only_values,
    ),
}


def programs():
    """Each family and seed: a few, and more of them slow; or as many as asked for."""
    for name, family in FAMILIES.items():
        asked = range(SEED, SEED + EXAMPLES)
        for seed in asked or range(family.all):
            slow = not EXAMPLES and seed >= family.quick
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(name, seed, marks=marks, id=f"{name}-{seed}")


@pytest.mark.parametrize(("name", "seed"), [*programs()])
def test_a_body_is_as_under_vmap_or_element_by_element(name, seed):
    family = FAMILIES[name]
    rng = np.random.default_rng([list(FAMILIES).index(name), seed])
    words = draw(rng, family.leaves, family.wrappers)
    if family.first:
        words = f"{family.first} {words.split(';')[0]}"
    dtype = family.dtypes[seed % len(family.dtypes)]
    implementation = family.implementations[seed % len(family.implementations)]
    check(rng, words, dtype, implementation, family)
