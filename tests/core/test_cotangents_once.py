"""Cotangents that exist once, for all elements: rules that say the same in other words, and an oracle.

A result that does not vary over an axis gets one cotangent.  The oracle applies a backward rule in NumPy's way, to all
elements at once, operation by operation, and divides that cotangent among them in three ways.  Where the three agree,
xmap must have that value; where they do not, it must have one value under all placements.
"""

import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core
from tables import expressions

from xmap_compat import Mesh, xmap

N = 8
X = np.arange(N, dtype=np.float32)
W = np.float32(3)
RING = [(k, (k + 1) % N) for k in range(N)]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ACROSS = [[k, k + 4] for k in range(4)]
PLACEMENTS = [{}, {"i": "x"}, {"i": "y"}, {"i": ("x", "y")}]


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def total_of_products(x, w):
    return lax.psum(x * w, "i")


def with_rule(function, backward):
    ruled = jax.custom_vjp(function)
    ruled.defvjp(lambda *args: (function(*args), args), backward)
    return ruled


# ------------------------------------------------------------- a psum in other words


def around_the_ring(v):
    def step(carry, _):
        total, moving = carry
        moving = lax.ppermute(moving, "i", RING)
        return (total + moving, moving), None

    return lax.scan(step, (v, v), None, N - 1)[0][0]


def scattered_and_gathered(v):
    pieces = lax.psum_scatter(jnp.broadcast_to(v, (N,)), "i")
    return lax.all_gather(pieces, "i")[2]


def by_groups(v):
    return lax.psum(lax.psum(v, "i", axis_index_groups=HALVES), "i", axis_index_groups=ACROSS)


SUMS = expressions(
    """
psum: lax.psum(v, "i")
pmean: lax.pmean(v, "i") * N
gathered: lax.all_gather(v, "i").sum()
gathered, by a dot: jnp.ones(N) @ lax.all_gather(v, "i")
exchanged: lax.all_to_all(jnp.broadcast_to(v, (N,)), "i", 0, 0).sum()
scattered: scattered_and_gathered(v)
permuted: lax.psum(lax.ppermute(v, "i", RING), "i")
by groups: by_groups(v)
a ring: around_the_ring(v)
mean of the sum: lax.pmean(lax.psum(v, "i"), "i")
sum of the sum: lax.psum(lax.psum(v, "i"), "i") / N
scaled first: lax.psum(v * 4.0, "i") / 4
of a sum of products: jax.jit(lambda a, b: lax.psum(a * b, "i"))(v, 2.0) / 2
""",
    "v",
    globals(),
)
AROUND = expressions(
    """
alone: total(v)
in a jit: jax.jit(total)(v)
in a scan: lax.scan(lambda c, _: (c + total(v), None), jnp.float32(0), None, 2)[0] / 2
of the carry of a scan: lax.scan(lambda c, _: (total(c), None), v, None, 1)[0]
in a cond: lax.cond(jnp.sum(v) < 1e9, total, jnp.zeros_like, v)
in both branches: lax.cond(jnp.sum(v) < 1e9, total, lambda u: total(2 * u), v)
""",
    "total, v",
    globals(),
)


