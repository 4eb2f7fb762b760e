"""Effects run as often as in the element by element program, under every assignment, or are refused in words.

The oracle is a Python loop over the elements.
"""

import collections
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P
from placements import mesh42
from tables import expressions

from xmap_compat import SerialLoop, xmap

pytestmark = pytest.mark.usefixtures("end_a_hang")

X = np.arange(1, 9, dtype=np.float32)
Y = np.arange(3, dtype=np.float32)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
RESOURCES = {
    "none": {},
    "copies": {"i": "x"},
    "copies along the first axis": {"i": "y"},
    "one element a device": {"i": ("y", "x")},
    "loop": {"i": SerialLoop(2)},
    "copies and a loop": {"i": ("x", SerialLoop(2))},
    "on two axes": {"i": "y", "j": "x"},
}
Y4 = np.arange(4, dtype=np.float32)


class Host:
    """A function of Python that is told values, and answers with the number of the call."""

    def __init__(self):
        self.told = []

    def __call__(self, *values):
        self.told.append(tuple(float(v) for v in values))
        return np.float32(len(self.told))


def in_place(call):
    return call


def in_a_scan(call):
    return lambda *values: lax.scan(lambda c, _: (c, call(*values)), 0, None, length=2)[1].sum()


def in_a_jit(call):
    return jax.jit(call)


def in_a_loop(call):
    def looped(*values):
        def step(c):
            return c[0] + 1, c[1] + call(*values)

        return lax.while_loop(lambda c: c[0] < 2, step, (0, 0.0))[1]

    return looped


def in_a_branch(call):
    """All elements take the same."""
    return lambda *values: lax.cond(
        lax.axis_size("i") + jnp.sin(1.0) > 0, call, lambda *values: 0.0, *values
    )


def in_a_vmap(call):
    """Over an axis of two equal rows."""

    def mapped(*values):
        rows = jax.vmap(lambda k: call(*(v + 0 * k for v in values)))
        return rows(jnp.zeros(2)).sum()

    return mapped


def in_an_xmap(call):
    """Over an axis of two equal rows, which the outermost shard_map may split."""

    def inner(*values):
        return xmap(lambda k: call(*(v + 0 * k for v in values)), ["k"], ["k"])(jnp.zeros(2))

    return lambda *values: inner(*values).sum()


def in_a_backward_rule(call):
    """Called in the gradient that the body takes."""
    f = jax.custom_vjp(lambda *values: values[0])
    f.defvjp(
        lambda *values: (values[0], values), lambda values, ct: (ct * call(*values), *values[1:])
    )
    return lambda *values: jax.grad(f)(*values)


def in_a_custom_vmap(call):
    """With a batching rule that would make the calls itself, on each device."""
    f = jax.custom_batching.custom_vmap(call)

    @f.def_vmap
    def rule(size, mapped, *values):
        values = [
            v if m else jnp.broadcast_to(v, (size, *jnp.shape(v))) for v, m in zip(values, mapped)
        ]
        return lax.map(lambda given: call(*given), tuple(values)), True

    return f


CONSTRUCTS = [
    in_place,
    in_a_scan,
    in_a_jit,
    in_a_loop,
    in_a_branch,
    in_a_vmap,
    in_an_xmap,
    in_a_backward_rule,
]
CONSTRUCTS += [in_a_custom_vmap]
TIMES = dict.fromkeys((in_a_scan, in_a_loop, in_a_vmap, in_an_xmap), 2)
# What the callback is given: its values for the elements v of i and u of j.
GIVEN = expressions(
    """
both: (v, u)
one axis: (v,)
the other axis: (u,)
a constant: (jnp.float32(3),)
a sum: (lax.psum(v, "i"),)
nothing: ()
""",
    "v, u",
    globals(),
)
ELEMENTS = {
    "both": list(itertools.product(X, Y4)),
    "one axis": list(itertools.product(X)),
    "the other axis": list(itertools.product(Y4)),
    "a constant": [(3.0,)],
    "a sum": [(36.0,)],
    "nothing": [()],
}


