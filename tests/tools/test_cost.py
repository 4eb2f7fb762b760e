"""What a program costs: beside XLA's own analysis where that counts rightly, else beside sums by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from placements import shaped

from xmap_compat import Hardware, Link, Mesh, pdot, plan, xmap
from xmap_compat.tools.hardware import Rates


def cost_of(fun, *args):
    return plan(fun, *args).cost


FLOPS = {
    # a function, its arguments, and its operations by hand
    "product": (jnp.matmul, (shaped(4, 5), shaped(5, 6)), 2 * 4 * 5 * 6),
    "batch of products": (jnp.matmul, (shaped(3, 4, 5), shaped(3, 5, 6)), 3 * 2 * 4 * 5 * 6),
    "convolution": (
        lambda x, w: lax.conv(x, w, (1, 1), "VALID"),
        (shaped(2, 3, 10, 10), shaped(7, 3, 3, 3)),
        2 * (2 * 7 * 8 * 8) * 3 * 3 * 3,
    ),
    "elementwise": (lambda x: jnp.sin(x) * x + 1, (shaped(4, 5),), 3 * 20),
    "sum": (lambda x: x.sum(0), (shaped(4, 5),), 20 - 5),
    "moves only": (lambda x: x.T.reshape(5, 4)[::-1], (shaped(4, 5),), 0),
    "jitted": (lambda x: jax.jit(jnp.sin)(x), (shaped(6),), 6),
    "scan": (lambda x: lax.scan(lambda c, row: (c * 2 + row, None), x[0], x)[0], (shaped(7, 3),), 7 * 2 * 3),
    "scan in a scan": (
        lambda x: lax.fori_loop(0, 4, lambda _, c: lax.fori_loop(0, 5, lambda _, d: d @ d, c), x),
        (shaped(3, 3),),
        4 * 5 * (2 * 27),
    ),
    "dearest branch": (
        lambda i, x: lax.switch(i, [jnp.sin, lambda x: x @ x], x),
        (shaped(dtype=np.int32), shaped(4, 4)),
        128,
    ),
    "dead code": (lambda x: (x @ x, jnp.sin(x))[1], (shaped(4, 4),), 16),
}


@pytest.mark.parametrize("name", FLOPS)
def test_operations_are_those_by_hand(name):
    fun, args, expected = FLOPS[name]
    counted = cost_of(fun, *args).flops
    overhead = 40 if name in ("scan in a scan", "dearest branch", "scan") else 0  # the counters of loops, the index
    assert expected <= counted <= expected + overhead


def test_an_argument_that_nothing_needs_is_held_in_parts_too(mesh42):
    f = xmap(lambda v, w: v, (["i", ...], ["i", ...]), ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        assert cost_of(f, shaped(8, 3), shaped(8, 100)).memory == (2 * 8 * 3 + 8 * 100) * 4 // 4


def attention(q, k, v):
    return jnp.sum(jax.nn.softmax(q @ k.T / 4) @ v)


MATRICES = (shaped(64, 32), shaped(96, 32), shaped(96, 48))


def test_operations_are_those_that_xla_counts():
    """Programs without loops, for XLA counts what is in a loop once; it counts transcendental functions apart."""
    for fun in (attention, jax.grad(attention, argnums=(0, 1, 2))):
        xla = jax.jit(fun).lower(*MATRICES).compile().cost_analysis()
        theirs = xla["flops"] + xla.get("transcendentals", 0)
        assert cost_of(fun, *MATRICES).flops == pytest.approx(theirs, rel=0.05)


CONVOLUTIONS = {
    "padded": {"padding": "SAME"},
    "strided": {"padding": "SAME", "window_strides": (2, 3)},
    "filters apart": {"padding": "VALID", "rhs_dilation": (2, 3)},
    "transposed": {"padding": ((2, 1), (3, 2)), "lhs_dilation": (2, 3)},
    "both apart": {
        "padding": ((2, 1), (3, 2)),
        "lhs_dilation": (3, 2),
        "rhs_dilation": (2, 2),
        "window_strides": (2, 1),
    },
    "cropped": {"padding": ((-1, 0), (0, -2))},
    "in groups of features": {"padding": "SAME", "feature_group_count": 2},
    "in groups of the batch": {"padding": "SAME", "batch_group_count": 2},
    "features last": {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_operations_of_a_convolution_and_its_gradients_are_those_that_xla_counts(name):
    """Products with zeros of padding and dilation are none."""
    options = {"window_strides": (1, 1), **CONVOLUTIONS[name]}
    image, filters = (4, 4, 12, 11), (6, 4 // options.get("feature_group_count", 1), 3, 2)
    if "dimension_numbers" in options:
        image, filters = (4, 12, 11, 4), (3, 2, 4, 6)
    convolve = lambda x, w: lax.conv_general_dilated(x, w, **options)
    both = lambda x, w, ct: jax.vjp(convolve, x, w)[1](ct)
    args = shaped(*image), shaped(*filters)
    for fun, given in ((convolve, args), (both, (*args, jax.eval_shape(convolve, *args)))):
        assert cost_of(fun, *given).flops == jax.jit(fun).lower(*given).cost_analysis()["flops"]


def test_work_is_that_of_one_device(mesh42):
    f = lambda r: xmap(lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources=r)
    args = (shaped(16, 32), shaped(32, 8))
    with mesh42:
        flops = {
            case: cost_of(f(r), *args).flops
            for case, r in {"none": {}, "x": {"i": "x"}, "both": {"i": "x", "j": "y"}, "sum": {"k": ("x", "y")}}.items()
        }
    whole = 2 * 16 * 32 * 8
    assert flops == {"none": whole, "x": whole // 4, "both": whole // 8, "sum": whole // 8 + 16 * 8}


def test_what_is_done_outside_of_a_call_is_cut_as_its_results_are(mesh42):
    double = xmap(lambda v: v * 2, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        cost = cost_of(lambda v: jnp.sin(double(v)) + v, shaped(16, 8))
    assert cost.flops == 3 * 16 * 8 // 4
    assert cost.memory == 2 * 16 * 8 * 4 // 4


def test_a_while_loop_is_counted_as_one_turn_and_has_no_time():
    cost = plan(lambda x: lax.while_loop(lambda v: v[0, 0] > 0, lambda v: v @ v, x), shaped(8, 8)).cost_on(HARDWARE)
    assert cost.flops == pytest.approx(2 * 8**3, abs=2)
    assert (cost.seconds, cost.bound) == (None, None)


# ------------------------------------------------------------------------ bytes and memory


def test_bytes_are_those_of_fused_operations():
    n = 1000
    assert cost_of(lambda x: jnp.sin(x) * 2 + 1, shaped(n)).bytes_accessed == 2 * 4 * n
    assert cost_of(lambda x, y: jnp.sum(x * y), shaped(n), shaped(n)).bytes_accessed == 2 * 4 * n + 4
    assert cost_of(lambda a, b: jnp.sin(a @ b), shaped(8, 9), shaped(9, 7)).bytes_accessed == 4 * (72 + 63 + 56 * 3)
    assert cost_of(lambda x: lax.dynamic_slice(x, (2,), (3,)), shaped(n)).bytes_accessed == 2 * 3 * 4


def test_memory_is_arguments_results_and_what_is_alive_between():
    """Two products before a third: both are alive then, and the arguments and the result."""
    fun = lambda a, b: (a @ b) @ (b @ a)
    assert cost_of(fun, shaped(8, 8), shaped(8, 8)).memory == 5 * 8 * 8 * 4
    kept = lambda a: a @ a.T  # a.T is made for the product
    assert cost_of(kept, shaped(16, 4)).memory == (16 * 4 * 2 + 16 * 16) * 4
    one_after_the_other = lambda a: ((a @ a) @ a) @ a
    assert cost_of(one_after_the_other, shaped(8, 8)).memory == 3 * 8 * 8 * 4


SPLIT_EVENLY = {
    "one operation": lambda v: v * 2,
    "several": lambda v: jnp.sin(v) * v + 1,
    "nothing": lambda v: v,
    "a value of two uses": lambda v: jnp.sin(v) / (jnp.sin(v) @ jnp.sin(v)),
}


@pytest.mark.parametrize("name", SPLIT_EVENLY)
def test_a_device_writes_and_holds_its_part_of_what_one_device_would(name, mesh42):
    """Results that leave a call are written, under whatever name; so each of n devices has an n-th."""
    costs = []
    with mesh42:
        for resources in ({}, {"i": "x"}, {"i": ("x", "y")}):
            f = xmap(SPLIT_EVENLY[name], ["i", ...], ["i", ...], axis_resources=resources)
            costs.append(plan(f, shaped(16, 8)).cost)
    whole, *parts = [(cost.flops, cost.bytes_accessed, cost.memory) for cost in costs]
    assert parts == [tuple(n // devices for n in whole) for devices in (4, 8)]


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_what_a_call_returns_is_held_beside_its_arguments(resources, mesh42):
    """Programs of one operation, of which XLA's analysis has no temporaries of its own."""
    for body in (lambda v: (v * 2,), lambda v: (v, v.sum())):
        f = xmap(body, ["i", ...], (["i", ...], ["i"])[: len(body(np.ones(2)))], axis_resources=resources)
        with mesh42:
            found = plan(f, shaped(64, 32), compiled=True)
            assert plan(f, shaped(64, 32)).cost.memory == pytest.approx(found.cost.memory, rel=0.02)