def rules_of(total):
    """The two rules of ``psum(x * w, 'i')`` that the total makes."""
    return [
        lambda kept, ct: (total(ct) * kept[1], total(ct) * kept[0]),
        lambda kept, ct: (total(ct) * kept[1], lax.psum(ct * kept[0], "i")),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("around", AROUND)
def test_a_rule_may_sum_in_any_words(around, placement):
    """All sums, in one program: x and w have a positional dimension for them."""
    rules = []
    for total in SUMS.values():
        rules.extend(rules_of(functools.partial(AROUND[around], total)))
    functions = [with_rule(total_of_products, rule) for rule in rules]
    of_x, of_w = gradients(functions, placement)
    np.testing.assert_allclose(of_x, np.full((N, len(rules)), W), rtol=1e-6)
    np.testing.assert_allclose(of_w, np.full(len(rules), X.sum()), rtol=1e-6)


def gradients(functions, placement):
    """Of the sum of the functions' results, for x and w: those of each function by themselves."""

    def body(xs, ws):
        return sum(function(xs[k], ws[k]) for k, function in enumerate(functions))

    mapped = xmap(body, (["i", ...], [...]), [], axis_resources=placement)
    xs = np.repeat(X[:, None], len(functions), 1)
    with mesh():
        return jax.grad(mapped, argnums=(0, 1))(xs, np.full(len(functions), W))


# Functions of what is not mapped, their backward rules, and the gradients.
UNMAPPED = expressions(
    """
a sum, 1: lax.psum(w, "i")
identity, 1: lax.psum(w, "i")
a sum of a sum, 8: lax.psum(w, "i")
both, 9: lax.psum(w, "i") + w
both and summed, 9: lax.psum(w, "i") + w
""",
    "w",
    globals(),
)
UNMAPPED_BACKWARD = expressions(
    """
a sum: lax.psum(ct, "i")
identity: ct
a sum of a sum: lax.psum(lax.psum(ct, "i"), "i")
both: lax.psum(ct, "i") + ct
both and summed: lax.psum(lax.psum(ct, "i") + ct, "i")
""",
    "ct",
    globals(),
)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("example", UNMAPPED)
def test_an_operand_that_is_not_mapped(example, placement):
    rule, expected = example.split(", ")
    backward = UNMAPPED_BACKWARD[rule]
    function = with_rule(UNMAPPED[example], lambda _, ct: (backward(ct),))
    mapped = xmap(function, [], [], axis_sizes={"i": N}, axis_resources=placement)
    with mesh():
        found = jax.grad(mapped)(W)
    np.testing.assert_array_equal(found, int(expected))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_result_may_use_the_parts_and_the_whole_in_collectives(placement):
    """Of ``psum(x * w) + w ** 2``: 28 and 6."""

    def backward(kept, ct):
        x, w = kept
        total = lax.psum(ct, "i")
        return total * w, lax.psum(ct * x, "i") + 2 * w * total

    def forward(x, w):
        return lax.psum(x * w, "i") + w * w

    function = with_rule(forward, backward)
    mapped = xmap(function, (["i"], []), [], axis_resources=placement)
    with mesh():
        of_x, of_w = jax.grad(mapped, argnums=(0, 1))(X, W)
    np.testing.assert_allclose(of_x, np.full(N, W))
    np.testing.assert_allclose(of_w, 34)


# ------------------------------------------------------------------------ the oracle


class Known(NamedTuple):
    """A value of all elements.

    Attributes:
      data: with a first dimension for the elements, if ``kind`` is no "same".
      kind: "same" for all, it "varies", or exists "once": then data has the elements' parts.
      uses: how collectives used the cotangent: "not yet", by its "parts", as a "whole", or in "both" ways.
    """

    data: Any
    kind: str = "same"
    uses: frozenset[str] = frozenset()

    def whole(self):
        return self.data.sum(0) if self.kind == "once" else self.data


COLLECTIVE = ("psum", "all_gather", "ppermute", "all_to_all", "reduce_scatter", "axis_index")


def interpreted(jaxpr, consts, args):
    """The results of a rule, equation by equation."""
    env = dict(zip(jaxpr.constvars, map(Known, consts))) | dict(zip(jaxpr.invars, args))

    def read(atom):
        return Known(atom.val) if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, equation(eqn, list(map(read, eqn.invars)))))
    return list(map(read, jaxpr.outvars))


def equation(eqn, operands):
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit"):
        return interpreted(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands)
    if name == "cond":
        branch = params["branches"][int(operands[0].whole())]
        return interpreted(branch.jaxpr, branch.consts, operands[1:])
    uses = frozenset().union(*(v.uses for v in operands))
    varies = any(v.kind == "varies" for v in operands)
    if name in COLLECTIVE:
        if "not yet" in uses:
            use = "whole" if varies else "parts"
            if uses & {"parts", "both"} or (uses - {"not yet"} and not varies):
                use = "both"
            uses = uses - {"not yet"} | {use}
        if varies:
            operands = [
                v._replace(data=v.whole(), kind="same") if v.kind == "once" else v for v in operands
            ]
        equal = name in ("psum", "all_gather")
        equal |= name == "ppermute" and operands[0].kind == "same"  # equal elements change places
        operands = [for_each(v) for v in operands]
        if equal:
            return [Known(out[0], "same", uses) for out in mapped(eqn, operands)]
        return [Known(out, "varies", uses) for out in mapped(eqn, operands)]
    if varies:
        return [Known(out, "varies", uses) for out in mapped(eqn, operands)]
    if any(v.kind == "once" for v in operands):
        parts = [v._replace(kind="varies") if v.kind == "once" else v for v in operands]
        return [Known(out, "once", uses) for out in mapped(eqn, parts)]
    outs = eqn.primitive.bind(*(v.data for v in operands), **params)
    outs = outs if eqn.primitive.multiple_results else [outs]
    return [Known(out, "same", uses) for out in outs]


def for_each(value):
    """What each element puts into a collective: its part of what exists once."""
    data = np.asarray(value.data)
    if value.kind == "same":
        data = np.broadcast_to(data, (N, *data.shape))
    return value._replace(data=data, kind="varies")


