"""``plan.source()`` of functions that are wrapped, bound, decorated or made, and of what they close over.

Each source is executed where xmap_compat cannot be imported, and compared in values and gradients with NumPy or with
functions of whole arrays.
"""

import collections
import dataclasses
import enum
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from test_source import assert_close, check, grid, normal, plan_of, refused, resources_of, run, source_of

from xmap_compat import Mesh, SerialLoop, install, named_shape, xeinsum, xmap
from xmap_compat.core.placement import Body, current_scope
from xmap_compat.core.trace import trace_flat
from xmap_compat.tools.source import module, proof, rewrite
from xmap_compat.tools.source import text as words

PLACES = ["none", "part", "full"]


def centred(x):
    return jnp.sum((x - lax.pmean(x, "i")) ** 3)


def doubling(function):
    @functools.wraps(function)
    def wrapper(*args):
        return 2 * function(*args)

    return wrapper


@doubling
def doubled(x):
    return x - lax.pmean(x, "i")


@jax.grad
def slope(x):
    return jnp.sum(jnp.sin(x))


@jax.jit
def jitted(x):
    return x - lax.pmean(x, "i")


@dataclasses.dataclass(frozen=True)
class Layer:
    scale: float
    axis: str

    def __call__(self, x):
        return self.scale * x - lax.pmean(x, self.axis)

    def shifted(self, x):
        return self(x) + lax.psum(1, self.axis)


class Centre:
    def __init__(self, axis, sign=-1):
        self.axis, self.sign = axis, sign

    def apply(self, x):
        return x + self.sign * lax.pmean(x, self.axis)


def shift(x, name, by=1):
    n = lax.psum(1, name)
    return lax.ppermute(x, name, [(k, (k + by) % n) for k in range(n)])


def both_ways(x):
    return shift(x, "i") - shift(x, "i", by=-1)


def per_device(x, mesh):
    return x - mesh


def named_as_the_writer_names(x):
    mesh = lax.pmean(x, "i")
    return per_device(x, mesh)


def minus_mean(x):
    return x - x.mean(0)


def slope_of_centred(x):
    """By hand: the gradient of each element's own ``centred``, in which the mean is summed over elements."""
    third = 3 * (x - x.mean(0)) ** 2
    return third - third.mean(0)


WRAPPED = {
    "jax.grad": (jax.grad(centred), slope_of_centred),
    "@jax.grad": (slope, np.cos),
    "jax.vmap": (jax.vmap(lambda v: v - lax.pmean(v, "i")), minus_mean),
    "jax.jit": (jax.jit(lambda x: x - lax.pmean(x, "i")), minus_mean),
    "jax.checkpoint": (jax.checkpoint(lambda x: jnp.sin(x - lax.pmean(x, "i"))), lambda x: np.sin(minus_mean(x))),
    "@jax.jit": (jitted, minus_mean),
    "a decorator of the user's": (doubled, lambda x: 2 * minus_mean(x)),
    "a decorator, applied": (doubling(lambda x: x - lax.pmean(x, "i")), lambda x: 2 * minus_mean(x)),
    "twice": (doubling(doubled), lambda x: 4 * minus_mean(x)),
    "a partial": (functools.partial(shift, name="i", by=2), lambda x: np.roll(x, 2, 0)),
    "a callable object": (Layer(3.0, "i"), lambda x: 3 * x - x.mean(0)),
    "a bound method": (Layer(3.0, "i").shifted, lambda x: 3 * x - x.mean(0) + len(x)),
    "a method of a plain object": (Centre("i").apply, minus_mean),
    "an axis as a parameter": (both_ways, lambda x: np.roll(x, 1, 0) - np.roll(x, -1, 0)),
    "names that the writer uses": (named_as_the_writer_names, minus_mean),
}


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRAPPED)
def test_functions_of_all_kinds(name, place):
    body, oracle = WRAPPED[name]
    x = normal(8, 3)
    text = check(body, ["i", ...], ["i", ...], resources_of("i", place), (x,), oracle(x))
    weights = np.arange(24, dtype=np.float32).reshape(8, 3)
    f = run(text)
    found = jax.block_until_ready(jax.grad(lambda x: jnp.sum(weights * f(x)))(x))
    along, step = np.float64(normal(8, 3, seed=1)), 1e-6
    change = oracle(np.float64(x) + step * along) - oracle(np.float64(x) - step * along)
    np.testing.assert_allclose(np.sum(found * along), np.sum(weights * change) / (2 * step), rtol=1e-3)