@pytest.mark.sampled
@pytest.mark.parametrize("resources", RESOURCES.values(), ids=RESOURCES)
@pytest.mark.parametrize("construct", CONSTRUCTS)
@pytest.mark.parametrize("given", GIVEN)
def test_an_io_callback_runs_once_for_each_element_that_its_operands_vary_over(
    given, construct, resources
):
    if given == "nothing" and construct in (
        in_a_backward_rule,
        in_a_custom_vmap,
        in_a_vmap,
        in_an_xmap,
    ):
        pytest.skip("these need an operand")
    if given == "a sum" and "SerialLoop" in str(resources):
        pytest.skip("there is no sum over a loop")
    host = Host()
    elements = ELEMENTS[given]
    call = construct(lambda *values: io_callback(host, SCALAR, *values))

    def body(v, u):
        return call(*GIVEN[given](v, u))

    fun = xmap(body, (["i"], ["j"]), ["i", "j"], axis_resources=resources)
    with mesh42():
        out = np.asarray(fun(X, Y4))
        jax.effects_barrier()
    assert collections.Counter(host.told) == {e: TIMES.get(construct, 1) for e in elements}
    # Elements that share a call share its result.
    axes = {"one axis": 1, "the other axis": 0}.get(given, (0, 1))
    if given != "both":
        assert (out == (out[:, :1] if axes == 1 else out[:1] if axes == 0 else out[:1, :1])).all()


def test_a_batching_rule_that_calls_python_is_not_run_on_each_copy():
    host = Host()
    call = in_a_custom_vmap(lambda v: io_callback(host, SCALAR, v))
    with mesh42():
        xmap(call, ["i"], ["i"], axis_resources={"i": "x"})(X).block_until_ready()
        jax.effects_barrier()
    assert collections.Counter(host.told) == {(v,): 1 for v in X}


# A construct of values that vary over i, around a callback of what does not.
REPEATED = expressions(
    """
a loop: lax.fori_loop(0, 3, lambda k, c: c + call(jnp.float32(k)), v)
a scan: lax.scan(lambda c, k: (c + call(k), None), v, jnp.arange(3.0))[0]
a branch of all: lax.switch(1, [lambda v: v, lambda v: v + sum(map(call, jnp.arange(3.0)))], v)
""",
    "call, v",
    globals(),
)


@pytest.mark.parametrize(
    "resources", [{}, {"i": "x"}, {"i": SerialLoop(2)}, {"i": ("x", SerialLoop(2))}], ids=str
)
@pytest.mark.parametrize("around", REPEATED.values(), ids=REPEATED)
def test_a_callback_that_a_serial_loop_would_repeat_is_refused(around, resources):
    host = Host()

    def body(v):
        return around(lambda k: io_callback(host, SCALAR, k), v)

    fun = xmap(body, ["i"], ["i"], axis_resources=resources)
    with mesh42():
        if "SerialLoop" in str(resources):
            with pytest.raises(
                NotImplementedError, match=r"does not vary over \{'i'\}, but is in a loop or branch"
            ):
                fun(X)
            return
        fun(X).block_until_ready()
        jax.effects_barrier()
    assert collections.Counter(host.told) == {(0.0,): 1, (1.0,): 1, (2.0,): 1}


TYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "bool",
    "int8",
    "uint16",
    "int32",
    "complex64",
]


@pytest.mark.sampled
@pytest.mark.parametrize("resources", list(RESOURCES.values())[:6], ids=list(RESOURCES)[:6])
@pytest.mark.parametrize("dtype", TYPES)
def test_copies_receive_the_result_bit_for_bit(dtype, resources):
    """Negative zero, NaN with its payload, and the call's number."""
    dtype, numbers = jnp.dtype(dtype), itertools.count(1)

    def host(*_):
        bits = np.arange(4 * dtype.itemsize, dtype=np.uint8) + next(numbers)
        values = bits.view(dtype) if dtype != np.bool_ else bits % 2 == 0
        values[0] = -0.0 if dtype.kind != "b" else True
        if dtype.kind in "fcV":
            values[1] = np.nan
        made.append(values)
        return values

    def body(v):
        return [
            io_callback(host, jax.ShapeDtypeStruct((4,), dtype), *given) for given in [(v,), ()]
        ]

    made: list = []
    with mesh42():
        each, shared = xmap(body, ["i"], [["i", ...], ["i", ...]], axis_resources=resources)(X)
        each, shared = np.asarray(each), np.asarray(shared)
        jax.effects_barrier()
    assert len(made) == 9
    assert len({row.tobytes() for row in shared}) == 1
    assert {row.tobytes() for row in (*each, shared[0])} == {values.tobytes() for values in made}


LOOPS = [{"i": SerialLoop(2), "j": SerialLoop(4)}, {"j": SerialLoop(2)}, {"i": SerialLoop(8)}]


@pytest.mark.parametrize("resources", LOOPS, ids=str)
def test_with_several_loops_a_callback_runs_once_for_each_element(resources):
    hosts = of_v, of_both, of_nothing = Host(), Host(), Host()

    def body(u, v):
        values = (v, u * v, jnp.float32(3))
        return [io_callback(host, SCALAR, value) for host, value in zip(hosts, values)]

    jax.block_until_ready(
        xmap(body, (["i"], ["j"]), [["j"], ["i", "j"], []], axis_resources=resources)(X, Y4)
    )
    jax.effects_barrier()
    assert sorted(of_v.told) == [(v,) for v in Y4]
    assert sorted(of_both.told) == sorted((product,) for product in np.outer(X, Y4).ravel())
    assert of_nothing.told == [(3,)]