@pytest.mark.parametrize("resources", [{}, {"batch": "x"}], ids=str)
def test_memory_is_near_to_that_of_xla(resources, mesh42):
    loss = xmap(
        lambda w, v, x: lax.pmean(jnp.sum(jnp.tanh(x @ w) @ v), "batch"),
        ([...], [...], ["batch", ...]),
        [...],
        axis_resources=resources,
    )
    step = lambda w, v, x: jax.tree.map(lambda p, g: p - g, (w, v), jax.grad(loss, argnums=(0, 1))(w, v, x))
    with mesh42:
        found = plan(step, shaped(64, 96), shaped(96, 8), shaped(128, 64), compiled=True)
        estimate = plan(step, shaped(64, 96), shaped(96, 8), shaped(128, 64)).cost.memory
    assert 0.6 < estimate / found.cost.memory < 1.5


# ---------------------------------------------------------------------------------- seconds

HARDWARE = Hardware("test", Rates(1e9, 1e8, wide=0.5), Link(1e6, latency=1e-3))


def test_seconds_are_bounds_of_what_takes_longest_and_of_all_together(mesh42):
    f = xmap(lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources={"k": "x"})
    with mesh42:
        found = plan(f, shaped(64, 256), shaped(256, 64))
    cost = found.cost_on(HARDWARE)
    product, others = 2 * 64 * 64 * 64, 64 * 64
    sent = 2 * 64 * 64 * 4 * 3 / 4
    parts = {
        "compute": product / 0.5e9,
        "memory": cost.bytes_accessed / 1e8,
        "communication": 1e-3 + sent / 1e6,
    }
    assert cost.flops == product + others
    assert cost.bytes_sent == {"x": sent}
    assert cost.seconds == pytest.approx((max(parts.values()), sum(parts.values())))
    assert cost.bound == max(parts, key=parts.get) == "communication"
    fast = Hardware("fast links", Rates(1e6, 1e12), Link(1e12))
    assert found.cost_on(fast).bound == "compute"
    slow_memory = Hardware("slow memory", Rates(1e15, 1e3), Link(1e12))
    assert found.cost_on(slow_memory).bound == "memory"
    assert re_time(found.cost_on(HARDWARE)) in str(with_hardware(found))


