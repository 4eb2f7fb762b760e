"""Branches that elements take differently are linear functions that JAX may transpose, wherever it does.

The oracle is the dense matrix of all elements along ``i``, which NumPy finds by applying the operator to a basis.
Derivatives that are taken in the body, of a branch with a collective, mean what ``jax.vmap`` says.
"""

import functools

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

from xmap_compat import Mesh, SerialLoop, xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")

assert_near = functools.partial(comparing.assert_close, rtol=1e-4, atol=1e-4)

SIZE = 8
P = np.array([1, -1, 2, -2, 3, -3, 4, -4], np.float32)
B, W = np.random.default_rng(0).normal(size=(2, 2, SIZE, 3)).astype(np.float32)  # [j, i, 3]


# Each structure is an operator of p and v, written once for JAX and for NumPy: ``choose(index, branches, v)`` takes a
# branch, ``total`` sums over the elements, ``repeat(step, v)`` applies a step twice.
def cond(ops, p, v):
    return ops.choose(ops.number(p > 0), [lambda v: 2 * v, lambda v: 3 * v + ops.total(v) / 16], v)


def switch(ops, p, v):
    branches = [
        lambda v: 2 * v,
        lambda v: 3 * v + ops.total(v) / 16,
        lambda v: 2.5 * v - ops.total(v / 32),
    ]
    return ops.choose(ops.number(p > 0) + ops.number(p > 2), branches, v)


def nested(ops, p, v):
    inner = [lambda v: 3 * v, lambda v: 2.5 * v + ops.total(v) / 16]
    return ops.choose(
        ops.number(p > 0),
        [lambda v: 2 * v, lambda v: ops.choose(ops.number(p > 2), inner, 1.1 * v)],
        v,
    )


def in_scan(ops, p, v):
    return ops.repeat(lambda v: cond(ops, p, v) / 1.5, v)


STRUCTURES = {f.__name__: f for f in (cond, switch, nested, in_scan)}


class InJax:
    """The meaning of an operator in a body."""

    def __init__(self, communicates):
        self.communicates = communicates

    def total(self, v):
        return lax.psum(v, "i") if self.communicates else v

    def choose(self, index, branches, v):
        return lax.switch(index, branches, v)

    def repeat(self, step, v):
        return lax.scan(lambda v, _: (step(v), None), v, None, length=2)[0]

    def number(self, x):
        return jnp.int32(x)


class InNumpy:
    """The same for all elements at once: p[i], v[i, k]."""

    def __init__(self, communicates):
        self.communicates = communicates

    def total(self, v):
        return np.broadcast_to(v.sum(0), v.shape) if self.communicates else v

    def choose(self, index, branches, v):
        return np.choose(index[:, None], [branch(v) for branch in branches])

    def repeat(self, step, v):
        return step(step(v))

    def number(self, x):
        return x.astype(int)


def by_iteration(matvec, b):
    """The solution of ``matvec(x) = b``, by a fixed number of steps that can be transposed."""
    return lax.scan(
        lambda x, _: (x + (b - matvec(x)) / 3.5, None), jnp.zeros_like(b), None, length=24
    )[0]


def solve(op, p, b):
    def solver(matvec, b):
        return by_iteration(matvec, b)

    return lax.custom_linear_solve(lambda v: op(p, v), b, solver, transpose_solve=solver)


def root(op, p, b):
    return lax.custom_root(
        lambda x: op(p, x) - b, b, lambda f, x: by_iteration(lambda x: f(x) + b, b), by_iteration
    )


def rule(op, p, b):
    f = jax.custom_jvp(lambda p, v: 2 * v)
    f.defjvp(lambda primals, tangents: (2 * primals[1], op(primals[0], tangents[1])))
    return f(p, b)


def called(op, p, b):
    return linear_call(lambda p, v: op(p, v), lambda p, ct: op(p, 3 * ct), p, b)


def pulled_inside(op, p, b):
    return jax.vjp(lambda v: op(p, v), b)[1](b)[0]


def transposed_inside(op, p, b):
    return jax.linear_transpose(lambda v: op(p, v), b)(b)[0]


# JAX (to 0.12) does not map linear_call: one with a collective in it is refused.
USES = {True: [solve, root, rule, pulled_inside, transposed_inside]}
USES[False] = [*USES[True], called]
PLACEMENTS = {
    "no resources": ((4, 2), {}),
    "one element a device": ((4, 2), {"i": ("x", "y")}),
    "several": ((4, 2), {"i": "x", "j": "y"}),
    "two mesh axes": ((2, 2), {"i": ("y", "x")}),
    "serial loop": ((4, 2), {"i": SerialLoop(4)}),
    "serial loop beside": ((4, 2), {"i": "x", "j": SerialLoop(2)}),
}
CELLS = [
    (c, name) for c in (False, True) for name in PLACEMENTS if not (c and name == "serial loop")
]


def derivatives(mapped, op, uses):
    """Values, cotangents and tangents of every use of an operator, and its transpose, taken from outside."""
    separate = mapped(
        lambda p, *bs: {use.__name__: use(op, p, b) for use, b in zip(uses, bs)}, len(uses)
    )

    def all_of(v):
        return [v] * len(uses)

    values, pull = jax.vjp(lambda *bs: separate(P, *bs), *all_of(B))
    cotangents = {
        use.__name__: ct for use, ct in zip(uses, pull({use.__name__: W for use in uses}))
    }
    tangents = jax.jvp(lambda *bs: separate(P, *bs), all_of(B), all_of(W))[1]
    return (
        values,
        cotangents,
        tangents,
        jax.linear_transpose(lambda b: mapped(op, 1)(P, b), B)(W)[0],
    )


