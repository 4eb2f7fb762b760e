"""Control flow inside an xmapped body and around an xmapped function gives the positional result everywhere.

Every program runs under every placement of its axes on a 4x2 mesh and is compared with the same body under
``jax.vmap``, or with NumPy where the meaning itself is at stake.  Predicates that differ between elements
select; a ``while`` runs until every element is done.  Where such a predicate meets a collective a wrong program
does not fail but hangs, so those run in a subprocess with a time limit: ``python test_control_flow.py PLACEMENT...``.
"""

import functools
import os
import subprocess
import sys

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from named_arrays import by_model
from placements import IN_AXES, OUT_AXES, PLACEMENTS, arguments, around, mesh42, together, vmapped

from xmap_compat import SerialLoop, xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")

# name: (size of a, size of b, axis_resources)
LOOPED_PLACEMENTS = {
    "a:loop": (8, 4, {"a": SerialLoop(4)}),
    "a:x+loop,b:loop": (16, 4, {"a": ("x", SerialLoop(2)), "b": SerialLoop(2)}),
}


@functools.cache
def by_vmap(programs, a, b):
    return jax.jit(vmapped(together(programs)))(*arguments(a, b))


def xmapped(body, resources):
    return xmap(body, IN_AXES, OUT_AXES, axis_resources=resources)


assert_same = functools.partial(comparing.assert_same, tolerance=2e-4)


# ------------------------------------------------------------- programs without names


def scan_carry_becomes_mapped_late(x, u, w):
    """Each carry learns of the mapped axes one turn later than the one before."""

    def step(carry, t):
        p, q, r, count = carry
        return (t + w[0], p + q, q * u + r, count + 1), (p, r, count)

    return lax.scan(step, (0.0, 0.0, 0.0, 0), x)


def scan_backwards_and_unrolled(x, u, w):
    def step(carry, t):
        return (carry * 0.5 + t * u, carry)

    options = [{"reverse": True}, {"unroll": 2}, {"unroll": True}, {"reverse": True, "unroll": 3}]
    return [lax.scan(step, 1.0, x, **option) for option in options]


def scan_of_pytrees(x, u, w):
    def step(carry, slices):
        carry = {"sum": carry["sum"] + slices["x"], "pair": (carry["pair"][1], slices["w"] * u)}
        return carry, {"both": (carry["sum"], slices["w"]), "nothing": None}

    return lax.scan(step, {"sum": 0.0, "pair": (w[0], u)}, {"x": x, "w": w})


def scan_of_nothing(x, u, w):
    return lax.scan(lambda carry, t: (carry + t, carry), 0.0, x[:0])


def scan_of_other_dtypes(x, u, w):
    def step(carry, t):
        count, seen, half = carry
        return (count + (t > 0), seen | (t > 1), half + t.astype(jnp.float16)), jnp.int8(3) * (
            t > 0
        )

    return lax.scan(step, (jnp.int32(0), False, jnp.float16(0)), x)


def fori_loops(x, u, w):
    static = lax.fori_loop(0, 4, lambda i, carry: carry * u + i, x)
    traced = lax.fori_loop(0, jnp.int32(2 + (w[0] > 0)), lambda i, carry: carry * u + x[i], 0.0)
    empty = lax.fori_loop(5, 2, lambda i, carry: carry * u, x)
    unrolled = lax.fori_loop(0, 3, lambda i, carry: carry + x[i], 0.0, unroll=True)
    return static, traced, empty, unrolled


def while_whose_predicate_becomes_mapped(x, u, w):
    """In the first turn all elements agree; after it they do not."""

    def body(state):
        count, going = state
        return count + 1, (count < 1) | (going & (x[0] > 0) & (count < 4))

    return lax.while_loop(lambda state: state[1], body, (0, True))


def while_that_some_never_enter(x, u, w):
    return lax.while_loop(lambda v: (v > 0) & (v < 8), lambda v: v * 2, u), lax.while_loop(
        lambda v: v < 0, lambda v: v, 1.0
    )


def while_with_mapped_constants(x, u, w):
    return lax.while_loop(lambda v: v < jnp.abs(u) + 1, lambda v: v + jnp.abs(x[0]) + 0.1, 0.0)


def cond_on_what_all_share(x, u, w):
    def true(x, u):
        return {"out": x * u, "other": 1.0}

    def false(x, u):
        return {"out": jnp.cos(w), "other": 2.0}

    return [lax.cond(p, true, false, x, u) for p in (w[0] > 0, w[0] <= 0, True)]