# ----------------------------------------------------------------------------- xmaps inside

rows = xmap(lambda v, w: v * w - lax.psum(v, ("i", "j")), (["j", ...], [...]), {1: "j"})


def nested(x):
    by_name = rows(x, jnp.float32(2))
    in_place = xmap(lambda v: jnp.sum(v) * lax.pmax(v, "k"), {0: "k"}, ["k", ...])(x)
    return by_name.T + in_place


def nested_of_whole_arrays(x):
    return 2 * x - x.sum((0, 1)) + x.sum(2, keepdims=True) * x.max(1, keepdims=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_xmaps_inside_are_vmaps(place):
    x = normal(8, 3, 2)
    text = check(nested, ["i", ...], ["i", ...], resources_of("i", place), (x,), nested_of_whole_arrays(x))
    assert text.count("jax.vmap(") >= 2
    f, weights = run(text), normal(8, 3, 2, seed=4)
    grad = lambda g: jax.grad(lambda x: jnp.sum(weights * g(x)))(x)
    assert_close(jax.block_until_ready(grad(f)), grad(nested_of_whole_arrays))


LOOPED, ON_MESH = {"j": SerialLoop(2)}, {"j": "y"}


def on(resources):
    """An xmap whose body has one with resources: a loop is around what has no collectives."""

    def with_collectives(v, w):
        return v * w - lax.psum(v * v, "j") + lax.axis_index("j")

    body = with_collectives if resources is ON_MESH else lambda v, w: v * w
    inner = xmap(body, (["j", ...], [...]), {1: "j"}, axis_resources=resources)
    return lambda x: inner(x, jnp.float32(2)).T + lax.psum(x, "i")


def of_whole_arrays(x, resources):
    more = np.arange(x.shape[1])[:, None] - (x**2).sum(1, keepdims=True)
    return 2 * x + x.sum(0) + (more if resources is ON_MESH else 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["none", "part"])
@pytest.mark.parametrize("inside", [LOOPED, ON_MESH], ids=["loop", "mesh"])
def test_xmaps_inside_with_resources(inside, place):
    x = normal(8, 4, 2)
    body = on(inside)
    text = check(body, ["i", ...], ["i", ...], resources_of("i", place), (x,), of_whole_arrays(x, inside))
    assert ("on_devices(" in text, "in_loop(" in text) == (inside is ON_MESH, inside is LOOPED)
    weights = normal(8, 4, 2, seed=4)
    grad = lambda g: jax.grad(lambda x: jnp.sum(weights * g(x) ** 2))(x)
    assert_close(jax.block_until_ready(grad(run(text))), grad(lambda x: of_whole_arrays(x, inside)))


def test_a_gradient_of_an_xmap_inside_on_the_mesh_is_refused():
    body = lambda x: jax.grad(lambda x: on(ON_MESH)(x).sum())(x)
    assert "and a gradient that is taken inside" in refused(body, ["i", ...], ["i", ...], {}, (normal(8, 4, 2),))


# --------------------------------------------------------------- names that JAX has no more


def mean_of_all(tree):
    return jax.tree.map(functools.partial(lax.pmean, axis_name="i"), tree)


def test_a_collective_that_is_an_argument_of_partial():
    x = normal(8, 3)
    for place in ("none", "part"):
        check(mean_of_all, ["i", ...], [...], resources_of("i", place), ({"x": x},), {"x": x.mean(0)})
    for function, axes in ((lax.ppermute, {"perm": [(0, 1)]}), (lax.all_to_all, {"split_axis": 0, "concat_axis": 1})):
        body = lambda x, f=functools.partial(function, axis_name="i", **axes): f(x)
        assert "cannot be written" in refused(body, ["i", ...], ["i", ...], {}, (normal(8, 8, 2),))


def of_old_names(x, names=()):
    low, high = jax.util.unzip2([(v, v) for v in jax.tree_leaves(x)])
    parts = [jnp.clip(a - b, a_min=0.0, a_max=None) for a, b in jax.util.safe_zip(high, low)]
    shape = jax.core.NamedShape(3, **names)
    return jax.tree_map(lambda v: v + sum(parts), x), jax.random.normal(jax.random.key(3), shape)


@pytest.mark.parametrize("place", ["none", "part"])
def test_old_names_are_written_as_those_of_today(place):
    """They are there only while they are installed."""
    x = normal(8, 3)
    body = lambda x: of_old_names(x, {"i": 8})
    with install():
        text = source_of(body, ["i", ...], (["i", ...], ["i", ...]), resources_of("i", place), (x,))
    assert re.search(r"jax\.tree_|jax\.util|a_min", text.split('"""')[2]) is None
    noise = [jax.random.normal(jax.random.fold_in(jax.random.key(3), k), (3,)) for k in range(8)]
    assert_close(jax.block_until_ready(run(text)(x)), (x, np.stack(noise)))


def test_an_old_name_without_a_new_one_is_refused():
    with install():
        why = refused(lambda x: jax.lax.tie_in(x, x), ["i"], ["i"], {}, (normal(8),))
    assert "a use of jax.lax.tie_in, which JAX has removed: write" in why


OFFSETS = np.arange(3, dtype=np.float32)


def on_host(v, by=2):
    return np.asarray(v * by + OFFSETS, np.float32)


def called(callback, x):
    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


CALLBACKS = {
    "a function": lambda x: called(on_host, x),
    "a partial one": lambda x: called(functools.partial(on_host, by=3), x),
    "a lambda": lambda x: called(lambda v: np.asarray(4 * v + OFFSETS, np.float32), x),
    "mapped by default": lambda x: jax.pure_callback(
        functools.partial(on_host, by=5), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    ),
}


@pytest.mark.parametrize("place", ["none", "part"])
@pytest.mark.parametrize("case", CALLBACKS)
def test_callbacks_are_written(case, place):
    x, by = normal(8, 3), 2 + list(CALLBACKS).index(case)
    text = check(CALLBACKS[case], ["i", ...], ["i", ...], resources_of("i", place), (x,), by * x + OFFSETS)
    assert "JAX cannot differentiate this" not in text


def saves_names(x):
    policy = jax.checkpoint_policies.save_only_these_names("sum")
    return jax.checkpoint(lambda v: jnp.sin(checkpoint_name(lax.psum(v, "i"), "sum")), policy=policy)(x)


def test_a_checkpoint_with_names_to_save_is_written():
    x = normal(8, 3)
    check(saves_names, ["i", ...], [...], {"i": "x"}, (x,), np.sin(x.sum(0)))


def skips(x, y):
    return xeinsum("a{i},a->{i}", x, y)


@pytest.mark.parametrize("place", PLACES)
def test_an_einsum_over_no_names(place):
    """That an operand skips an axis is checked by xmap, and is nothing to compute."""
    x, y = normal(8, 3), normal(3, seed=1)
    check(skips, (["i", ...], [...]), ["i"], resources_of("i", place), (x, y), x @ y)


def test_a_function_that_is_taken_by_its_name():
    name = "sum"
    body = lambda x: getattr(jnp, name)(x, axis="i")
    check(body, ["i", ...], [...], {"i": "x"}, (NUMBERS,), NUMBERS.sum(0))


NUMBERS = np.arange(24.0, dtype=np.float32).reshape(8, 3)


# ----------------------------------------------------------------------------- the proof


def test_what_is_written_wrong_is_refused(monkeypatch):
    """A writer with a mistake: it takes another mesh axis."""
    monkeypatch.setattr(rewrite, "axes", lambda parts: '"y"')
    why = refused(minus_all, ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 3),))
    assert "it lacks psum over" in why and "it has psum over y" in why


