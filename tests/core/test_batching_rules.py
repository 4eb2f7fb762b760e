"""Batching rules of the user's, of primitives and of ``custom_vmap``: results are those of ``jax.vmap`` under every
placement.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import placements
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import hijax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from tables import expressions

from xmap_compat import SerialLoop, xmap

SPLIT = [{"i": "x"}, {"i": ("x", "y")}, {"i": "y", "j": "x"}, {"j": "x"}]
IN_PARTS = [*SPLIT, {"i": SerialLoop(2)}, {"i": "x", "j": SerialLoop(2)}]


def primitive(name, fun, rule=None, several=False):
    """A primitive that computes ``fun``; ``rule(bind, args, dims)`` is its batching rule."""
    made = Primitive(name)
    made.multiple_results = several

    def types(*avals, **params):
        out = jax.eval_shape(fun, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
        return jax.tree.map(lambda t: jax.core.ShapedArray(t.shape, t.dtype), out)

    made.def_impl(fun)
    made.def_abstract_eval(types)
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=several))
    if rule is not None:
        batching.primitive_batchers[made] = functools.partial(rule, made.bind)
    return made


def refuse(bind, args, dims):
    raise ValueError("this cannot be batched")


def front(args, dims):
    """The operands of a rule with what is mapped in front, broadcast to one size."""
    (size,) = {x.shape[d] for x, d in zip(args, dims) if d is not None}
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims)
    ]
    return moved


# ``v`` and ``w`` are numbers for one element; some are called with more dimensions by their own rules.
largest = primitive("largest", jnp.max, lambda bind, args, dims: (bind(args[0]), None))
add = primitive("add", jnp.max, lambda bind, args, dims: (bind(args[0]), None))
both = primitive(
    "both",
    lambda v, w: [v * w, jnp.max(v)],
    lambda bind, args, dims: (bind(*front(args, dims)), [0, None]),
    several=True,
)
doubled = primitive("doubled", lambda v: 2 * v, lambda bind, args, dims: (bind(*args), dims[0]))
single = primitive("single", lambda v: v + 1, refuse)
ruleless = primitive("ruleless", lambda v: 3 * v)


def select_when_mapped(bind, args, dims):
    """``v`` of a call that is not mapped; the larger of both of one that is."""
    if dims[0] is None:
        return bind(*args), None if dims[1] is None else refuse(bind, args, dims)
    v, w = front(args, dims)
    return jnp.maximum(v, w), 0


when_mapped = primitive("when_mapped", lambda v, w: v, select_when_mapped)


def function(fun, rule):
    made = custom_vmap(fun)
    made.def_vmap(rule)
    return made


def mapped(x, is_mapped, size):
    return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))


centred = function(lambda v: v, lambda size, _, v: (v - v.mean(0), True))
total = function(lambda v: v, lambda size, _, v: (v.sum(0), False))
sized = function(lambda v: v, lambda size, _, v: (v * size, True))
cumulated = function(
    lambda v, w: (v, v + w),
    lambda size, m, v, w: ((jnp.cumsum(mapped(v, m[0], size), 0), w), (True, m[1])),
)
asked = function(
    lambda v, w: v * w, lambda size, m, v, w: (v * w if all(m) else 5 * v.sum(), all(m))
)


def refusing_rule(size, is_mapped, v):
    raise ValueError("this cannot be batched")


refusing = function(lambda v: v, refusing_rule)

STEPS = expressions(
    """
largest: (v - largest.bind(v), w)
named add: (v * add.bind(w), w)
both: tuple(both.bind(v, w))
doubled: (doubled.bind(v), w)
single: (v, single.bind(w))
when mapped: (when_mapped.bind(v, w), w)
centred: (centred(v), w)
total: (v, total(w))
sized: (sized(v), sized(w))
cumulated: cumulated(v, w)
asked: (asked(v, w), w)
refusing: (v, refusing(w))
swap: (w, v)
sine: (jnp.sin(v), w)
""",
    "v, w",
    globals(),
)
AROUND = expressions(
    """