def cond_on_what_differs(x, u, w):
    own = lax.cond(x[0] > 0, lambda v: v * u, lambda v: v - w, x)
    row = lax.cond(u > 0, lambda: x.sum(), lambda: 0.0)
    constants = lax.cond(u > 0, lambda: 1, lambda: 2)
    return own, row, constants


def switches(x, u, w):
    branches = [jnp.sin, lambda v: v * u, lambda v: v - w]
    shared = [lax.switch(k, branches, x) for k in (0, jnp.int32(w[0] > 0), 9, -3)]
    differing = [
        lax.switch((u * 2).astype(int), branches, x),
        lax.switch((x[0] * 4).astype(int), branches, x),
    ]
    return shared, differing


def maps(x, u, w):
    plain = lax.map(lambda t: t * u, x)
    pairs = lax.map(lambda t: (t[0] * t[1], t[0] + u), (x, w))
    batched = lax.map(lambda t: jnp.sin(t) * u, x, batch_size=2)
    return plain, pairs, batched


def associative_scans(x, u, w):
    plain = lax.associative_scan(jnp.add, x)
    backward = lax.associative_scan(jnp.maximum, x * u, reverse=True)

    def compose(f, g):
        return (f[0] * g[0], g[0] * f[1] + g[1])

    pair = lax.associative_scan(compose, (jnp.outer(x, w), jnp.outer(w, x)), axis=1)
    return plain, backward, pair


def vmapped_fori_loops(x, u, w):
    """A bound for each turn of a vmap is a predicate with a positional dimension; carries have others after it."""

    def count(n):
        return lax.fori_loop(0, n, lambda k, c: c + 1.0, 0.0)

    def powers(n):
        return lax.fori_loop(0, n, lambda k, c: c * u + x[:2], jnp.ones(2))

    return (
        jax.vmap(count)(jnp.arange(3)) * u,
        jax.vmap(powers, out_axes=1)(jnp.arange(3)),
        jax.vmap(powers)(jnp.array([2, 0])),
    )


def vmapped_while_whose_predicate_is_mapped_as_well(x, u, w):
    def loop(n):
        return lax.while_loop(
            lambda c: (c[0] < n * u) & (c[1] < 5), lambda c: (c[0] + 1, c[1] + 1), (x[0], 0)
        )

    return jax.vmap(loop)(jnp.arange(3.0))


def vmapped_while_in_vmapped_while(x, u, w):
    def outer(m):
        def inner(n, v):
            return lax.fori_loop(0, n + m, lambda k, c: c / 2 + jnp.abs(u), v)

        return lax.while_loop(
            lambda v: v.sum() < 4, lambda v: jax.vmap(inner)(jnp.arange(3), v) + 1, w
        )

    return jax.vmap(outer)(jnp.arange(2))


def loops_of_libraries(x, u, w):
    """Rejection sampling: a loop of JAX's own, until all are accepted."""

    def draw(k):
        return jax.random.poisson(jax.random.fold_in(jax.random.key(1), k), 12 + jnp.abs(u))

    return jax.vmap(draw)(jnp.arange(2))


LOCAL = {
    "scan": (
        scan_carry_becomes_mapped_late,
        scan_backwards_and_unrolled,
        scan_of_pytrees,
        scan_of_nothing,
        scan_of_other_dtypes,
    ),
    "loops": (
        fori_loops,
        while_whose_predicate_becomes_mapped,
        while_that_some_never_enter,
        while_with_mapped_constants,
        loops_of_libraries,
    ),
    "vmapped while": (
        vmapped_fori_loops,
        vmapped_while_whose_predicate_is_mapped_as_well,
        vmapped_while_in_vmapped_while,
    ),
    "others": (
        cond_on_what_all_share,
        cond_on_what_differs,
        switches,
        maps,
        associative_scans,
    ),
}


# ---------------------------------------------------- programs with collectives inside


def scan_carry_summed_in_every_turn(x, u, w):
    """The carry enters mapped and is whole after a turn: it must count as mapped throughout."""
    return lax.scan(lambda carry, t: (lax.pmean(carry, "a") * t, carry), u, w)


def scan_around_a_ring(x, u, w):
    """A sum over a by passing parts on to the neighbour."""
    size = lax.psum(1, "a")
    ring = [(k, (k + 1) % size) for k in range(size)]

    def step(carry, _):
        total, passing = carry
        passing = lax.ppermute(passing, "a", ring)
        return (total + passing, passing), None

    return lax.scan(step, (x, x), None, length=size - 1)[0][0]