def turns(call):
    return lambda c, _: (lax.switch(jnp.int32(c) % 2, [call, jnp.sin], c), None)


def in_half(call, v):
    return lax.cond(v > 4, call, lambda v: v, v)


def looped(call, v):
    return lax.fori_loop(0, 2, lambda _, c: call(c), v)


APART = expressions(
    """
a branch: lax.cond(v > 4, call, lambda v: v, v)
a branch of what all share: lax.cond(v > 4, lambda: call(jnp.float32(1)), lambda: v)
a switch in a scan: lax.scan(turns(call), v, None, 2)[0]
a loop: lax.while_loop(lambda c: c > 0, lambda c: c - 1 + 0 * call(c), v)
a condition: lax.while_loop(lambda c: c + 0 * call(c) > 0, lambda c: c - 1, v)
a loop in a jit in a branch: lax.cond(v > 4, jax.jit(partial(looped, call)), lambda v: v, v)
a rule in a branch: jax.grad(partial(in_half, told_backward(call)))(v)
a jitted function that all call too: twice(jax.jit(call), v)
""",
    "call, v",
    globals(),
)


def twice(call, v):
    return call(v) + lax.cond(v > 4, call, lambda v: v, v)


def told_backward(call):
    f = jax.custom_vjp(lambda v: v)
    f.defvjp(lambda v: (v, v), lambda v, ct: (ct * call(v),))
    return f


@pytest.mark.parametrize("name", APART)
def test_an_io_callback_that_not_all_elements_reach_is_refused_under_every_assignment(name):
    host = Host()
    body = partial(APART[name], partial(io_callback, host, SCALAR))
    for resources in list(RESOURCES.values())[:6]:
        with (
            mesh42(),
            pytest.raises(
                NotImplementedError, match=r"Not all elements of {'i'} reach the io_callback at "
            ),
        ):
            xmap(body, ["i"], ["i"], axis_resources=resources)(X)
    assert host.told == []


@pytest.mark.parametrize("resources", list(RESOURCES.values())[:6], ids=list(RESOURCES)[:6])
def test_an_io_callback_in_an_operation_that_jax_evaluates_is_refused(resources):
    """Each device would call."""
    host = Host()

    def body(v):
        return linear_call(
            lambda w, u: u * io_callback(host, SCALAR, w), lambda w, ct: ct * w, v, v
        )

    with (
        mesh42(),
        pytest.raises(NotImplementedError, match="`linear_call`, which has an io_callback at "),
    ):
        xmap(body, ["i"], ["i"], axis_resources=resources)(X)
    assert host.told == []


def test_the_remedy_of_that_refusal():
    """The predicate goes to Python with the value."""
    host = Host()

    def choose(take, v):
        return host(v) if take else np.float32(0)

    def body(v):
        return io_callback(choose, SCALAR, v > 4, v)

    for resources in list(RESOURCES.values())[:6]:
        host.told.clear()
        with mesh42():
            out = xmap(body, ["i"], ["i"], axis_resources=resources)(X)
            jax.effects_barrier()
        assert sorted(host.told) == [(v,) for v in X if v > 4]
        np.testing.assert_array_equal(np.asarray(out) > 0, X > 4)


# ------------------------------------------------------------------------------------ checks


def positive(v):
    checkify.check(v > 4, "{v} is not above 4", v=v)
    return v


CHECKED = expressions(
    """
in place: positive(v)
in a branch: lax.cond(v > 4, positive, lambda v: v, v)
in a scan: lax.scan(lambda c, _: (positive(c), None), v, None, length=2)[0]
in a loop: lax.while_loop(lambda c: c > 5, lambda c: positive(c) - 1, v)
of an index: jnp.arange(7.0)[jnp.int32(v)]
of NaN in a branch: lax.cond(v > 4, lambda v: jnp.log(v - 4), lambda v: v, v)
""",
    "v",
    globals(),
)
FAILS = {"in place": X <= 4, "in a scan": X <= 4, "of an index": X > 6}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_in_the_body_is_that_of_each_element(name):
    """The oracle is checkify of one element; the error of the mapped call holds one for each."""
    if name == "in a loop" and jax.__version_info__ < (0, 12):
        pytest.skip("jax.vmap of it fails, too")
    checked = checkify.checkify(CHECKED[name], errors=checkify.all_checks)
    for resources in [{}, {"i": "x"}, {"i": ("x", "y")}, {"i": SerialLoop(2)}]:
        with mesh42():
            error, out = xmap(checked, ["i"], ["i", ...], axis_resources=resources)(X)
        failed = [int(k) for k in re.findall(r"at mapped index (\d+):", error.get() or "")]
        assert sorted(failed) == np.flatnonzero(FAILS.get(name, X < 0)).tolist()
        want = [checked(jnp.float32(v))[1] for v in X]
        np.testing.assert_allclose(out, want, rtol=1e-5)