def dense(structure, communicates):
    ops = InNumpy(communicates)
    return STRUCTURES[structure](ops, P.astype(np.float64), np.eye(SIZE))


def matrix(f):
    """The matrix of a linear function of one number for each element."""
    return np.stack(
        [f(np.repeat(e[:, None], 3, 1))[:, 0] for e in np.eye(SIZE, dtype=np.float32)], 1
    )


@functools.cache
def expected(structure, communicates):
    """What :func:`derivatives` returns.

    JAX traces the transpose of ``pulled_inside`` and the transposed solve in the body, where the transpose of a psum is
    a psum: these are what ``jax.vmap`` says.  (Its derivatives of a branch are not: it cuts them before a psum.)
    """
    m = dense(structure, communicates)
    op = functools.partial(STRUCTURES[structure], InJax(communicates))

    def vmapped(use):
        return lambda b: jax.vmap(lambda b: use(op, *b), axis_name="i")((P, b))

    def apply(m, v):
        return np.einsum("ik,jkc->jic", m, v)

    inverse, pulled = np.linalg.inv(m), matrix(vmapped(pulled_inside))
    pushed = {
        "solve": inverse,
        "root": inverse,
        "rule": m,
        "pulled_inside": pulled,
        "transposed_inside": pulled,
    }
    if not communicates:
        pushed["called"] = m
    tangents = {k: apply(v, W) for k, v in pushed.items()}
    cotangents = {k: apply(v.T, W) for k, v in pushed.items()}
    if communicates:
        cotangents["solve"] = np.stack([jax.vjp(vmapped(solve), b)[1](w)[0] for b, w in zip(B, W)])
    else:
        cotangents["called"] *= 3
    return (
        {k: apply(v, B) for k, v in pushed.items()} | {"rule": 2 * B},
        cotangents,
        tangents,
        apply(m.T, W),
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("communicates", "placement"), CELLS, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_branches_are_transposed(structure, communicates, placement):
    op = functools.partial(STRUCTURES[structure], InJax(communicates))
    shape, resources = PLACEMENTS[placement]
    elements = ["j", "i", ...]

    def mapped(body, count):
        return xmap(body, (["i"], *[elements] * count), elements, axis_resources=resources)

    with Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y")):
        found = jax.jit(lambda: derivatives(mapped, op, USES[communicates]))()
    assert_near(found, expected(structure, communicates))


KRYLOV = {"cg": cg, "bicgstab": bicgstab, "gmres": gmres}
METHODS = ["cg", "bicgstab", pytest.param("gmres", marks=pytest.mark.slow)]


@pytest.mark.sampled
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("method", METHODS)
def test_solvers_of_a_branch(method, placement):
    """A division that only one branch may compute stays out of the others' gradients."""

    def body(p, b):
        branches = [lambda v: 2 * v, lambda v: 4 * jnp.sqrt(p) * v / jnp.sqrt(p)]
        return KRYLOV[method](lambda v: lax.cond(p > 0, *branches[::-1], v), b)[0]

    shape, resources = PLACEMENTS[placement]
    with Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y")):
        f = xmap(body, (["i"], ["j", "i", ...]), ["j", "i", ...], axis_resources=resources)
        value, pull = jax.vjp(f, P, B)
        of_p, of_b = pull(W)
    factor = np.where(P > 0, 4, 2)[:, None]
    assert_near([value, of_b], [B / factor, W / factor])
    assert_near(of_p, 0 * P)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("x", "y")}], ids=str)
def test_a_linear_call_with_a_collective_is_refused(resources):
    def body(b):
        return linear_call(lambda _, v: lax.psum(v, "i"), lambda _, ct: ct, (), b)

    with (
        Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")),
        pytest.raises(NotImplementedError) as raised,
    ):
        xmap(body, ["i"], ["i"], axis_resources=resources)(P)
    assert "does not know the operation `linear_call`, which uses the named axes `i`" in str(
        raised.value
    )


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("x", "y")}], ids=str)
def test_a_rule_with_integer_results_in_a_linear_function(resources):
    f = jax.custom_jvp(lambda p, v: (p * v, jnp.int32(3)))
    f.defjvp(
        lambda primals, t: (
            f(*primals),
            (t[0] * primals[1] + primals[0] * t[1], np.zeros((), jax.dtypes.float0)),
        )
    )

    def branch(p, v):
        return lax.cond(p > 0, lambda v: f(p, v)[0] * f(p, v)[1], lambda v: v, v)

    mapped = xmap(branch, (["i"], ["j", "i", ...]), ["j", "i", ...], axis_resources=resources)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        found = jax.linear_transpose(lambda b: mapped(P, b), B)(W)[0]
    assert_near(found, np.where(P > 0, 3 * P, 1)[:, None] * W)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_a_hessian_of_a_symmetric_solve(resources):
    """The second derivative along b is zero, and JAX knows it: it must not meet a transposed operator."""

    def body(p, b):
        def solver(_, b):
            return b / jnp.where(p > 0, 3, 2)

        return lax.custom_linear_solve(
            lambda v: lax.cond(p > 0, lambda v: 3 * v, lambda v: 2 * v, v),
            b,
            solver,
            symmetric=True,
        )

    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        f = xmap(body, (["i"], ["j", "i", ...]), ["j", "i", ...], axis_resources=resources)
        slope = jax.grad(lambda p, b: (f(p, b) * W).sum(), 1)
        first, second = jax.jvp(slope, (P, B), (0 * P, W))
    assert_near([first, second], [W / np.where(P > 0, 3, 2)[:, None], 0 * W])