def minus_all(x):
    return x - lax.psum(x, "i")


def test_a_decorator_that_is_not_seen_is_refused(monkeypatch):
    monkeypatch.setattr(module.Module, "_decorated", lambda self, value: None)
    monkeypatch.setattr(module._jax, "transformation_of", lambda fun: None)
    why = refused(jax.grad(centred), ["i", ...], ["i", ...], {}, (normal(8, 3),))
    assert "of a library, which has no public name" in why


def side(fun, *args):
    body = Body({"i": 4, "j": 2}, current_scope())
    return proof.Graph(trace_flat(fun, args, body), body)


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0]))


@jax.custom_jvp
def bent_otherwise(x):
    return jnp.sin(x)


bent_otherwise.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * tangents[0]))


def turns(n):
    return lambda x, y: lax.fori_loop(0, n, lambda k, v: v * y + k, x)


def order(x, y):
    first = jnp.sin(x)
    second = jnp.cos(y)
    return first + second


def other_order(x, y):
    second = jax.jit(jnp.cos)(y)
    _ = jnp.tan(second)
    return jnp.asarray(second) + jnp.sin(x)


def called_back(function):
    return lambda x, y: jax.pure_callback(function, jax.ShapeDtypeStruct((3,), np.float32), x)


def with_offset(offset):
    made = {"OFFSET": offset}
    exec("def function(v): return v + OFFSET", made)
    return made["function"]


