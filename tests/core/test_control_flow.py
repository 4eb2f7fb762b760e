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
from tables import expressions

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


def scan_of_other_dtypes(x, u, w):
    def step(carry, t):
        count, seen, half = carry
        positive = t > 0
        carry = (count + positive, seen | (t > 1), half + t.astype(jnp.float16))
        return carry, jnp.int8(3) * positive

    return lax.scan(step, (jnp.int32(0), False, jnp.float16(0)), x, reverse=True, unroll=2)


def traced_bound(x, u, w):
    return lax.fori_loop(0, jnp.int32(2 + (w[0] > 0)), lambda i, carry: carry * u + x[i], 0.0)


def while_whose_predicate_becomes_mapped(x, u, w):
    """In the first turn all elements agree; after it they do not."""

    def body(state):
        count, going = state
        return count + 1, (count < 1) | (going & (x[0] > 0) & (count < 4))

    return lax.while_loop(lambda state: state[1], body, (0, True))


def cond_on_what_all_share(x, u, w):
    def true(x, u):
        return {"out": x * u, "other": 1.0}

    def false(x, u):
        return {"out": jnp.cos(w), "other": 2.0}

    return [lax.cond(p, true, false, x, u) for p in (w[0] > 0, w[0] <= 0, True)]


def switches(x, u, w):
    branches = [jnp.sin, lambda v: v * u, lambda v: v - w]
    indices = (0, jnp.int32(w[0] > 0), 9, -3, (u * 2).astype(int), (x[0] * 4).astype(int))
    return [lax.switch(k, branches, x) for k in indices]


def vmapped_fori_loops(x, u, w):
    """A bound for each turn of a vmap is a predicate with a positional dimension; carries have others after it."""

    def powers(n):
        return lax.fori_loop(0, n, lambda k, c: c * u + x[:2], jnp.ones(2))

    return jax.vmap(powers, out_axes=1)(jnp.arange(3))


def vmapped_while_in_vmapped_while(x, u, w):
    def outer(m):
        def inner(n, v):
            return lax.fori_loop(0, n + m, lambda k, c: c / 2 + jnp.abs(u), v)

        def step(v):
            return jax.vmap(inner)(jnp.arange(3), v) + 1

        return lax.while_loop(lambda v: v.sum() < 4, step, w)

    return jax.vmap(outer)(jnp.arange(2))


def loops_of_libraries(x, u, w):
    """Rejection sampling: a loop of JAX's own, until all are accepted."""

    def draw(k):
        return jax.random.poisson(jax.random.fold_in(jax.random.key(1), k), 12 + jnp.abs(u))

    return jax.vmap(draw)(jnp.arange(2))


SIMPLE = expressions(
    """
while that some never enter: lax.while_loop(lambda v: (v > 0) & (v < 8), lambda v: v * 2, u)
while that none enters: lax.while_loop(lambda v: v < 0, lambda v: v, 1.0)
while whose step replaces a mapped value: lax.while_loop(lambda s: s[1] < 3, lambda s: (2.0 * s[1], s[1] + 1), (u, 0))
while with mapped constants: lax.while_loop(lambda v: v < jnp.abs(u) + 1, lambda v: v + jnp.abs(x[0]) + 0.1, 0.0)
cond on a row: lax.cond(x[0] > 0, lambda v: v * u, lambda v: v - w, x)
cond without operands: lax.cond(u > 0, lambda: x.sum(), lambda: 0.0)
cond of constants: lax.cond(u > 0, lambda: 1, lambda: 2)
fori_loop: lax.fori_loop(0, 4, lambda i, carry: carry * u + i, x)
empty fori_loop: lax.fori_loop(5, 2, lambda i, carry: carry * u, x)
map: lax.map(lambda t: (t[0] * t[1], t[0] + u), (x, w))
map in batches: lax.map(lambda t: jnp.sin(t) * u, x, batch_size=2)
scan of nothing: lax.scan(lambda carry, t: (carry + t, carry), 0.0, x[:0])
associative_scan: lax.associative_scan(jnp.maximum, x * u, reverse=True)
""",
    "x, u, w",
    globals(),
)


def simple_programs(x, u, w):
    return {name: fun(x, u, w) for name, fun in SIMPLE.items()}


LOCAL = {
    "loops": (
        scan_carry_becomes_mapped_late,
        scan_of_other_dtypes,
        traced_bound,
        while_whose_predicate_becomes_mapped,
        loops_of_libraries,
    ),
    "vmapped while": (vmapped_fori_loops, vmapped_while_in_vmapped_while),
    "others": (cond_on_what_all_share, switches, simple_programs),
}