def while_early_exit_on_a_residual(x, u, w):
    """Jacobi's method until the largest residual of all elements is small."""

    def step(state):
        v, _, count = state
        new = x + 0.4 * lax.pmean(v, "a") + 0.1 * lax.pmean(v, "b")
        return new, lax.pmax(jnp.abs(new - v).max(), ("a", "b")), count + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 30), step, (x, jnp.float32(1), 0))


def map_and_associative_scan_with_collectives(x, u, w):
    mapped = lax.map(lambda t: lax.psum(t, "a") * u, x)

    def combine(p, q):
        return p + q + 0.1 * lax.pmean(p * q, "a")

    return (
        mapped,
        lax.map(lambda t: lax.pmean(t, "b"), x, batch_size=2),
        lax.associative_scan(combine, x),
    )


NAMED = (
    scan_carry_summed_in_every_turn,
    scan_around_a_ring,
    map_and_associative_scan_with_collectives,
    while_early_exit_on_a_residual,
)


@pytest.mark.sampled
@pytest.mark.parametrize("placement", [*PLACEMENTS, *LOOPED_PLACEMENTS])
@pytest.mark.parametrize("family", LOCAL)
def test_control_flow_inside(family, placement):
    a, b, resources = (PLACEMENTS | LOOPED_PLACEMENTS)[placement]
    with mesh42():
        result = xmapped(together(LOCAL[family]), resources)(*arguments(a, b))
    assert_same(result, by_vmap(LOCAL[family], a, b))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_control_flow_with_collectives_inside(placement):
    a, b, resources = PLACEMENTS[placement]
    with mesh42():
        result = xmapped(together(NAMED), resources)(*arguments(a, b))
    assert_same(result, by_vmap(NAMED, a, b))


# -------------------------------------------------------- predicates that differ, with collectives


def _own_turns():
    return (lax.axis_index("a") + 2 * lax.axis_index("b")) % 4


def cond_sum_in_one_branch(x, u, w):
    return lax.cond(lax.axis_index("a") % 2 == 0, lambda v: lax.psum(v, "a"), lambda v: 2 * v, x)


def cond_differs_over_another_axis(x, u, w):
    return lax.cond(u > 0, lambda v: lax.psum(v, "b"), lambda v: v, x)


def switch_exchanges(x, u, w):
    size = lax.psum(1, "a")
    back = [(k, (k - 1) % size) for k in range(size)]
    branches = [
        lambda v: lax.ppermute(v, "a", back),
        lambda v: lax.all_gather(v, "b").sum(0),
        lambda v: v * lax.axis_index("a"),
    ]
    return lax.switch(lax.axis_index("b") - 1, branches, x)


def cond_hides_the_sum_deeply(x, u, w):
    """The collective is inside a scan in a remat in a jit in an inner cond on which all agree."""
    total = jax.jit(
        jax.checkpoint(lambda v: lax.scan(lambda c, t: (c + lax.psum(t, "b"), t), 0.0, v)[0])
    )

    def inner(v):
        return lax.cond(w[0] > -9, lambda v: total(v) + 0 * v, lambda v: v, v)

    return lax.cond(x[0] > 0, inner, lambda v: -v, x)


def while_sum_in_the_body(x, u, w):
    turns = _own_turns()

    def step(s):
        return (s[0] + 1, s[1] / 2 + lax.pmean(s[1], "a"))

    return lax.while_loop(lambda s: s[0] < turns, step, (0, x))


def while_sum_in_the_condition(x, u, w):
    """The condition sums over b and differs over a, and so does the carry."""
    return lax.while_loop(
        lambda v: lax.psum(v.sum(), "b") < 30.0, lambda v: v + jnp.abs(x) + 0.5, x
    )


def while_an_element_goes_on_again(x, u, w):
    """An element that is the largest stands still until another one is larger."""

    def going(s):
        return (s[0] < lax.pmax(s[0], "a")) & (s[1] < 10)

    return lax.while_loop(going, lambda s: (s[0] + 3, s[1] + 1), (u, 0))


