"""Programs that feed undeclared results on, beyond the table of ``undeclared_chains``: for both JAXs alike."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

V, W = np.arange(4.0, dtype=np.float32) + 10, np.arange(8.0, dtype=np.float32)
X, Y, XY, YX = {"i": "x"}, {"i": "y"}, {"i": ("x", "y")}, {"i": ("y", "x")}
B = {"i": "x", "j": "y"}
PROGRAMS = {}


def program(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


def own(xmap, fun=lambda v: v, r=X, v=V, names=("i",)):
    return xmap(fun, list(names), {}, axis_resources=r)(v)


def over(xmap, fun, *args, r=X, sizes=None, out=None, **o):
    return xmap(
        fun, tuple({} for _ in args), out or {}, axis_sizes=sizes or {"i": 4}, axis_resources=r, **o
    )(*args)


# Bodies of a state that each device along x has for itself, and what of its element the state is.
ON_A_STATE = {
    "fori": (lambda s: lax.fori_loop(0, 3, lambda k, c: c + lax.pmean(c, "i") / 4, s), None),
    "while_on_psum": (
        lambda s: lax.while_loop(
            lambda c: lax.psum(c, "i") < 400, lambda c: c + lax.pmean(c, "i"), s
        ),
        None,
    ),
    "while_alone": (
        lambda s: lax.psum(lax.while_loop(lambda c: c < 50, lambda c: c * 2, s), "i"),
        None,
    ),
    "cond_alone": (
        lambda s: lax.psum(lax.cond(s > 11, lambda s: s * 2, lambda s: s - 1, s), "i"),
        None,
    ),
    "cond_on_pmax": (
        lambda s: lax.cond(lax.pmax(s, "i") > 12, lambda s: lax.psum(s, "i"), lambda s: s, s),
        None,
    ),
    "jnp_sum_both": (lambda s: jnp.sum(s, axis=("i", 0)), lambda v: v * jnp.arange(3.0)),
    "logsumexp": (lambda s: jax.nn.logsumexp(s / 8, axis="i"), None),
    "gradient_of_pmean": (lambda s: jax.grad(lambda w: lax.pmean(w * w, "i"))(s), None),
    "integers": (lambda s: (lax.psum(s, "i"), lax.pmin(s, "i"), s), lambda v: v.astype(jnp.int32)),
    "checkpointed": (
        lambda s: jax.grad(jax.checkpoint(lambda w: jnp.sin(lax.psum(w, "i") / 8) * w))(s),
        None,
    ),
    "inner_vmap": (
        lambda s: jax.vmap(lambda x: lax.psum(x, "i") - x)(s),
        lambda v: v * jnp.arange(3.0),
    ),
    "vmap_axis_too": (
        lambda s: jax.vmap(lambda x: lax.psum(x, "v") * lax.pmean(x, "i"), axis_name="v")(s),
        lambda v: v * jnp.arange(3.0),
    ),
    "reversed_scan_grad": (
        lambda s: jax.grad(
            lambda w: lax.scan(
                lambda c, _: (jnp.sin(lax.pmean(c, "i")) * w, None), w, None, length=3
            )[0]
        )(s),
        None,
    ),
    "groups": (lambda s: lax.psum(s, "i", axis_index_groups=[[0, 1], [2, 3]]), None),
    "booleans": (lambda s: (lax.psum(s, "i"), lax.all_gather(s, "i")), lambda v: v > 11),
}
PROGRAMS |= {
    name: lambda xmap, body=body, of=of: over(xmap, body, own(xmap, of or (lambda v: v)))
    for name, (body, of) in ON_A_STATE.items()
}


@program
def nested_without(xmap):
    return over(
        xmap, lambda s: xmap(lambda u: lax.psum(u, ("i", "k")), ["k"], {})(s * V), own(xmap)
    )


@program
def inner_jit(xmap):
    f = jax.jit(lambda s: lax.psum(s * 2, "i"))
    return over(xmap, lambda s: f(s) + f(s + 1), own(xmap))


@program
def switch_clean(xmap):
    return over(
        xmap,
        lambda s, k: lax.switch(k, [lambda s: lax.psum(s, "i"), lambda s: lax.pmax(s, "i") + s], s),
        own(xmap),
        np.int32(1),
    )


@program
def megatron_inside(xmap):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "i"),))

    @jax.custom_vjp
    def g(x):
        return lax.psum(x, "i")

    g.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, c: (c,))

    def loss(s, v):
        return g(f(s) * v * s) ** 2 / 64

    return xmap(
        lambda s, v: jax.value_and_grad(loss, (0, 1))(s, v),
        ({}, ["i"]),
        ({}, ({}, ["i"])),
        axis_resources=X,
    )(own(xmap), V)


@program
def one_hot(xmap):
    return xmap(
        lambda s, w: lax.psum(jax.nn.one_hot(s, 4, axis="i") * w, "i"),
        ({}, ["i"]),
        {},
        axis_resources=X,
    )(own(xmap, lambda v: v.astype(jnp.int32) - 10), V)


@program
def norm_of_gradient(xmap):
    s = own(xmap, lambda v: {"a": v, "b": v * jnp.arange(2.0)})

    def step(p, v):
        g = jax.grad(lambda p: (p["a"] * v + (p["b"] ** 2).sum()) / 100)(p)
        n = jnp.sqrt(sum(lax.psum(jnp.sum(x**2), "i") for x in jax.tree_util.tree_leaves(g)))
        return jax.tree_util.tree_map(lambda p, g: p - 0.5 * g / n, p, g), n

    f = xmap(step, ({}, ["i"]), ({}, {}), axis_resources=X)
    s, n = f(s, V)
    s, m = f(s, V)
    return s, n, m


@program
def clean_state_clean(xmap):
    f = xmap(lambda s: lax.psum(s, "i"), {}, {}, axis_sizes={"i": 4}, axis_resources=X)
    return f(np.float32(3)), f(own(xmap)), f(np.float32(3)), f(jnp.float32(4)), f(f(own(xmap)))


@program
def of_other_axis(xmap):
    return over(xmap, lambda s: lax.psum(s, "i"), own(xmap), r=Y, sizes={"i": 2})


@program
def two_states(xmap):
    a, b = own(xmap), own(xmap, r=Y, v=V[:2])
    return over(
        xmap,
        lambda a, b: (lax.psum(a * b, "i"), lax.psum(a, ("i", "j")) * b, lax.psum(b, "j")),
        a,
        b,
        r=B,
        sizes={"i": 4, "j": 2},
        out=({}, {}, {}),
    )


@program
def mesh_axes_swapped(xmap):
    return over(
        xmap, lambda s: lax.all_gather(s, "i") + s, own(xmap, r=YX, v=W), r=YX, sizes={"i": 8}
    ), over(xmap, lambda s: lax.all_gather(s, "i"), own(xmap, r=YX, v=W), r=XY, sizes={"i": 8})


@program
def two_on_one(xmap):
    return over(
        xmap,
        lambda s: lax.psum(s, "i") * lax.pmax(s, "j"),
        own(xmap),
        r={"i": "x", "j": "x"},
        sizes={"i": 4, "j": 4},
    )


@program
def vectorized_beside(xmap):
    return xmap(
        lambda s, w: lax.psum(s * w, ("i", "k")),
        ({}, ["k"]),
        {},
        axis_sizes={"i": 4},
        axis_resources=X,
    )(own(xmap), V)


@program
def in_part_sums(xmap):
    return xmap(
        lambda s, w: (lax.psum(s * w, "i"), lax.pmax(s + w, "i"), lax.pmean(s, "i") + w),
        ({}, ["i"]),
        ({}, {}, ["i"]),
        axis_resources=X,
    )(own(xmap), W)


@program
def bfloat16(xmap):
    return over(
        xmap, lambda s: lax.pmax(s, "i"), own(xmap, lambda v: v.astype(jnp.bfloat16))
    ).astype(jnp.float32)


@program
def four_xmaps(xmap):
    s = own(xmap)
    s = over(xmap, lambda s: s + lax.psum(s, "i") / 8, s)
    s = xmap(lambda s, v: s * v, ({}, ["i"]), {}, axis_resources=X)(s, V)
    return over(
        xmap, lambda s: (lax.ppermute(s, "i", [(0, 3), (3, 0)]), lax.pmean(s, "i")), s, out=({}, {})
    )


@program
def nested_over_y(xmap):
    inner = lambda s: xmap(
        lambda s, u: lax.psum(s, "j") + u, ({}, ["j"]), ["j"], axis_resources={"j": "y"}
    )(s, V[:2])
    return (
        over(xmap, inner, own(xmap)),
        over(xmap, inner, own(xmap, r=Y, v=V[:2])),
        over(xmap, inner, own(xmap, r=XY, v=W)),
    )


@program
def random_state(xmap):
    s = own(xmap, lambda v: jax.random.PRNGKey(v.astype(jnp.int32)))
    with jax.threefry_partitionable(False):
        return over(xmap, lambda k: lax.psum(jax.random.uniform(k, (2,)), "i"), s)


@program
def scanned_inputs(xmap):
    s = own(xmap, lambda v: v * jnp.arange(1.0, 4))
    return over(
        xmap,
        lambda s: lax.scan(lambda c, x: (c + lax.psum(x, "i"), lax.pmax(c * x, "i")), 0.0, s),
        s,
    )


@program
def serial_loop_between(xmap):
    from jax.experimental.maps import SerialLoop

    s = own(xmap, lambda v: v * jnp.arange(1.0, 5))
    t = xmap(lambda u: u * 2, ["k"], ["k"], axis_resources={"k": SerialLoop(2)})(s)
    return over(xmap, lambda s, t: (lax.psum(s, "i"), lax.psum(t, "i")), s, t, out=({}, {}))


@program
def donated_twice(xmap):
    f = xmap(
        lambda s, v: (s + lax.pmean(s, "i") * v, lax.pmax(s, "i")),
        ({}, ["i"]),
        ({}, {}),
        axis_resources=X,
        donate_argnums=(0,),
    )
    s, m = f(own(xmap), V)
    s, m2 = f(s, V)
    return s, m, m2


@program
def returned_declared(xmap):
    return xmap(
        lambda s, v: (lax.psum(s, "i") - s + v, s), ({}, ["i"]), (["i"], ["i"]), axis_resources=X
    )(own(xmap), V)


@program
def named_over_y_varying_over_x(xmap):
    s = xmap(lambda v: v, ["i", "j"], ["j"], axis_resources=B)(W.reshape(4, 2))
    return xmap(
        lambda s: (lax.psum(s, "j"), lax.psum(s, "i"), lax.psum(s, ("i", "j"))),
        ["j"],
        ({}, ["j"], {}),
        axis_sizes={"i": 4},
        axis_resources=B,
    )(s)