# ---------------------------------------------------- programs with collectives inside


def scan_carry_summed_in_every_turn(x, u, w):
    """The carry enters mapped and is whole after a turn: it must count as mapped throughout."""
    return lax.scan(lambda carry, t: (lax.pmean(carry, "a") * t, carry), u, w)


def while_early_exit_on_a_residual(x, u, w):
    """Jacobi's method until the largest residual of all elements is small."""

    def step(state):
        v, _, count = state
        new = x + 0.4 * lax.pmean(v, "a") + 0.1 * lax.pmean(v, "b")
        return new, lax.pmax(jnp.abs(new - v).max(), ("a", "b")), count + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 30), step, (x, jnp.float32(1), 0))


NAMED = (scan_carry_summed_in_every_turn, while_early_exit_on_a_residual)


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


def halved(over):
    """A step of a counter, and of a value that gets half of the mean over an axis."""

    def step(s):
        return s[0] + 1, s[1] / 2 + lax.pmean(s[1], over)

    return step


def halved_thrice(v):
    return lax.while_loop(lambda s: s[0] < 3, halved("a"), (0, v))[1]


def back_around(v):
    size = lax.psum(1, "a")
    return lax.ppermute(v, "a", [(k, (k - 1) % size) for k in range(size)])


def cond_hides_the_sum_deeply(x, u, w):
    """The collective is inside a scan in a remat in a jit in an inner cond on which all agree."""

    def total(v):
        return lax.scan(lambda c, t: (c + lax.psum(t, "b"), t), 0.0, v)[0]

    def inner(v):
        return lax.cond(
            w[0] > -9, lambda v: jax.jit(jax.checkpoint(total))(v) + 0 * v, lambda v: v, v
        )

    return lax.cond(x[0] > 0, inner, lambda v: -v, x)


def while_an_element_of_a_vmap_goes_on_again(x, u, w):
    """An element that is the largest stands still until another one is larger, and takes part in a sum."""

    def loop(n):
        def going(s):
            return (s[0] < lax.pmax(s[0], "a") + n) & (s[1] < 6)

        def step(s):
            return s[0] + 3, s[1] + 1, s[2] / 2 + lax.pmean(s[2], "b")

        return lax.while_loop(going, step, (u, 0, x))

    return jax.vmap(loop)(jnp.array([0.0, -2.0]))


def while_in_while_with_sums(x, u, w):
    def outer(state):
        count, v = state
        turns = lax.axis_index("b") % 2 + 1
        return count + 1, lax.while_loop(lambda s: s[0] < turns, halved("b"), (0, v))[1]

    return lax.while_loop(lambda s: s[0] < lax.axis_index("a") % 3, outer, (0, x))


def turns():
    """How many turns an element takes."""
    return (lax.axis_index("a") + 2 * lax.axis_index("b")) % 4


ONE_CONSTRUCT = expressions(
    """
sum in one branch: lax.cond(turns() % 2 == 0, lambda v: lax.psum(v, "a"), lambda v: 2 * v, x)
branches that differ over another axis: lax.cond(u > 0, lambda v: lax.psum(v, "b"), lambda v: v, x)
exchanges: lax.switch(turns(), [back_around, lambda v: lax.all_gather(v, "b").sum(0), jnp.sin], x)
sum in the body: lax.while_loop(lambda s: s[0] < turns(), halved("a"), (0, x))
sum in the condition: lax.while_loop(lambda v: lax.psum(v.sum(), "b") < 30.0, lambda v: v + jnp.abs(x) + 0.5, x)
sum after the loop: lax.psum(lax.while_loop(lambda v: v < 5, lambda v: v * 1.5 + 1, jnp.abs(x[0])), "a")
loop in a branch: lax.cond(turns() > 0, halved_thrice, jnp.sin, x)
""",
    "x, u, w",
    globals(),
)
for _name, _function in ONE_CONSTRUCT.items():
    _function.__name__ = _name


# ------------------------------------------------------------- and differentiated from outside


def waves(v):
    return jnp.cos(jnp.arange(v.size, dtype=v.dtype).reshape(v.shape))


def reverse(function):
    """The pullback of a function of x, u and w for fixed cotangents, with its value."""

    def pulled_back(*args):
        out, pullback = jax.vjp(function, *args)
        return out, pullback(jax.tree.map(waves, out))

    return jax.jit(pulled_back)