def failing(v):
    """It fails each automatic check for some element."""
    return jnp.log(v - 4) + jnp.arange(7.0)[jnp.int32(v)] / (v - 2)


def by_a_rule(v):
    f = jax.custom_jvp(failing)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f(v)


SEEN = expressions(
    """
in place: failing(v)
in a scan: lax.scan(lambda c, _: (failing(c), None), v, None, length=2)[0]
in a loop: lax.while_loop(lambda c: c > 5, lambda c: failing(c) - c, v)
in a branch: lax.cond(v > 4, failing, lambda v: v, v)
in a rule: by_a_rule(v)
in a gradient: jax.grad(failing)(v)
nowhere: jnp.copy(v)
""",
    "v",
    globals(),
)
AUTOMATIC = ["index_checks", "nan_checks", "div_checks"]


def by_hand(body, resources):
    """The same without xmap, each device with one element."""
    if not resources:
        return jax.vmap(body, axis_name="i")
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(v):
        return jnp.reshape(body(v[0]), (1,))

    return jax.shard_map(one, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def seen_around(function, kind):
    """What automatic checks around a function say, and the results; only the kind of an error of JAX."""
    try:
        error, out = checkify.checkify(jax.jit(function), errors=getattr(checkify, kind))(X)
    except Exception as error:
        return "refused by JAX", error
    told = re.sub(r" at \S+:\d+|\n.*", "", error.get() or "nothing")
    return told.partition(":")[0] if "mapped index" in told else told[:30], np.asarray(out)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", AUTOMATIC)
@pytest.mark.parametrize("resources", [{}, {"i": ("x", "y")}], ids=str)
@pytest.mark.parametrize("name", SEEN)
def test_automatic_checks_around_see_what_they_see_of_the_program_by_hand(name, resources, kind):
    """JAX's own limits around ``shard_map`` are those of a call over mesh axes."""
    if name == "in a loop" and not resources:
        pytest.skip("checks around jax.vmap of it fail")
    mapped = xmap(SEEN[name], ["i"], ["i"], axis_resources=resources)
    with mesh42():
        told, out = seen_around(mapped, kind)
    told_by_hand, want = seen_around(by_hand(SEEN[name], resources), kind)
    assert told == told_by_hand
    if not isinstance(out, Exception):
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("name", list(CHECKED)[:4])
def test_checkify_around_a_check_in_the_body_is_refused_under_every_assignment(name):
    for resources in [{}, {"i": "x"}, {"i": ("x", "y")}, {"i": SerialLoop(2)}]:
        mapped = xmap(CHECKED[name], ["i"], ["i"], axis_resources=resources)
        with (
            mesh42(),
            pytest.raises(
                NotImplementedError, match=r"The check at .*xmap\(checkify\.checkify\(fun\)"
            ),
        ):
            checkify.checkify(mapped)(X)


# ------------------------------------------------------------------------------------ around

AROUND = expressions(
    """
grad: jax.grad(lambda w: f(X, w).sum())(2.0)
a jitted gradient: jax.jit(jax.value_and_grad(lambda w: f(X, w).sum()))(2.0)
linearize: jax.linearize(lambda w: f(X, w), 2.0)[1](1.0)
vmap: jax.vmap(lambda w: f(X, w))(jnp.arange(3.0))
scan: lax.scan(lambda c, _: (f(X, c).sum() / 9, None), 1.0, None, length=3)[0]
a branch: lax.cond(True, lambda: f(X, 1.0), lambda: X)
""",
    "f",
    globals(),
)
TIMES_AROUND = dict.fromkeys(AROUND, 1) | {"vmap": 3, "scan": 3}


@pytest.mark.sampled
@pytest.mark.parametrize("resources", list(RESOURCES.values())[:6], ids=list(RESOURCES)[:6])
@pytest.mark.parametrize("around", AROUND)
def test_io_callbacks_under_transformations_around(around, resources):
    use = AROUND[around]
    host = Host()

    def body(v, w):
        io_callback(host, SCALAR, lax.stop_gradient(v + 0 * w))
        return jnp.sin(v * w)

    with mesh42():
        found = use(xmap(body, (["i"], {}), ["i"], axis_resources=resources))
        jax.effects_barrier()
    assert collections.Counter(host.told) == {(v,): TIMES_AROUND[around] for v in X}
    expected = use(lambda v, w: jnp.sin(v * w))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
