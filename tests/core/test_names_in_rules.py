"""Names in custom rules: JAX traces a rule late, from within our ``shard_map``, where it sees mesh axes.

Each form of rule names a mesh axis, by each collective, under each placement, from outside and inside.  All must give
the error that a body gives.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call

from xmap_compat import Mesh, SerialLoop, xmap

X = np.arange(8, dtype=np.float32)
PLACEMENTS = [{}, {"i": "x"}, {"i": "y"}, {"i": ("x", "y")}, {"i": SerialLoop(2)}]

# What a rule does with the name of an axis.
NAMING = {
    "psum": lax.psum,
    "pmean": lax.pmean,
    "pmax": lax.pmax,
    "all_gather": lambda v, name: lax.all_gather(v, name).sum(),
    "ppermute": lambda v, name: lax.ppermute(v, name, [(0, 1)]),
    "axis_size": lambda v, name: v * lax.axis_size(name),
    "psum of 1": lambda v, name: v * lax.psum(1, name),
    "axis_index": lambda v, name: v * lax.axis_index(name),
    "jitted": lambda v, name: jax.jit(lambda u: u * lax.axis_size(name))(v),
    "in a scan": lambda v, name: lax.scan(lambda c, _: (lax.psum(c, name), None), v, None, 2)[0],
}


def backward(naming):
    function = jax.custom_vjp(lambda x: x * 1.0)
    function.defvjp(lambda x: (x, None), lambda _, ct: (naming(ct),))
    return function


def forward(naming):
    function = jax.custom_vjp(lambda x: x * 1.0)
    function.defvjp(lambda x: (naming(x), None), lambda _, ct: (ct,))
    return function


def forward_and_back(naming):
    function = jax.custom_vjp(lambda x: x * 1.0)
    function.defvjp(lambda x: (x, x), lambda x, ct: (ct * naming(x),), optimize_remat=True)
    return function


def tangent(naming):
    function = jax.custom_jvp(lambda x: x * 1.0)
    function.defjvp(lambda primals, tangents: (function(*primals), naming(tangents[0])))
    return function


def tangent_of_each(naming):
    function = jax.custom_jvp(lambda x: x * 1.0)
    function.defjvps(lambda t, _, x: naming(t))
    return function


def gradient(naming):
    return jax.custom_gradient(lambda x: (x * 1.0, lambda ct: (naming(ct),)))


def transpose(naming):
    return lambda x: linear_call(lambda _, v: v * 1.0, lambda _, ct: naming(ct), (), x)


def batching(naming):
    function = custom_vmap(lambda x: x * 1.0)
    function.def_vmap(lambda size, is_batched, x: (naming(x), True))
    return function


def root(naming):
    def solve(f, start):
        return naming(-f(start))

    return lambda x: lax.custom_root(lambda z: z - x, x * 0.0, solve, lambda f, b: b)


def tangent_of_root(naming):
    def solve(f, start):
        return -f(start)

    return lambda x: lax.custom_root(lambda z: z - x, x * 0.0, solve, lambda f, b: naming(b))


def solver(naming):
    def matrix(z):
        return z * 1.0

    def given(_, b):
        return b

    return lambda x: lax.custom_linear_solve(matrix, x, given, lambda _, b: naming(b))


def checkpointed(naming):
    return jax.checkpoint(backward(naming))


def in_a_loop(naming):
    function = backward(naming)
    return lambda x: lax.fori_loop(0, 2, lambda _, v: function(v), x)


def in_a_branch(naming):
    function = tangent(naming)
    return lambda x: lax.cond(x > 2, function, jnp.sin, x)


REVERSE = [backward, forward, forward_and_back, tangent, tangent_of_each, gradient, transpose]
REVERSE += [root, tangent_of_root, solver, checkpointed, in_a_loop, in_a_branch]
FORWARD = [tangent, tangent_of_each, root, tangent_of_root, in_a_branch, batching]
CASES = [(rule, "gradient") for rule in [*REVERSE, batching]]
CASES += [(rule, "tangent") for rule in FORWARD]
CASES += [(rule, "gradient inside") for rule in REVERSE]
CASES += [(batching, "value")]


def run(function, how, placement):
    mapped = xmap(function, ["i"], ["i"], axis_resources=placement)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        if how == "gradient":
            return jax.grad(lambda x: mapped(x).sum())(X)
        if how == "tangent":
            return jax.jvp(mapped, (X,), (X,))[1]
        if how == "gradient inside":

            def inside(x):
                return jax.grad(function)(x)

            return xmap(inside, ["i"], ["i"], axis_resources=placement)(X)
        return mapped(X)


@pytest.mark.sampled
@pytest.mark.parametrize("used", NAMING)
@pytest.mark.parametrize(("rule", "how"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_mesh_axis_in_a_rule_is_unbound(rule, how, used):
    function = rule(lambda v: NAMING[used](v, "x"))
    messages = set()
    for placement in PLACEMENTS:
        with pytest.raises(
            NameError, match=r"unbound axis name: x\. Named axes in scope: "
        ) as caught:
            run(function, how, placement)
        messages.add(str(caught.value))
        assert caught.traceback[-1].path.name == Path(__file__).name
    assert len(messages) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["value", "gradient", "tangent"])
@pytest.mark.parametrize("used", NAMING)
def test_the_rule_of_a_custom_vmap_names_no_axis(how, used):
    function = batching(lambda v: NAMING[used](v, "i"))
    for placement in PLACEMENTS:
        with pytest.raises(
            NameError, match="The rule of a custom_vmap may name no axes of the xmap"
        ):
            run(function, how, placement)


def test_the_transpose_of_a_linear_call_names_no_axis():
    function = transpose(lambda ct: lax.psum(ct, "i"))
    for placement in PLACEMENTS:
        with pytest.raises(NameError, match="linear_call may name no axes of the xmap"):
            run(function, "gradient", placement)


def six_times(u):
    """An xmap over the mesh axis that the rules above may not name."""
    mapped = xmap(lambda k: k * u, ["k"], ["k"], axis_resources={"k": "x"})
    return mapped(jnp.arange(4.0)).sum()


# JAX holds the rule of a root, and a linear_call, as one operation, and a branch keeps what it has computed.
NOT_CALLING = [(transpose, "gradient inside"), (in_a_branch, "gradient inside")]
NOT_CALLING += [(tangent_of_root, "gradient"), (tangent_of_root, "tangent")]
CALLING = [case for case in CASES if case not in NOT_CALLING]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("rule", "how"), CALLING, ids=lambda x: getattr(x, "__name__", x))
def test_a_rule_may_call_an_xmap_over_a_mesh_axis(rule, how):
    def called(u):
        return six_times(u) / 6

    function = rule(jax.vmap(called) if rule is batching else called)

    def nothing(u):
        return u

    expected = run(rule(nothing), how, {})
    for placement in [{}, {"i": "y"}]:
        np.testing.assert_allclose(run(function, how, placement), expected, rtol=1e-6)


def test_a_rule_cannot_reach_the_axis_of_a_vmap_around():
    """As a body: without mesh resources it can."""
    function = backward(lambda ct: lax.psum(ct, "o"))
    stacked = np.stack([X, X])

    def gradients(placement):
        mapped = xmap(function, ["i"], ["i"], axis_resources=placement)
        one = jax.grad(lambda x: mapped(x).sum())
        with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
            return jax.vmap(one, axis_name="o")(stacked)

    np.testing.assert_array_equal(gradients({}), np.full((2, 8), 2))
    for placement in PLACEMENTS[1:4]:
        with pytest.raises(NotImplementedError, match="`o` of a transformation around the xmap"):
            gradients(placement)


def test_axes_of_the_users_own_shard_map_are_no_secret():
    function = tangent(lambda t: t * lax.axis_size("x"))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    mapped = xmap(function, ["i"], ["i"], axis_resources={"i": "y"})

    def both(x):
        return jax.jvp(mapped, (x,), (x,))[1]

    with mesh:
        found = jax.shard_map(both, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))(X)
    np.testing.assert_array_equal(found, 4 * X)