def forward(function):
    """Value and derivative of a function of x, u and w in a fixed direction."""
    return jax.jit(lambda *args: jax.jvp(function, args, tuple(map(waves, args))))


def batched(function):
    mapped = jax.vmap(function, (0, None, 0))
    return jax.jit(lambda x, u, w: mapped(jnp.stack([x, -x]), u, jnp.stack([w, 2 * w])))


def unmapped_weight_in_a_branch(x, u, w):
    """No collective is written here: the one for the gradient of w must not end up in the branch."""
    return lax.cond(lax.axis_index("a") % 2 == 0, lambda v: jnp.sin(v * w), lambda v: v, x)


def unmapped_weight_in_a_switch_in_a_scan(x, u, w):
    branches = [lambda c, t: c + w * t, lambda c, t: c * w, lambda c, t: c]
    return lax.scan(lambda c, t: (lax.switch(lax.axis_index("b") % 3, branches, c, t), c), w, x)[0]


def sum_in_a_branch_of_a_remat(x, u, w):
    branch = jax.checkpoint(lambda v: jnp.sin(lax.psum(v * w, "a")) * u)
    return lax.cond(x[0] > 0, branch, lambda v: lax.pmean(v, "b"), x)


def sum_in_a_loop(x, u, w):
    turns = (lax.axis_index("a") + lax.axis_index("b")) % 4

    def step(s):
        return s[0] + 1, s[1] / 2 + lax.pmean(s[1] * w, "a") * u

    return lax.while_loop(lambda s: s[0] < turns, step, (0, x))[1]


DIVERGENT = {
    "one construct": tuple(ONE_CONSTRUCT.values()),
    "several": (
        cond_hides_the_sum_deeply,
        while_an_element_of_a_vmap_goes_on_again,
        while_in_while_with_sums,
    ),
}
IN_REVERSE = (
    sum_in_a_branch_of_a_remat,
    unmapped_weight_in_a_branch,
    unmapped_weight_in_a_switch_in_a_scan,
)
DIVERGENT_DERIVATIVES = {
    "reverse": (reverse, IN_REVERSE),
    "forward": (forward, (sum_in_a_loop, unmapped_weight_in_a_branch)),
    "batched": (batched, (sum_in_a_loop,)),
}


# Together, they hold what devices and elements of one device disagree about in every way.
FEW_PLACEMENTS = ("a:yx", "a:x,b:y")


AGREES = "every placement agrees"


def check_divergent_groups(placements):
    """Run every group under several placements; called in a process of its own."""
    for group in [*DIVERGENT, *DIVERGENT_DERIVATIVES]:
        xp = np if group in DIVERGENT else jnp
        transform, programs = DIVERGENT_DERIVATIVES.get(group) or (lambda f: f, DIVERGENT[group])
        modelled = {f.__name__: by_model(f, ("ab", "a", ""), "ab", xp) for f in programs}
        oracle = transform(lambda *args, fs=modelled: {name: f(*args) for name, f in fs.items()})
        for a, b, resources in map(PLACEMENTS.get, placements):
            print(group, resources, flush=True)
            args = arguments(a, b)
            mapped = transform(xmapped(together(programs), resources))
            with mesh42():
                result = jax.block_until_ready(mapped(*args))
            assert_same(result, jax.tree.map(as_dtype_of, result, oracle(*args)))
        print(f"{group}: {AGREES}", flush=True)


def as_dtype_of(result, expected):
    return np.asarray(expected, result.dtype)


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

POLICIES = expressions(
    """
none: None
everything: jax.checkpoint_policies.everything_saveable
nothing: jax.checkpoint_policies.nothing_saveable
names: jax.checkpoint_policies.save_only_these_names("hidden")
all but names: jax.checkpoint_policies.save_anything_except_these_names("hidden")
""",
    "",
    globals(),
)


def layer(x, u, w):
    """A body whose intermediate results have names."""
    hidden = checkpoint_name(jnp.sin(jnp.outer(x, w) @ x), "hidden")
    other = checkpoint_name(jnp.tanh(lax.pmean(hidden, "a") + u), "other")
    return jnp.cos(other * hidden).sum()


def slope(mapped):
    return jax.grad(lambda *args: mapped(*args).sum(), argnums=(0, 1, 2))


def count(primitive, function, args):
    """How many equations of this primitive a function's program has, as it is printed."""
    return str(jax.make_jaxpr(function)(*args)).count(f" = {primitive} ")


