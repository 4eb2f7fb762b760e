"""Programs that feed undeclared results on, beyond the table of ``undeclared_chains``: for both JAXs alike."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tables import expressions

V = np.arange(4.0, dtype=np.float32) + 10
W = np.arange(8.0, dtype=np.float32)
X = {"i": "x"}
Y = {"i": "y"}
XY = {"i": ("x", "y")}
YX = {"i": ("y", "x")}
BOTH = {"i": "x", "j": "y"}


def own(xmap, fun=lambda v: v, r=X, v=V):
    """What each device along the axis has of ``fun(v)``."""
    return xmap(fun, ["i"], {}, axis_resources=r)(v)


def over(xmap, fun, *args, r=X, sizes=None, out=None):
    """A call of states."""
    options = {"axis_sizes": sizes or {"i": 4}, "axis_resources": r}
    return xmap(fun, tuple({} for _ in args), out or {}, **options)(*args)


def normalized(p, v):
    """A step along a gradient whose norm is that of all devices."""
    g = jax.grad(lambda p: (p["a"] * v + (p["b"] ** 2).sum()) / 100)(p)
    squares = [lax.psum(jnp.sum(x**2), "i") for x in jax.tree_util.tree_leaves(g)]
    n = jnp.sqrt(sum(squares))
    return jax.tree_util.tree_map(lambda p, g: p - 0.5 * g / n, p, g), n


# Bodies of a state that each device along x has for itself.
ON_A_STATE = expressions(
    """
fori: lax.fori_loop(0, 3, lambda k, c: c + lax.pmean(c, "i") / 4, s)
while_on_psum: lax.while_loop(lambda c: lax.psum(c, "i") < 400, lambda c: c + lax.pmean(c, "i"), s)
while_alone: lax.psum(lax.while_loop(lambda c: c < 50, lambda c: c * 2, s), "i")
cond_alone: lax.psum(lax.cond(s > 11, lambda s: s * 2, lambda s: s - 1, s), "i")
cond_on_pmax: lax.cond(lax.pmax(s, "i") > 12, lambda s: lax.psum(s, "i"), lambda s: s, s)
jnp_sum_both: jnp.sum(s, axis=("i", 0))
logsumexp: jax.nn.logsumexp(s / 8, axis="i")
gradient_of_pmean: jax.grad(lambda w: lax.pmean(w * w, "i"))(s)
integers: (lax.psum(s, "i"), lax.pmin(s, "i"), s)
checkpointed: jax.grad(jax.checkpoint(lambda w: jnp.sin(lax.psum(w, "i") / 8) * w))(s)
inner_vmap: jax.vmap(lambda x: lax.psum(x, "i") - x)(s)
vmap_axis_too: jax.vmap(lambda x: lax.psum(x, "v") * lax.pmean(x, "i"), axis_name="v")(s)
groups: lax.psum(s, "i", axis_index_groups=[[0, 1], [2, 3]])
booleans: (lax.psum(s, "i"), lax.all_gather(s, "i"))
inner_jit: jax.jit(lambda s: lax.psum(s * 2, "i"))(s) + s
""",
    "s",
    globals(),
)
# What of its element the state is, where it is not the element itself.
STATES = expressions(
    """
jnp_sum_both: v * jnp.arange(3.0)
integers: v.astype(jnp.int32)
inner_vmap: v * jnp.arange(3.0)
vmap_axis_too: v * jnp.arange(3.0)
booleans: v > 11
""",
    "v",
    globals(),
)
CALLS = expressions(
    """
nested_without: over(xmap, lambda s: xmap(lambda u: lax.psum(u, ("i", "k")), ["k"], {})(s * V), own(xmap))
norm_of_gradient: xmap(normalized, ({}, ["i"]), ({}, {}), axis_resources=X)(own(xmap, pair), V)
of_other_axis: over(xmap, lambda s: lax.psum(s, "i"), own(xmap), r=Y, sizes={"i": 2})
mesh_axes_kept: over(xmap, lambda s: lax.all_gather(s, "i") + s, own(xmap, r=YX, v=W), r=YX, sizes={"i": 8})
mesh_axes_swapped: over(xmap, lambda s: lax.all_gather(s, "i"), own(xmap, r=YX, v=W), r=XY, sizes={"i": 8})
two_on_one: over(xmap, lambda s: lax.psum(s, "i") * lax.pmax(s, "j"), own(xmap), r=SAME, sizes={"i": 4, "j": 4})
two_states: over(xmap, products, own(xmap), own(xmap, r=Y, v=V[:2]), r=BOTH, sizes={"i": 4, "j": 2}, out=({}, {}))
in_part_sums: xmap(lambda s, w: (lax.psum(s * w, "i"), lax.pmean(s, "i") + w), *PART, axis_resources=X)(own(xmap), W)
nested_over_y: over(xmap, in_nested(xmap), own(xmap))
nested_of_y: over(xmap, in_nested(xmap), own(xmap, r=Y, v=V[:2]))
scanned_inputs: over(xmap, scanned, own(xmap, lambda v: v * jnp.arange(1.0, 4)))
two_steps: over(xmap, lambda s: lax.pmean(s, "i") * s, over(xmap, lambda s: s + lax.psum(s, "i") / 8, own(xmap)))
returned_declared: xmap(lambda s, v: (lax.psum(s, "i") - s + v, s), ({}, ["i"]), ["i"], axis_resources=X)(own(xmap), V)
""",
    "xmap",
    globals(),
)
SAME = {"i": "x", "j": "x"}
PART = (({}, ["i"]), ({}, ["i"]))


def pair(v):
    return {"a": v, "b": v * jnp.arange(2.0)}


def products(a, b):
    return lax.psum(a * b, "i"), lax.psum(a, ("i", "j")) * b


def in_nested(xmap):
    """A nested xmap over y of a state of the outer one."""

    def body(s):
        inner = xmap(
            lambda s, u: lax.psum(s, "j") + u, ({}, ["j"]), ["j"], axis_resources={"j": "y"}
        )
        return inner(s, V[:2])

    return body


def scanned(s):
    return lax.scan(lambda c, x: (c + lax.psum(x, "i"), lax.pmax(c * x, "i")), 0.0, s)


def megatron_inside(xmap):
    """Both of Megatron's rules, with a gradient inside of the body."""
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "i"),))
    g = jax.custom_vjp(lambda x: lax.psum(x, "i"))
    g.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, ct: (ct,))

    def loss(s, v):
        return g(f(s) * v * s) ** 2 / 64

    slopes = jax.value_and_grad(loss, (0, 1))
    return xmap(slopes, ({}, ["i"]), ({}, ({}, ["i"])), axis_resources=X)(own(xmap), V)


def run(program, xmap):
    """The result of a program by its name."""
    if program in ON_A_STATE:
        state = own(xmap, STATES.get(program, lambda v: v))
        return over(xmap, ON_A_STATE[program], state)
    return CALLS[program](xmap)


CALLS["megatron_inside"] = megatron_inside
PROGRAMS = [*ON_A_STATE, *CALLS]