in place: step(v, w)
jit: jax.jit(step)(v, w)
scan: lax.scan(lambda c, _: (alike(step(*c), c), None), (v, w), None, 2)[0]
cond: lax.cond(v > 0.1, lambda c: alike(step(*c), c), lambda c: c, (v, w))
checkpoint: jax.checkpoint(step)(v, w)
""",
    "step, v, w",
    globals(),
)


def alike(values, like):
    return tuple(jnp.asarray(x, y.dtype) for x, y in zip(values, like))


def body_of(words):
    def body(v, w):
        for around, step in words:
            v, w = AROUND[around](STEPS[step], v, w)
        return v + 2 * w

    return body


def drawn(seed):
    rng = np.random.default_rng(seed)
    around = rng.choice(list(AROUND), 3, p=[0.6, 0.1, 0.1, 0.1, 0.1])
    return list(zip(around.tolist(), rng.choice(list(STEPS), 3).tolist(), strict=True)), rng


X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8,)).astype(np.float32)


def by_vmap(body):
    """The value of ``jax.vmap``, or the error of a rule."""
    try:
        return np.asarray(jax.jit(jax.vmap(jax.vmap(body, (0, None)), (0, 0)))(X, W))
    except ValueError as error:
        return str(error)


def by_xmap(body, resources):
    fun = xmap(body, (["i", "j"], ["i"]), ["i", "j"], axis_resources=resources)
    with placements.mesh42():
        return np.asarray(fun(X, W))


def check(seed):
    words, rng = drawn(seed)
    body = body_of(words)
    want = by_vmap(body)
    for resources in ({}, SPLIT[rng.integers(len(SPLIT))]):
        if isinstance(want, str):
            with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as raised:
                by_xmap(body, resources)
            assert want.splitlines()[0] in str(raised.value), resources
            continue
        found = by_xmap(body, resources)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4, err_msg=str(resources))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_programs(seed):
    check(seed)


ONE_AXIS_AT_A_TIME = 147


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(20, 300)} - {ONE_AXIS_AT_A_TIME}))
def test_more_drawn_programs(seed):
    check(seed)


def test_in_a_jit_jax_applies_a_refused_rule_for_one_axis_at_a_time():
    """So it says what the rule does for the inner axis alone; ours says what JAX says without the
    jit.
    """
    words, _ = drawn(ONE_AXIS_AT_A_TIME)
    assert by_vmap(body_of(words)) == "this cannot be batched"
    without_jit = [("in place" if around == "jit" else around, step) for around, step in words]
    said = by_vmap(body_of(without_jit))
    assert isinstance(said, str)
    for resources in ({}, *SPLIT):
        with pytest.raises(ValueError) as raised:
            by_xmap(body_of(words), resources)
        assert said.splitlines()[0] in str(raised.value)


@pytest.mark.parametrize("resources", [{}, *IN_PARTS], ids=str)
def test_a_primitive_without_a_rule_is_computed_for_each_element(resources):
    """JAX maps none of these."""
    found = by_xmap(lambda v, w: ruleless.bind(v) + ruleless.bind(w), resources)
    np.testing.assert_allclose(found, 3 * X + 3 * W[:, None], rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("resources", [{}, *SPLIT], ids=str)
@pytest.mark.parametrize("step", ["centred", "total", "sized", "cumulated"])
def test_rules_of_a_custom_vmap_get_whole_axes(step, resources):
    """Values and gradients."""

    def loss(mapped):
        return lambda x, w: jnp.sum(jnp.sin(mapped(x, w)))

    body = body_of([("in place", step), ("in place", "sine")])
    vmapped = jax.vmap(jax.vmap(body, (0, None)), (0, 0))
    fun = xmap(body, (["i", "j"], ["i"]), ["i", "j"], axis_resources=resources)
    with placements.mesh42():
        found = jax.value_and_grad(loss(fun), (0, 1))(X, W)
    want = jax.value_and_grad(loss(vmapped), (0, 1))(X, W)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("resources", [{"i": "x"}, {"i": "y", "j": "x"}], ids=str)
@pytest.mark.parametrize("step", ["largest", "named add", "both"])
def test_an_operation_that_combines_elements_gets_whole_axes(step, resources):
    """One with the name of an operation of JAX is still the user's."""
    body = body_of([("in place", step)])
    np.testing.assert_allclose(by_xmap(body, resources), by_vmap(body), rtol=1e-5)