@pytest.mark.sampled
@pytest.mark.parametrize("resources", [{}, {"a": "x", "b": "y"}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_policy_decides_what_is_computed_again(policy, resources):
    """The gradient computes sin and tanh as often as that of the vmapped function, and is the same."""
    body = jax.checkpoint(layer, policy=POLICIES[policy](), prevent_cse=policy == "none")
    args = arguments(8, 4)
    ours = slope(xmapped(body, resources))
    theirs = slope(vmapped(body))
    with mesh42():
        for primitive in ("sin", "tanh"):
            assert count(primitive, ours, args) == count(primitive, theirs, args) > 0
        assert_same(jax.jit(ours)(*args), jax.jit(theirs)(*args))


# --------------------------------------------------------------- around an xmapped function


def mixing(x, u, w):
    """The body that outer control flow calls; it keeps the shape of x."""
    return jnp.tanh(x * w + u) + lax.pmean(x, "a") - lax.pmean(x[0], "b") * u


def grad_of_scan_around(f, x, u, w):
    def step(c, t):
        return f(c, u * t, w), None

    def loss(x, u, w):
        return lax.scan(step, x, w)[0].sum()

    return jax.grad(loss, argnums=(0, 1, 2))(x, u, w)


def while_around(f, x, u, w):
    def step(s):
        return f(s[0], u, w), s[1] + 1

    return lax.while_loop(lambda s: s[1] < 3, step, (x, 0))


AROUND = (grad_of_scan_around, while_around)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_control_flow_around(placement):
    assert_same(*around(AROUND, mixing, placement))


# ------------------------------------------------------------ inside of the user's shard_map


CARRIES = expressions(
    """
a loop: lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + w, c[1] + 1), (start, 0 * start))
a scan: lax.scan(lambda c, _: (c + v * w, c * w), start, None, length=3)
branches: lax.cond(w > 1, lambda: (start, v * w), lambda: (start + 2, v * w))
""",
    "start, v, w",
    globals(),
)


@pytest.mark.parametrize("name", CARRIES)
def test_control_flow_of_an_xmap_inside_of_a_shard_map(name):
    """As in plain JAX, a carry varies over the mesh axes of the shard_map from the start."""
    x = np.arange(8, dtype=np.float32)
    w = np.array([1, 2], np.float32)
    body = CARRIES[name]

    def run(varying):
        def on_device(x, w):
            start = 0.0
            if varying:
                start = 0 * x[0] * w[0]

            def named(v, w):
                return body(v + start if varying else start, v, w)

            results = xmap(named, (["i"], []), ["i", ...])(x, w[0])
            return jax.tree.map(lambda a: a[None, None], results)

        specs = {"in_specs": (P("x"), P("y")), "out_specs": P("x", "y")}
        with mesh42() as mesh:
            return jax.shard_map(on_device, mesh=mesh, **specs)(x, w)

    of_elements = jax.vmap(lambda v, w: body(v, v, w), (0, None))
    of_columns = jax.vmap(of_elements, (None, 0))
    pairs = jax.vmap(of_columns, (0, None))
    assert_same(run(varying=True), pairs(x.reshape(4, 2), w))
    if name != "branches":
        with pytest.raises(TypeError) as raised:
            run(varying=False)
        assert "start a loop from values that vary over the same" in raised.value.__notes__[0]


def test_a_shard_map_in_a_body_without_resources_is_that_of_each_element():
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    with mesh42() as mesh:
        specs = {"mesh": mesh, "in_specs": P("x"), "out_specs": P()}
        summed = jax.shard_map(lambda u: lax.psum(u, "x"), **specs)
        actual = xmap(summed, ["i", ...], ["i", ...])(x)
    np.testing.assert_array_equal(actual, x.reshape(3, 4, 2).sum(1))


@pytest.mark.parametrize("unroll", [1, 4])
def test_a_scan_is_unrolled_as_it_says(unroll):
    def powers(v):
        return lax.scan(lambda c, t: (c * t, c), v, jnp.arange(4.0), unroll=unroll)[1]

    texts = [
        f.lower(np.ones(8)).as_text()
        for f in (xmap(powers, ["i"], ["i", ...]), jax.jit(jax.vmap(powers)))
    ]
    assert ["stablehlo.while" in text for text in texts] == [unroll == 1] * 2


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    check_divergent_groups(sys.argv[1:])