def re_time(cost):
    from xmap_compat.tools.text import show_seconds

    return f"time: between {show_seconds(cost.seconds[0])} and {show_seconds(cost.seconds[1])}"


def with_hardware(found):
    from xmap_compat.tools import report

    return "\n".join(report.cost_lines(found.cost_on(HARDWARE)))


def test_a_step_with_calls_on_two_meshes_has_a_price():
    """The second mesh has other axes, of the same devices."""
    devices = np.array(jax.devices()[:8])
    total = lambda axis: xmap(lambda v: lax.psum(v, "i"), ["i", ...], [...], axis_resources={"i": axis})

    def step(v):
        with Mesh(devices.reshape(4, 2), ("x", "y")):
            first = total("x")(v)
        with Mesh(devices.reshape(2, 4), ("p", "q")):
            return first + total("p")(v)

    cost = plan(step, shaped(8, 4)).cost_on(HARDWARE)
    sent = {"x": 2 * 16 * 3 // 4, "p": 2 * 16 // 2}
    assert cost.bytes_sent == sent
    assert cost.seconds[0] == pytest.approx(2e-3 + sum(sent.values()) / 1e6)
    links = dataclasses.replace(HARDWARE, links={"p": Link(1e3)})
    assert plan(step, shaped(8, 4)).cost_on(links).seconds[0] == pytest.approx(1e-3 + 24 / 1e6 + 16 / 1e3)


def test_a_shard_map_by_hand_is_priced_without_a_mesh_in_scope(mesh42):
    """It brings its mesh along."""
    by_hand = lambda v: jax.shard_map(lambda u: lax.psum(u, "x"), mesh=mesh42, in_specs=P("x"), out_specs=P())(v)
    for found in (plan(by_hand, shaped(64, 32)), plan(by_hand, shaped(64, 32), compiled=True)):
        assert (found.bytes_sent, found.mesh.axis_names) == (2 * 16 * 32 * 4 * 3 // 4, ("x", "y"))
        assert found.cost_on(HARDWARE).seconds[0] > 1e-3


def test_unknown_hardware_has_no_time(mesh42):
    f = xmap(lambda v: lax.psum(v, "i"), ["i"], [], axis_resources={"i": "x"})
    with mesh42:
        found = f.plan(shaped(8))
    assert (found.cost.seconds, found.cost.bound) == (None, None)
    assert found.cost.flops > 0 and found.cost.bytes_sent == {"x": 6}
    assert "time" not in str(found)
    assert found.transfers == found.collectives[0].transfers


def test_bytes_over_several_mesh_axes_have_a_tuple_for_a_key(mesh42):
    f = xmap(lambda v: lax.psum(v, "i"), ["i", ...], [...], axis_resources={"i": ("y", "x")})
    with mesh42:
        sent = f.plan(shaped(8, 4)).cost.bytes_sent
    assert {frozenset(axes): count for axes, count in sent.items()} == {frozenset("xy"): 2 * 16 * 7 // 8}