def while_an_element_of_a_vmap_goes_on_again(x, u, w):
    """The same for each turn of a vmap, and with a sum that those who stand still take part in."""

    def loop(n):
        def going(s):
            return (s[0] < lax.pmax(s[0], "a") + n) & (s[1] < 6)

        return lax.while_loop(
            going, lambda s: (s[0] + 3, s[1] + 1, s[2] / 2 + lax.pmean(s[2], "b")), (u, 0, x)
        )

    return jax.vmap(loop)(jnp.array([0.0, -2.0]))


def while_then_a_sum(x, u, w):
    """Devices leave the loop at different times and meet only afterwards."""
    done = lax.while_loop(lambda v: v < 5, lambda v: v * 1.5 + 1, jnp.abs(x[0]))
    return done, lax.psum(done, "a"), lax.all_gather(done, "b")


def while_in_while_with_sums(x, u, w):
    def outer(state):
        count, v = state

        def inner(s):
            return (s[0] + 1, s[1] / 2 + lax.pmean(s[1], "b"))

        return count + 1, lax.while_loop(
            lambda s: s[0] < lax.axis_index("b") % 2 + 1, inner, (0, v)
        )[1]

    return lax.while_loop(lambda s: s[0] < lax.axis_index("a") % 3, outer, (0, x))


def while_in_cond(x, u, w):
    def loop(v):
        return lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 2 + lax.pmean(s[1], "a")), (0, v)
        )[1]

    return lax.cond(lax.axis_index("b") > 0, loop, lambda v: v * u, x)


# ------------------------------------------------------------- and differentiated from outside


def reverse(function):
    """The pullback of a function of x, u and w for fixed cotangents, with its value."""

    def pulled_back(*args):
        out, pullback = jax.vjp(function, *args)
        return out, pullback(
            jax.tree.map(lambda o: jnp.cos(jnp.arange(o.size, dtype=o.dtype).reshape(o.shape)), out)
        )

    return jax.jit(pulled_back)


def forward(function):
    """Value and derivative of a function of x, u and w in a fixed direction."""

    def direction(args):
        return tuple(jnp.cos(jnp.arange(v.size, dtype=v.dtype).reshape(v.shape)) for v in args)

    return jax.jit(lambda *args: jax.jvp(function, args, direction(args)))


def batched(function):
    return jax.jit(
        lambda x, u, w: jax.vmap(function, (0, None, 0))(
            jnp.stack([x, -x]), u, jnp.stack([w, 2 * w])
        )
    )


def sum_in_a_branch(x, u, w):
    return lax.cond(x[0] > 0, lambda v: lax.psum(v * w, "a"), lambda v: v * u, x)


def unmapped_weight_in_a_branch(x, u, w):
    """No collective is written here: the one for the gradient of w must not end up in the branch."""
    return lax.cond(lax.axis_index("a") % 2 == 0, lambda v: jnp.sin(v * w), lambda v: v, x)


def unmapped_weight_in_a_switch_in_a_scan(x, u, w):
    branches = [lambda c, t: c + w * t, lambda c, t: c * w, lambda c, t: c]
    return lax.scan(lambda c, t: (lax.switch(lax.axis_index("b") % 3, branches, c, t), c), w, x)[0]


def remat_in_a_branch(x, u, w):
    branch = jax.checkpoint(lambda v: jnp.sin(jnp.sin(v * w)) * u)
    return lax.cond(x[0] > 0, branch, lambda v: lax.pmean(v, "b"), x)


def sum_in_a_loop(x, u, w):
    turns = _own_turns()

    def step(s):
        return (s[0] + 1, s[1] / 2 + lax.pmean(s[1] * w, "a") * u)

    return lax.while_loop(lambda s: s[0] < turns, step, (0, x))[1]


def unmapped_weight_in_a_loop(x, u, w):
    turns = lax.axis_index("a") % 3
    return lax.while_loop(
        lambda s: s[0] < turns, lambda s: (s[0] + 1, jnp.sin(s[1] * w + x)), (0, w)
    )[1]


DIVERGENT = {
    "conds": (
        cond_sum_in_one_branch,
        cond_differs_over_another_axis,
        switch_exchanges,
        cond_hides_the_sum_deeply,
    ),
    "whiles": (
        while_sum_in_the_body,
        while_sum_in_the_condition,
        while_an_element_goes_on_again,
        while_an_element_of_a_vmap_goes_on_again,
        while_then_a_sum,
    ),
    "nested": (while_in_while_with_sums, while_in_cond),
}
DIVERGENT_DERIVATIVES = {
    "reverse": (
        reverse,
        (
            sum_in_a_branch,
            unmapped_weight_in_a_branch,
            unmapped_weight_in_a_switch_in_a_scan,
            remat_in_a_branch,
        ),
    ),
    "forward": (forward, (sum_in_a_loop, unmapped_weight_in_a_loop, unmapped_weight_in_a_branch)),
    "batched": (batched, (sum_in_a_branch, sum_in_a_loop)),
}