def mapped(eqn, operands):
    """The results of an operation for each element, by ``jax.vmap``."""

    def bound(_, *xs):
        out = eqn.primitive.bind(*xs, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    in_axes = [0 if v.kind == "varies" else None for v in operands]
    over_all = jax.vmap(bound, in_axes=(0, *in_axes), axis_name="i")
    return over_all(np.arange(N), *(v.whole() for v in operands))


def by_the_definition(backward, division):
    """The cotangents of x and w, if the one cotangent 1 is divided so, and if there are others."""
    types = (jax.ShapeDtypeStruct((), np.float32),) * 3
    closed = jax.make_jaxpr(lambda x, w, ct: backward((x, w), ct), axis_env=[("i", N)])(*types)

    def results(kind):
        ct = Known(division, kind, frozenset({"not yet"} if kind == "once" else ()))
        return interpreted(closed.jaxpr, closed.consts, [Known(X, "varies"), Known(W), ct])

    found = []
    for once, own in zip(results("once"), results("varies")):
        both_ways = once.uses >= {"parts", "not yet"} or "both" in once.uses
        found.append(own if both_ways else once)
    of_x, of_w = found
    in_all = np.broadcast_to(of_x.whole(), (N,))
    return in_all, of_w.data.sum(0) if of_w.kind == "varies" else of_w.whole()


DIVISIONS = [np.eye(N)[0], np.eye(N)[-1], np.full(N, 1 / N)]


# -------------------------------------------------------------------- the generator

LINEAR = expressions(
    """
twice: 2 * term(ct, x, w)
times w: w * term(ct, x, w)
times x: x * term(ct, x, w)
less: term(ct, x, w) - ct
jitted: jax.jit(term)(ct, x, w)
in a cond: lax.cond(w < 5, term, lambda ct, x, w: 3 * term(ct, x, w), ct, x, w)
weighted: jnp.arange(3.0) @ (jnp.ones(3) * term(ct, x, w))
""",
    "term, ct, x, w",
    globals(),
)


def summed(total, term, ct, x, w):
    return total(term(ct, x, w))


# The oracle has no loops, and jax.vmap no groups.
ANY_SUM = {
    name: functools.partial(summed, total)
    for name, total in SUMS.items()
    if name not in ("a ring", "by groups")
}
PERMUTED = expressions(
    """
moved: lax.ppermute(term(ct, x, w), "i", RING)
one of all: lax.all_gather(term(ct, x, w), "i")[3]
moved and added: term(ct, x, w) + lax.ppermute(term(ct, x, w), "i", RING)
""",
    "term, ct, x, w",
    globals(),
)


def drawn_term(draw, depth):
    """A term that is linear in the cotangent, and its name."""
    if depth == 0:
        return "ct", lambda ct, x, w: ct
    if draw.random() < 0.2:
        left, f = drawn_term(draw, depth - 1)
        right, g = drawn_term(draw, depth - 2 if depth > 1 else 0)
        return f"({left} + {right})", lambda ct, x, w: f(ct, x, w) + g(ct, x, w)
    kind = draw.choices([LINEAR, ANY_SUM, PERMUTED], [5, 5, 1])[0]
    name = draw.choice(sorted(kind))
    inner, term = drawn_term(draw, depth - 1)
    return f"{name}({inner})", functools.partial(kind[name], term)


def drawn_rule(seed):
    draw = random.Random(seed)
    (of_x, f), (of_w, g) = (drawn_term(draw, draw.randint(1, 5)) for _ in range(2))
    return f"{of_x}; {of_w}", lambda kept, ct: (f(ct, *kept), g(ct, *kept))


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drawn_rules_have_the_values_on_which_three_divisions_agree(part):
    rules = [drawn_rule(seed) for seed in range(30 * part, 30 * part + 30)]
    functions = [with_rule(total_of_products, rule) for _, rule in rules]
    found = [gradients(functions, placement) for placement in PLACEMENTS]
    agreeing = 0
    for k, (name, rule) in enumerate(rules):
        expected = [by_the_definition(rule, division) for division in DIVISIONS]
        for which in range(2):
            values = [np.asarray(gradient[which])[..., k] for gradient in found]
            for value in values[1:]:
                np.testing.assert_allclose(value, values[0], rtol=1e-5, err_msg=name)
            first, last, equal = (division[which] for division in expected)
            if np.allclose(first, last) and np.allclose(first, equal):
                agreeing += 1
                np.testing.assert_allclose(values[0], first, rtol=1e-5, err_msg=name)
    assert agreeing > len(rules)