def test_a_backward_rule_that_combines_what_a_loop_computes_in_parts_is_refused():
    f = jax.custom_vjp(lambda v: v)
    f.defvjp(lambda v: (v, v), lambda v, ct: (ct * centred(v),))
    fun = xmap(f, ["i"], ["i"], axis_resources={"i": SerialLoop(2)})
    with pytest.raises(RuntimeError, match="combines the elements of `i`, but axis_resources"):
        jax.grad(lambda w: fun(w).sum())(W)


class Counted:
    """How often a batching rule is traced."""

    def __init__(self):
        self.times = 0
        self.primitive = primitive("counted", jnp.sin, self.rule)

    def rule(self, bind, args, dims):
        self.times += 1
        return bind(*args), dims[0]


def test_a_rule_is_asked_once_for_each_equation():
    """And once more where it is used."""
    counted = Counted()
    with placements.mesh42():
        fun = jax.jit(xmap(counted.primitive.bind, ["i"], ["i"], axis_resources={"i": "x"}))
        fun.lower(W)
    assert counted.times == 2


def test_residuals_that_are_numbers_reach_a_backward_rule_as_numbers():
    """As under ``jit``: a rule may ask them in Python."""
    f = jax.custom_vjp(lambda v: 3 * v)
    f.defvjp(lambda v: (3 * v, (True, v, 3)), lambda kept, ct: (ct * kept[2] if kept[0] else ct,))
    with placements.mesh42():
        found = jax.grad(lambda w: xmap(f, ["i"], ["i"], axis_resources={"i": "x"})(w).sum())(W)
    np.testing.assert_array_equal(found, np.full(8, 3, np.float32))


@pytest.mark.parametrize("resources", [{}, *SPLIT], ids=str)
def test_branches_that_elements_take_differently_give_rules_what_vmap_gives_them(resources):
    """There all operands vary: a sum over the elements counts each of them."""

    def body(v, w):
        return lax.cond(v > 0, total, jnp.sin, w) + v

    np.testing.assert_allclose(by_xmap(body, resources), by_vmap(body), rtol=1e-4, atol=1e-5)


# ``HiPrim`` since 0.11.2.
Operation = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class TimesSine(Operation):
    """An operation with types, and with its batching and derivative rules."""

    def __init__(self, *types):
        self.in_avals = types
        self.out_aval = types[0]
        self.params = {}
        super().__init__()

    def expand(self, v, w):
        return v * jnp.sin(w)

    def batch_dim_rule(self, axis, dims):
        return 0

    def batch(self, axis, args, dims):
        return times_sine(*front(args, dims)), 0

    def jvp(self, primals, tangents):
        v, w = primals
        t, u = tangents
        return self(v, w), t * jnp.sin(w) + v * jnp.cos(w) * u


def times_sine(v, w):
    return TimesSine(jax.typeof(v), jax.typeof(w))(v, w)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("y", "x")}], ids=str)
def test_an_operation_of_hijax_has_its_values_and_derivatives(resources):
    v = np.linspace(0, 1, 8, dtype=np.float32)

    def body(v):
        return times_sine(v, lax.psum(v, "i"))

    with placements.mesh42():
        mapped = xmap(body, ["i"], ["i"], axis_resources=resources)
        found = jax.jvp(mapped, [v], [v])
    np.testing.assert_allclose(found[0], v * np.sin(v.sum()), rtol=1e-5)
    slopes = v * np.sin(v.sum()) + v * np.cos(v.sum()) * v.sum()
    np.testing.assert_allclose(found[1], slopes, rtol=1e-5)