# Together, they hold what devices and elements of one device disagree about in every way.
FEW_PLACEMENTS = ("a:yx", "a:x,b:y")


AGREES = "every placement agrees"


def check_divergent_groups(placements):
    """Run every group under several placements; called in a process of its own."""
    for group in [*DIVERGENT, *DIVERGENT_DERIVATIVES]:
        transform, programs = DIVERGENT_DERIVATIVES.get(group) or (lambda f: f, DIVERGENT[group])
        xp = np if group in DIVERGENT else jnp
        modelled = {f.__name__: by_model(f, ("ab", "a", ""), "ab", xp) for f in programs}
        oracle = transform(lambda *args, fs=modelled: {name: f(*args) for name, f in fs.items()})
        for a, b, resources in map(PLACEMENTS.get, placements):
            print(group, resources, flush=True)
            with mesh42():
                result = jax.block_until_ready(
                    transform(xmapped(together(programs), resources))(*arguments(a, b))
                )
            expected = jax.tree.map(
                lambda r, e: np.asarray(e, r.dtype), result, oracle(*arguments(a, b))
            )
            assert_same(result, expected)
        print(f"{group}: {AGREES}", flush=True)


@functools.cache
def output_of_divergent_groups(placements):
    """What a process says that runs all of them, and why it ended."""
    command = [sys.executable, "-W", "error::UserWarning", os.path.abspath(__file__), *placements]
    helpers = os.path.join(os.path.dirname(os.path.dirname(__file__)), "helpers")
    path = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", ""), os.getcwd()])
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **output) as process:
        try:
            return process.communicate(timeout=230)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0] + "\nit hangs"


OTHER_PLACEMENTS = tuple(name for name in PLACEMENTS if name not in FEW_PLACEMENTS)