DIFFERENT = {
    "a collective": (lambda x, y: lax.psum(x, "i"), lambda x, y: lax.pmax(x, "i")),
    "its axis": (lambda x, y: lax.psum(x, "i"), lambda x, y: lax.psum(x, "j")),
    "its position": tuple(lambda x, y, k=k: lax.psum(jnp.outer(x, y), ("i", k)) for k in (0, 1)),
    "an effect": (lambda x, y: x, lambda x, y: (jax.debug.print("{x}", x=x), x)[1]),
    "a callback": tuple(called_back(lambda v, k=k: v * np.float32(k)) for k in (1, 2)),
    "an array of a callback": tuple(called_back(with_offset(np.float32(k))) for k in (1, 2)),
    "the sign of zero": (lambda x, y: x + 0.0, lambda x, y: x + -0.0),
    "a permutation": (
        lambda x, y: lax.ppermute(x, "i", [(0, 1), (1, 0)]),
        lambda x, y: lax.ppermute(x, "i", [(0, 1), (1, 2)]),
    ),
    "a constant": (lambda x, y: x + 1, lambda x, y: x + 2),
    "an array": (lambda x, y: x + np.arange(3.0), lambda x, y: x + np.arange(3.0) * 2),
    "an operand": (lambda x, y: x - y, lambda x, y: y - x),
    "a number of turns": (turns(2), turns(3)),
    "a branch": (
        lambda x, y: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x, y: lax.cond(x[0] > 0, jnp.sin, jnp.tan, x),
    ),
    "a derivative": (lambda x, y: bent(x), lambda x, y: bent_otherwise(x)),
    "a precision": (lambda x, y: x @ y, lambda x, y: jnp.matmul(x, y, precision="highest")),
    "a type": (lambda x, y: x.astype(jnp.float16) + y, lambda x, y: x + y),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_proof_sees_a_difference_in(case):
    one, other = DIFFERENT[case]
    x, y = normal(3), normal(3, seed=1)
    assert proof.difference(side(one, x, y), side(one, x, y)) is None
    assert proof.difference(side(one, x, y), side(other, x, y)) is not None
    assert proof.difference(side(other, x, y), side(one, x, y)) is not None


def test_the_proof_sees_no_difference_in_order_in_calls_and_in_what_is_not_used():
    assert proof.difference(side(order, normal(3), normal(3)), side(other_order, normal(3), normal(3))) is None


# ------------------------------------------------------------------ random numbers, solvers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_numbers_are_the_same(impl, place):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    body = lambda key: jax.random.normal(key, (3,))
    call = body, ["i"], ["i", ...], resources_of("i", place), (keys,)
    expected = np.stack([jax.random.normal(key, (3,)) for key in keys])
    check(*call, expected)


def test_keys_of_an_axis_that_is_summed_over_or_of_an_xmap_inside_are_refused():
    """``jax.vmap`` draws one stream for all of them; a loop has no collectives."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    summed = lambda key: lax.psum(jax.random.normal(key), "i")
    assert "keys of impl 'rbg' that differ along i" in refused(summed, ["i"], [], {}, (keys,))
    inside = lambda keys: xmap(jax.random.normal, ["j"], ["j"])(keys)
    why = refused(inside, ["i", ...], ["i", ...], {}, (keys.reshape(4, 2),))
    assert "keys of impl 'rbg' in a nested call" in why


KEY, RAW = jax.random.key(7), jax.random.PRNGKey(7)


def noisy(x):
    own = jax.random.fold_in(KEY, lax.axis_index("i"))
    return x + jax.random.normal(own, x.shape) * lax.pmean(x, "i") + jax.random.uniform(RAW, x.shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_keys_that_a_function_closes_over(place):
    x = normal(8, 3)
    noise = np.stack([jax.random.normal(jax.random.fold_in(KEY, k), (3,)) for k in range(8)])
    expected = x + noise * x.mean(0) + np.asarray(jax.random.uniform(RAW, (3,)))
    check(noisy, ["i", ...], ["i", ...], resources_of("i", place), (x,), expected)


def test_a_lambda_that_returns_nothing_but_a_constant_is_found():
    x = normal(8, 3)
    source = plan_of(lambda v: (), ["i", ...], ["i", ...], {"i": "x"}, (x,)).source(run=False)
    modern = {}
    exec(source, modern)
    assert modern["mapped_function"](x) == ()


def solved(matrix, b):
    return jnp.linalg.solve(matrix, b) * lax.psum(1.0, "i")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_the_gradient_of_a_linear_solve(place):
    matrix, b = normal(8, 3, 3) + 5 * np.eye(3, dtype=np.float32), normal(8, 3)
    plain = lambda m, b: 8 * jnp.linalg.solve(m, b[..., None])[..., 0]
    text = check(solved, (["i", ...], ["i", ...]), ["i", ...], resources_of("i", place), (matrix, b), plain(matrix, b))
    f, weights = run(text), normal(8, 3, seed=2)
    found, expected = (jax.grad(lambda *a, g=g: jnp.sum(weights * g(*a)), (0, 1))(matrix, b) for g in (f, plain))
    assert_close(jax.block_until_ready(found), expected)


def test_odeint_is_written_or_refused_in_words():
    from jax.experimental.ode import odeint

    def falls(x):
        return odeint(lambda y, t: -y * lax.psum(1.0, "i"), x, jnp.linspace(0.0, 0.1, 3))[-1]

    try:
        text = source_of(falls, ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 2),))
    except NotImplementedError as error:
        assert "cannot be written as source" in str(error)
    else:
        x = normal(8, 2)
        np.testing.assert_allclose(run(text)(x), x * np.exp(-0.8), rtol=1e-3)


# ------------------------------------------------------------------------ trees of classes


def passes_a_pair(k, v):
    n = lax.psum(1, "i")
    k, v = lax.ppermute((k, v), "i", [(j, (j + 1) % n) for j in range(n)])
    return k * v


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_ppermute_of_a_pair(place):
    k, v = normal(8, 3), normal(8, 3, seed=1)
    check(passes_a_pair, ["i", ...], ["i", ...], resources_of("i", place), (k, v), np.roll(k * v, 1, 0))


class State(NamedTuple):
    weights: jax.Array
    count: jax.Array


def step(state, x):
    weights = state.weights - 0.1 * lax.pmean(x, "i")
    return State(weights, state.count + 1), {"loss": jnp.sum(weights)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_state_that_is_a_named_tuple(place):
    state, x = State(normal(3), np.int32(4)), normal(8, 3)
    plan = plan_of(step, ([...], ["i", ...]), [...], resources_of("i", place), (state, x))
    new, metrics = run(plan.source(run=False))(state, x)
    assert_close(new.weights, state.weights - 0.1 * x.mean(0))
    assert (int(new.count), list(metrics)) == (5, ["loss"])


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss(params, x, y):
    return lax.pmean(jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2), "batch")


def train_step(params, opt_state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    grads = jax.tree.map(lambda g: lax.pmean(g, "batch"), grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resources", [{}, {"batch": "x"}, {"batch": ("x", "y")}], ids=str)
def test_a_training_step_with_optax(resources):
    params = {"w": normal(4, 2), "b": normal(2)}
    x, y = normal(16, 4), normal(16, 2)
    opt_state = optimizer.init(params)
    f = xmap(train_step, ([...], [...], ["batch", ...], ["batch", ...]), [...], axis_resources=resources)
    with Mesh(grid(4, 2), ("x", "y")):
        text = f.plan(params, opt_state, x, y).source(run=False)
    assert "optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))" in text

    def plain(params, opt_state):
        whole = lambda p: jnp.mean((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2)
        value, grads = jax.value_and_grad(whole)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    f = run(text)
    state, expected = (params, opt_state), (params, opt_state)
    for _ in range(2):
        *state, value = f(*state, x, y)
        *expected, wanted = plain(*expected)
        assert_close(jax.block_until_ready((state, value)), (expected, wanted))


# ------------------------------------------------------------------------------- the prose


def gathered(x):
    return x - lax.pmean(x, "i")


def uses_a_name_of_a_helper(x):
    return gathered(x) + lax.psum(x, 'i')  # fmt: skip


def test_helpers_that_are_not_used_leave_their_names():
    x = normal(8, 3)
    text = check(uses_a_name_of_a_helper, ["i", ...], ["i", ...], {}, (x,), 2 * x.mean(0) * 3.5 + x)
    assert "def gathered(x):" in text
    assert "What changed" not in text  # quotes are no change


def layers(params, x):
    for layer in params:
        x = jnp.tanh(lax.psum(x, "m") * layer["w"].sum() + layer["b"])
    return x


def test_specs_that_repeat_are_written_once():
    one, layer = {"w": normal(3, 8), "b": normal(8)}, {"w": [None, "m"], "b": ["m"]}
    x = normal(8, seed=1)
    expected = x
    for _ in range(12):
        expected = np.tanh(expected.sum() * one["w"].sum(0) + one["b"])
    text = check(layers, ([layer] * 12, ["m"]), ["m"], {"m": "x"}, ([one] * 12, x), expected)
    assert 'in_axes=([{"b": 0, "w": 1}] * 12, 0)' in text
    assert 'in_specs=([{"b": P("x"), "w": P(None, "x")}] * 12, P("x"))' in text


class Caller:
    """Its method calls xmap for another one, which is what is written."""

    def __init__(self, scale):
        self.scale = scale

    def own(self, x):
        return self.scale * x - lax.pmean(x, "i")

    def __call__(self, x):
        return xmap(self.own, ["i", ...], ["i", ...])(x)


def test_methods_that_call_xmap_stay_behind():
    x = normal(8, 3)
    text = check(Caller(2.0).own, ["i", ...], ["i", ...], {"i": "x"}, (x,), 2 * x - x.mean(0))
    assert "def own(self, x):" in text and "__call__" not in text


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weighted:
    weights: jax.Array
    bias: jax.Array


def of_a_layer(layer, pair, x):
    return lax.psum(layer.weights * x, "i") + layer.bias, State(layer.weights + pair.weights, pair.count)


@pytest.mark.parametrize("place", PLACES)
def test_arguments_of_classes_of_the_users(place):
    layer, pair, x = Weighted(normal(8, 3), normal(3)), State(normal(8, 3, seed=1), np.int32(4)), normal(8, 3, seed=2)
    axes = (Weighted(["i", ...], {}), State(["i", ...], {}), ["i", ...])
    args, out_axes = (layer, pair, x), ([...], State(["i", ...], []))
    text = source_of(of_a_layer, axes, out_axes, resources_of("i", place), args)
    total, state = run(text)(*args)
    assert_close(total, (layer.weights * x).sum(0) + layer.bias)
    assert_close(state.weights, layer.weights + pair.weights)
    assert state.count == 4 and "class Weighted" not in text


class Mode(enum.IntEnum):
    total, mean = 1, 2


class Kind(enum.Enum):
    total, mean = "a", "b"


@pytest.mark.parametrize("mode", [*Mode, *Kind], ids=str)
def test_members_of_enumerations_stay_what_they_are(mode):
    x, over = normal(8, 3), {"total": lax.psum, "mean": lax.pmean}
    expected = x.sum(0) if mode.name == "total" else x.mean(0)
    text = check(lambda v: over[mode.name](v, "i"), ["i", ...], [...], {"i": "x"}, (x,), expected)
    assert f"mode = {type(mode).__name__}.{mode.name}" in text


INF = float("inf")


@pytest.mark.parametrize(
    "value",
    [
        *(None, ..., True, -3, 2.5, -0.0, INF, -INF, float("nan"), complex(-0.0, -INF), (), (1,), [2.0, None], {}),
        *(
            "inf",
            "it's",
            'say "x"',
            "\\n'\"",
            ("it's 'x'", "nan"),
            {"inf": INF, 3: (-INF,)},
            frozenset({1}),
            slice(0, 3),
        ),
        *(np.float32(0.1), np.float64(-INF), np.int8(3), np.True_, np.complex64(1 - 0j), np.array([[INF], [-0.0]])),
        *(np.zeros((0, 2), np.int16), np.array([0.1, np.nan], jnp.bfloat16), np.array([1 - 0j, -2j])),
    ],
    ids=repr,
)
def test_a_literal_is_evaluated_to_the_same(value):
    written = words.array(value) if isinstance(value, np.ndarray) else words.literal(value)
    found = eval(written, {"np": np, "jnp": jnp})
    assert type(found) is type(value) and repr(found) == repr(value)


@pytest.mark.parametrize(
    "value", [object(), enum.IntEnum("Mode", "fast").fast, [np.ones(2)], collections.OrderedDict()]
)
def test_other_data_is_no_literal(value):
    with pytest.raises(words.NotWritable):
        words.literal(value)


# ----------------------------------------------------------------------------- ways to call


def of_the_sum(x, name):
    return lax.psum(x, name) * 2


by_call = jax.custom_vjp(of_the_sum, nondiff_argnums=(1,))
by_call.defvjp(lambda x, name: (of_the_sum(x, name), None), lambda name, _, ct: (2 * ct,))

CALLS = {
    "a method": (lambda x: x - x.max(axis="i"), lambda x: x - x.max(0)),
    "a method, by position": (lambda x: x - x.sum("i"), lambda x: x - x.sum(0)),
    "a star elsewhere": (lambda x: jnp.maximum(*[x, lax.psum(x, "i")]), lambda x: np.maximum(x, x.sum(0))),
    "an einsum of positions": (lambda x: jnp.einsum("a,b->a", x, lax.psum(x, "i")), lambda x: x * x.sum()),
    "a rule that is attached by calls": (lambda x: by_call(x, "i") * x, lambda x: 2 * x.sum(0) * x),
    "names in a list": (lambda x: jnp.sum(x, axis=["i"][0]) * x, lambda x: x.sum(0) * x),
    "specs in a list": (
        lambda x: xmap(lambda v, w: v * w, [["k"], [...]], ["k"])(x, x.sum()),
        lambda x: x * x.sum(1, keepdims=True),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CALLS)
def test_ways_to_call(name, place):
    body, oracle = CALLS[name]
    x = normal(8, 3)
    text = check(body, ["i", ...], ["i", ...], resources_of("i", place), (x,), oracle(x))
    weights = normal(8, 3, seed=1)
    slope = lambda g: jax.grad(lambda x: (weights * g(x)).sum())(x)
    np.testing.assert_allclose(jax.block_until_ready(slope(run(text))), slope(on_one(body)), rtol=1e-4, atol=1e-4)


def on_one(body):
    return xmap(body, ["i", ...], ["i", ...])


NOT_WRITTEN = {
    "a method with more": (lambda x: x - x.max(axis=("i", 0), keepdims=True)[0], "too many arguments of x.max"),
    "groups": (lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), "axis_index_groups"),
    "an option of a helper": (lambda x: jnp.max(x, axis="i", initial=0.0) - x, "the argument initial of jnp.max"),
    "sizes of an xmap inside": (
        lambda x: xmap(lambda v: v, ["k"], ["k"], axis_sizes={"k": 3})(x),
        "with other options",
    ),
    "axes of an xmap inside that are unknown": (
        lambda x, n="k": xmap(lambda v: v * 2, {x.ndim - 1: n}, {0: n})(x),
        "whose axes are not known",
    ),
    "ours": (lambda x: x * len(named_shape(x)), "a use of named_shape of xmap_compat"),
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_calls_that_are_not_written(name):
    body, why = NOT_WRITTEN[name]
    assert why in refused(body, ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 3),))


# --------------------------------------------------------- rules in what remat computes again


@jax.custom_vjp
def copied(x):
    return x


@jax.custom_vjp
def summed(x):
    return lax.psum(x, "i")


SCALE = jnp.array([1.0, 2.0, 3.0])


@jax.custom_vjp
def scaled(x):
    return x * SCALE


copied.defvjp(lambda x: (copied(x), None), lambda _, ct: (lax.psum(ct, "i"),))
summed.defvjp(lambda x: (summed(x), None), lambda _, ct: (ct,))
scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (lax.psum(ct * SCALE, "i"),))


def layer_of_copies(w, h):
    return jnp.tanh(copied(w) * h)


def layer_of_megatron(w, h):
    return summed(jnp.tanh(copied(h) * w))


def layer_of_constants(w, h):
    return jnp.sin(scaled(w * h))


def once(layer, w, x):
    return jax.checkpoint(layer)(w, x)


def in_a_row(layer, w, x):
    return jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x))


def in_a_scan(layer, w, x):
    return lax.scan(lambda h, _: (jax.checkpoint(layer)(w, h), None), x, None, length=2)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", [layer_of_copies, layer_of_megatron, layer_of_constants])
@pytest.mark.parametrize("applied", [once, in_a_row, in_a_scan])
def test_a_gradient_inside_of_rules_that_remat_computes_again(applied, layer):
    def body(w, x):
        return jax.grad(lambda w: (applied(layer, w, x) ** 2).sum())(w)

    w, x = normal(3), normal(4, 3)
    named = jax.vmap(body, (None, 0), axis_name="i")(w, x)  # without devices, on which it was differentiated
    check(body, ([...], ["i", ...]), ["i", ...], {"i": "x"}, (w, x), named, mesh=Mesh(grid(2), ("x",)))


def test_no_message_of_a_library_is_a_reason(monkeypatch):
    def fails(plan):
        raise ValueError("safe_zip() argument 1 has length 0")

    monkeypatch.setattr("xmap_compat.tools.source.program.rules_over", fails)
    reason = refused(named_mean, ["i", ...], ["i", ...], {}, (normal(4, 3),))
    assert "safe_zip" not in reason and "ValueError is the cause" in reason


def named_mean(x):
    return lax.pmean(x, "i")
