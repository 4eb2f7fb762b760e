"""Random programs of what JAX has beside named axes, in each other and in vmaps inside of bodies.

Control flow, custom rules, linear algebra, random numbers and narrow floats.  The oracle is the body under ``vmap``;
it is a loop over the elements where vmap draws other bits.  ``XMAP_COMPAT_EXAMPLES`` says how many programs each test
tries, and ``XMAP_COMPAT_SEED`` where to start.
"""

import os
import re

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


def seeds(few, more):
    """The seeds of a test: a few, and more of them slow; or as many as asked for."""
    if EXAMPLES:
        return pytest.mark.parametrize("seed", range(SEED, SEED + EXAMPLES))
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, more)]
    return pytest.mark.parametrize("seed", [*range(few), *slow])


def drawn_names(rng):
    return str(rng.choice(["", "a", "b", "ab"]))


def arguments(rng, dtype, w_names, key_names, implementation):
    lead = lambda names: tuple(SIZES[n] for n in names)
    v = rng.normal(size=(4, 2, 3))
    w = rng.choice([-1, 1], size=(*lead(w_names), 3)) * rng.uniform(
        0.5, 1.2, size=(*lead(w_names), 3)
    )
    key = jax.random.key(int(rng.integers(99)), impl=implementation)
    keys = jax.random.split(key, lead(key_names)) if key_names else key
    return jnp.asarray(v, dtype), jnp.asarray(w, dtype), keys


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
    return [value, *(derivatives[int(rng.integers(len(derivatives)))] for _ in derivatives[:1])]


def assert_near(got, want, tolerance):
    for g, w in zip(got, want):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(
            g, w, rtol=tolerance, atol=tolerance * (1 + np.abs(w[np.isfinite(w)]).max(initial=0))
        )


def check(rng, words, dtype="float32", implementation="threefry2x32", oracle=vmapped, uses=None):
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
    for use in uses or uses_of(words, rng):
        try:
            want = jax.jit(lambda *args, use=use: use(oracle(reference, names), *args))(*args)
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


@seeds(5, 80)
def test_structures(seed):
    rng = np.random.default_rng([0, seed])
    check(rng, draw(rng, ELEMENTWISE | COLLECTIVE | ALGEBRA, WRAPPERS))


@seeds(3, 60)
def test_branches_that_are_not_differentiable_where_they_are_not_taken(seed):
    rng = np.random.default_rng([5, seed])
    rules = {
        "custom_jvp",
        "custom_vjp",
        "scan",
        "counted",
        "cond",
        "switch",
        "jit",
        "remat",
        "vmapped",
        "gradient",
    }
    words = f"guarded {draw(rng, ELEMENTWISE, rules).split(';')[0]}"
    # JAX's own vmap loses custom_vjp rules under a vmap in a branch: test_jax_bugs.py.
    check(
        rng,
        words,
        oracle=looped,
        uses=[value, forward if modes(words.split()) == {"forward"} else reverse],
    )


@seeds(3, 40)
def test_rules_of_weights(seed):
    rng = np.random.default_rng([6, seed])
    words = f"shared {draw(rng, ELEMENTWISE, {'scan', 'counted', 'cond', 'jit', 'remat', 'vmapped'}).split(';')[0]}"
    check(rng, words, uses=[value, reverse])


@seeds(2, 30)
def test_linear_algebra(seed):
    rng = np.random.default_rng([1, seed])
    check(rng, draw(rng, ALGEBRA, WRAPPERS))


@seeds(3, 30)
def test_random_numbers(seed):
    rng = np.random.default_rng([2, seed])
    implementation = ["threefry2x32", "rbg", "unsafe_rbg"][seed % 3]
    plain = sorted(set(WRAPPERS) - {"custom_batched", "custom_vjp_summing"})
    check(rng, draw(rng, RANDOM, plain), implementation=implementation, oracle=looped)


@seeds(3, 40)
def test_operations_that_jax_does_not_map(seed):
    rng = np.random.default_rng([7, seed])
    wrappers = {
        "scan",
        "counted",
        "loop",
        "cond",
        "switch",
        "jit",
        "remat",
        "custom_jvp",
        "custom_vjp",
    }
    check(rng, draw(rng, UNMAPPED, wrappers), oracle=looped, uses=[value])


@seeds(2, 40)
def test_narrow_floats(seed):
    rng = np.random.default_rng([3, seed])
    dtype = ["float16", "bfloat16"][seed % 2]
    check(
        rng,
        draw(rng, ELEMENTWISE | COLLECTIVE | RANDOM, sorted(set(WRAPPERS) - {"gradient"})),
        dtype,
    )


@seeds(2, 30)
def test_floats_of_eight_bits(seed):
    rng = np.random.default_rng([4, seed])
    dtype = ["float8_e4m3fn", "float8_e5m2"][seed % 2]
    wrappers = {"scan", "counted", "loop", "cond", "switch", "jit", "remat", "custom_jvp"}
    check(rng, draw(rng, SIMPLE, wrappers), dtype, uses=[value])