@pytest.mark.parametrize(
    "placements", [FEW_PLACEMENTS, pytest.param(OTHER_PLACEMENTS, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("group", [*DIVERGENT, *DIVERGENT_DERIVATIVES])
def test_predicates_that_differ_select_and_never_hang(group, placements):
    output = output_of_divergent_groups(placements)
    assert f"{group}: {AGREES}" in output.splitlines(), output


@pytest.mark.parametrize("resources", [{}, {"b": "y"}, {"b": ("x", "y")}], ids=str)
def test_a_loop_that_asks_an_axis_outside(resources):
    """The condition has a collective over an axis of the vmap, or the xmap, around the xmap."""
    a, b = 3, 8
    start = np.arange(a * b, dtype=np.float32).reshape(a, b) * 7 % 11

    def loop(v):
        def going(s):
            return (s[0] < lax.pmax(s[0], "a")) & (s[1] < 10)

        return lax.while_loop(going, lambda s: (s[0] + 3, s[1] + 1), (v, 0))[0]

    expected = by_model(loop, ("ab",), "ab")(start)
    inner = xmap(loop, ["b"], ["b"], axis_resources=resources)
    with mesh42():
        if not resources:  # a vmap's axis cannot be reached from a mesh
            np.testing.assert_array_equal(jax.vmap(inner, axis_name="a")(start), expected)
        np.testing.assert_array_equal(xmap(inner, ["a", ...], ["a", ...])(start), expected)


# -------------------------------------------------------------------------- rematerialization

POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "all but names": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
}


def layer(x, u, w):
    """A body whose intermediate results have names."""
    hidden = checkpoint_name(jnp.sin(jnp.outer(x, w) @ x), "hidden")
    other = checkpoint_name(jnp.tanh(lax.pmean(hidden, "a") + u), "other")
    return jnp.cos(other * hidden).sum()


def remat_layer(policy):
    return jax.checkpoint(layer, policy=policy, prevent_cse=policy is None)


def gradients(body, over):
    """Gradients of a body taken inside of it, and of the whole from outside."""
    inside = over(jax.grad(body, argnums=(0, 1, 2)))
    outside = jax.grad(lambda *args: over(body)(*args).sum(), argnums=(0, 1, 2))
    return lambda *args: (inside(*args), outside(*args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_remat_changes_no_gradient(placement):
    a, b, resources = PLACEMENTS[placement]
    expected = jax.jit(gradients(layer, vmapped))(*arguments(a, b))
    ours = {
        name: gradients(remat_layer(p), lambda body: xmapped(body, resources))
        for name, p in POLICIES.items()
    }
    with mesh42():
        result = jax.jit(lambda *args: {name: f(*args) for name, f in ours.items()})(
            *arguments(a, b)
        )
    assert_same(result, dict.fromkeys(POLICIES, expected))


def count(primitive, function, args):
    """How many equations of this primitive a function's program has, as it is printed."""
    return str(jax.make_jaxpr(function)(*args)).count(f" = {primitive} ")


@pytest.mark.sampled
@pytest.mark.parametrize("resources", [{}, {"a": "x", "b": "y"}], ids=str)
@pytest.mark.parametrize("policy", ["none", "everything", "nothing", "names", "all but names"])
def test_remat_policy_decides_what_is_computed_again(policy, resources):
    """The outer gradient computes sin and tanh as often as that of the vmapped function."""
    body, args = remat_layer(POLICIES[policy]), arguments(8, 4)
    with mesh42():
        ours, theirs = (
            jax.grad(lambda *args, f=f: f(*args).sum())
            for f in (xmapped(body, resources), vmapped(body))
        )
        for primitive in ("sin", "tanh"):
            assert count(primitive, ours, args) == count(primitive, theirs, args) > 0


# --------------------------------------------------------------- around an xmapped function


def mixing(x, u, w):
    """The body that outer control flow calls; it keeps the shape of x."""
    return jnp.tanh(x * w + u) + lax.pmean(x, "a") - lax.pmean(x[0], "b") * u


def scan_around(f, x, u, w):
    return lax.scan(lambda c, t: (f(c, u, w * t), c.sum()), x, w)


def grad_of_scan_around(f, x, u, w):
    def loss(x, u, w):
        return lax.scan(lambda c, t: (f(c, u * t, w), None), x, w)[0].sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, u, w)


def fori_around(f, x, u, w):
    return lax.fori_loop(0, jnp.int32(2 + (w[0] > 9)), lambda i, v: f(v, u + i, w), x)


def while_around(f, x, u, w):
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (f(s[0], u, w), s[1] + 1), (x, 0))


AROUND = (scan_around, grad_of_scan_around, fori_around, while_around)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_control_flow_around(placement):
    assert_same(*around(AROUND, mixing, placement))


# ------------------------------------------------------------ inside of the user's shard_map


def carry_that_starts_equal(v, w):
    """The predicate varies over both mesh axes of the shard_map, the counter over none at first."""
    return lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + w, c[1] + 1), (v, 0))


def carry_that_mixes(v, w):
    return lax.while_loop(lambda c: c[0] + w < 10, lambda c: (c[0] + 1, c[1] + v), (0.0, 0.0))


def carry_of_a_scan(v, w):
    return lax.scan(
        lambda c, _: ((c[0] + 1, c[1] + c[0] * v), c[1] * w), (0.0, 0.0), None, length=3
    )


def branches_of_other_things(v, w):
    return lax.cond(w > 1, lambda: (v, 1.0), lambda: (2.0, v * 2))


INSIDE_SHARD_MAP = [
    carry_that_starts_equal,
    carry_that_mixes,
    carry_of_a_scan,
    branches_of_other_things,
]


@pytest.mark.parametrize("body", INSIDE_SHARD_MAP)
def test_control_flow_of_an_xmap_inside_of_a_shard_map(body):
    """What carries and results vary over there no name tells; the oracle is the function of each element."""
    x, w = np.arange(8, dtype=np.float32), np.array([1, 2], np.float32)
    mapped = xmap(body, (["i"], []), ["i", ...])

    def on_device(x, w):
        return jax.tree.map(lambda a: a[None, None], mapped(x, w[0]))

    with mesh42() as mesh:
        split = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P("x"), P("y")), out_specs=P("x", "y")
        )(x, w)
    each = [[[body(v, one) for v in x[2 * k : 2 * k + 2]] for one in w] for k in range(4)]
    assert_same(
        split,
        jax.tree.map(
            lambda *leaves: np.reshape(np.stack(leaves), (4, 2, 2, *leaves[0].shape)),
            *(v for row in each for column in row for v in column),
        ),
    )


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    check_divergent_groups(sys.argv[1:])
