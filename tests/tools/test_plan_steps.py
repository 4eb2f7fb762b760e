"""The plan of a whole program: every transfer of its xmapped calls, forward and backward, as XLA compiles them.

The oracle is the optimized HLO: what each device sends over each mesh axis.
"""

import collections
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import replica_groups
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placements import shaped

from benchmarks import hlo_collectives
from xmap_compat import pdot, plan, xmap

SIZES = {"x": 4, "y": 2}
DTYPES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2}
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


# ---------------------------------------------------------------------------- the oracle


def axes_of(groups):
    """The mesh axes along which the devices of some group differ."""
    found = set()
    for group in groups:
        positions = [np.unravel_index(d, tuple(SIZES.values())) for d in group]
        for axis, along in zip(SIZES, zip(*positions)):
            if len(set(along)) > 1:
                found.add(axis)
    return tuple(axis for axis in SIZES if axis in found)


def bytes_of(types):
    total = 0
    for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", types):
        total += DTYPES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
    return total


def groups_of(kind, rest):
    if kind != "collective-permute":
        return replica_groups(rest)
    listed = re.search(r"source_target_pairs=\{(.*?)\}\}", rest + "}")[0]
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed)
    return [tuple(map(int, pair)) for pair in pairs]


def sent_by_hlo(text):
    """Bytes that each device sends by mesh axes, of a program without loops: each kind by its own formula."""
    sent = collections.Counter()
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\((.*)", line)
        if match:
            types, kind, rest = match.groups()
            groups = groups_of(kind, rest)
            n = len(next(iter(groups)))
            factors = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
            factors["collective-permute"] = 1
            sent[axes_of(groups)] += bytes_of(types) * factors.get(kind, (n - 1) / n)
    return {axes: count for axes, count in sent.items() if count}


def compiled_text(step, args):
    return jax.jit(step).lower(*args).compile().as_text()


def assert_as_compiled(found, text):
    """Equal for each mesh axis, but for the parts of bytes that are rounded up, once for each transfer."""
    ours = collections.Counter()
    for transfer in found.transfers:
        ours[tuple(a for a in SIZES if a in transfer.mesh_axes)] += transfer.total
    theirs = sent_by_hlo(text)
    assert set(ours) == set(theirs)
    for axes, count in ours.items():
        assert 0 <= count - theirs[axes] <= 2 * len(found.transfers)


# ------------------------------------------------------------------- programs and their plans


def network_loss(w1, w2, image, label):
    hidden = relu(pdot(image, w1, "inputs"))
    logits = pdot(hidden, w2, "hidden")
    predictions = logits - logsumexp(logits, "classes")
    targets = one_hot(label, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(targets * predictions, "classes"), "batch")


NETWORK_AXES = (["inputs", "hidden"], ["hidden", "classes"], ["batch", "inputs"], ["batch"])
NETWORK_ARGS = (shaped(32, 16), shaped(16, 8), shaped(24, 32), shaped(24, dtype=np.int32))


def network_step(resources):
    loss = xmap(network_loss, NETWORK_AXES, {}, axis_resources=resources)

    def step(w1, w2, image, label):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2, image, label)
        return jax.tree.map(lambda w, g: w - 0.1 * g, (w1, w2), gradients), value

    return step


ASSIGNMENTS = [
    {"batch": "x", "hidden": "y"},
    {"inputs": ("y", "x"), "classes": "x"},
    {"batch": "y", "inputs": "x", "classes": "x"},
    {"hidden": ("y", "x")},
    {"hidden": "x", "inputs": "y", "classes": "y"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resources", ASSIGNMENTS, ids=str)
def test_a_training_step_sends_what_it_is_compiled_to_send(resources, mesh42):
    step = network_step(resources)
    with mesh42:
        assert_as_compiled(plan(step, *NETWORK_ARGS), compiled_text(step, NETWORK_ARGS))


def rotated(v, by, n):
    return lax.ppermute(v, "i", [(k, (k + by) % n) for k in range(n)])


ROWS = ["i", ...]
NAMES = {
    "psum": lambda v: lax.psum(v, "i"),
    "pmax": lambda v: lax.pmax(v, "i"),
    "sin": jnp.sin,
    "rotated": rotated,
    "lax": lax,
    "jnp": jnp,
}
MOVES = """
x, y | (rotated(v, 1, 8) * v).sum() + 0 * v
x    | sin(rotated(v, 3, 8)) * v
y    | sin(lax.all_gather(v, 'i')).sum() * v
x    | lax.psum_scatter(v**2, 'i', tiled=True)
x    | pmax(v) * v
"""


def body_of(line):
    """What stands before the bar in a line of a table, and the function of ``v`` after it."""
    first, _, body = line.partition("|")
    return first.strip(), eval(f"lambda v: {body}", NAMES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", MOVES.strip().splitlines())
def test_a_gradient_of_each_collective_sends_what_it_is_compiled_to_send(line, mesh42):
    over, body = body_of(line)
    f = xmap(body, ROWS, ROWS, axis_resources={"i": tuple(over.split(", "))})
    step = lambda v, ct: jax.vjp(lambda v: f(v), v)[1](ct)
    with mesh42:
        args = (shaped(8, 16), jax.eval_shape(f, shaped(8, 16)))
        assert_as_compiled(plan(step, *args), compiled_text(step, args))


# Bodies with equal collectives, or some that only look equal; and the number of transfers.
REPEATED = """
1 | psum(v * 2) * sin(psum(v * 2))
2 | jnp.mean(v, axis='i') + sin(jnp.var(v, axis='i'))
2 | psum(v * 2) * sin(psum(v * 3))
2 | psum(v) * psum(v.astype(jnp.int32))
2 | psum(v) * sin(pmax(v))
2 | psum(v[::-1]) * sin(psum(v))
2 | rotated(v, 2, 8) * sin(rotated(v, 4, 8))
"""


@pytest.mark.parametrize("line", REPEATED.strip().splitlines())
def test_a_collective_of_what_another_one_had_is_no_transfer(line, mesh42):
    count, body = body_of(line)
    step = xmap(lambda v: jnp.sum(body(v)), ROWS, ["i"], axis_resources={"i": "x"})
    with mesh42:
        found = plan(step, shaped(8, 16))
        assert_as_compiled(found, compiled_text(step, [shaped(8, 16)]))
    assert len(found.transfers) == int(count)


# ----------------------------------------------------------------------- what a transfer says


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, start=1) if text in line)


def test_each_transfer_says_what_it_is_for(mesh42):
    with mesh42:
        found = plan(network_step({"batch": "x", "hidden": "y"}), *NETWORK_ARGS)
    moving = [c for c in found.collectives if c.transfers]
    hidden, logits, mean = map(line_of, ("hidden = relu", "logits = pdot", "return -lax.pmean"))
    # On a device logits are 6 x 8 numbers, w2 is 8 x 8 and w1 32 x 8; all-reduce sends 2 (n - 1) / n of them.
    assert [(c.name, c.where.line, c.became, c.bytes_sent) for c in moving] == [
        ("pdot over hidden", logits, "all-reduce over y", 6 * 8 * 4),
        ("psum over batch", mean, "all-reduce over x", 6),
        ("pdot over hidden, derivative", logits, "all-reduce over x", 8 * 8 * 4 * 3 // 2),
        ("pdot over inputs, derivative", hidden, "all-reduce over x", 32 * 8 * 4 * 3 // 2),
    ]
    assert found.bytes_sent == sum(c.bytes_sent for c in moving)


def test_turns_of_a_scan_over_steps_are_multiplied(mesh42):
    total = xmap(lambda v: lax.psum(v, "i"), ROWS, [...], axis_resources={"i": "x"})
    once = lambda v, _: (v - total(v), None)
    thrice = lambda v, _: lax.scan(once, v, None, length=3)
    never = lambda v, _: lax.scan(once, v, None, length=0)

    def epoch(v, count):
        v, _ = lax.scan(thrice, v, None, length=2)
        v, _ = lax.scan(never, v, None, length=2)
        is_on = lambda c: c[0] < count
        return lax.while_loop(is_on, lambda c: (c[0] + 1, c[1] - total(c[1])), (0, v))

    with mesh42:
        found = plan(epoch, shaped(8, 3), shaped(dtype=np.int32))
    assert [t.times for t in found.transfers] == [6, 0, None]
    assert found.bytes_sent is None
    assert found.sent_over == {"x": 7 * 18, "y": 0}


def test_a_derivative_taken_in_the_body_is_one_too(mesh42):
    loss = lambda w, x: jnp.sum(x * rotated(w**2, 1, 4))
    f = xmap(jax.grad(loss), (ROWS, ROWS), ROWS, axis_resources={"i": "x"})
    with mesh42:
        found = f.plan(shaped(4, 3), shaped(4, 3))
    assert [(t.kind, t.derivative) for t in found.transfers] == [("ppermute", True)]


def shifted(v):
    return v - rotated(v, 1, 4)


def halved(v):
    """By a solver that has no use for the product with the matrix."""
    return lax.custom_linear_solve(shifted, v, lambda matvec, b: b / 2, lambda vecmat, b: b / 2)


def scanned(f, v):
    return lax.scan(lambda c, _: (c + f(c), f(v).sum()), v, None, length=3)[0]


def branched(f, v):
    return lax.cond(v.sum() > 0, lambda: (f(v), v), lambda: (v, 2 * v))[1]


def gradient_of_mean(f, v):
    return jax.grad(lambda v: f(v).sum())(v)


@jax.custom_jvp
def both(v):
    return shifted(v), v


@both.defjvp
def _(primals, tangents):
    return both(*primals), both(*tangents)


UNNEEDED = {
    # a function, its out_axes, where it is called in vain, and how many of its transfers XLA leaves
    "scan": (shifted, ROWS, scanned, 1),
    "cond": (shifted, ROWS, branched, 0),
    "solve": (halved, ROWS, lambda f, v: f(v), 0),
    "value": (lambda v: lax.pmean(v**2, "i"), [...], gradient_of_mean, 0),
    "custom rule": (both, ROWS, lambda f, v: f(v)[1], 0),
    "custom rule in the body": (lambda v: both(v)[1], ROWS, lambda f, v: f(v), 0),
}


@pytest.mark.parametrize("name", UNNEEDED)
def test_what_nobody_needs_is_not_counted(name, mesh42):
    body, out_axes, use, expected = UNNEEDED[name]
    f = xmap(body, ROWS, out_axes, axis_resources={"i": "x"})
    step = lambda v: use(f, v)
    with mesh42:
        found = plan(step, shaped(4, 3))
        compiled = hlo_collectives.collectives(compiled_text(step, [shaped(4, 3)]))
    assert len(found.transfers) == len(compiled) == expected


def test_functions_that_jax_has_traced_before_are_seen_as_well(mesh42):
    step = jax.jit(network_step({"batch": "x"}))
    with mesh42:
        jax.eval_shape(step, *NETWORK_ARGS)
        first = plan(step, *NETWORK_ARGS)
        assert first == plan(step, *NETWORK_ARGS)
    assert {t.mesh_axes for t in first.transfers} == {("x",)}
    assert [c.function for c in first.calls] == ["network_loss"]


def test_planning_leaves_no_trace(mesh42):
    """What is compiled after a plan is what is compiled without one."""
    f = xmap(lambda v: lax.psum(v, "i"), ROWS, [...], axis_resources={"i": "x"})
    with mesh42:
        plan(lambda v: f(v) + f(v), shaped(8))
        jaxpr = jax.make_jaxpr(f)(shaped(8)).jaxpr
    assert "xmap_compat_equation" not in jaxpr.pretty_print(name_stack=True)


def test_calls_are_those_of_the_functions(mesh42):
    inner = xmap(lambda v: lax.psum(v, "k"), ["k"], [], axis_resources={"k": "y"})
    outer = xmap(inner, ROWS, ["i"], axis_resources={"i": "x"})
    other = xmap(lambda v: v * 2, ["i"], ["i"], axis_resources={"i": "x"})
    with mesh42:
        found = plan(lambda v: other(outer(v)) + other(outer(v * 2)), shaped(4, 6))
        assert found.calls == outer.plan(shaped(4, 6)).calls + other.plan(shaped(4)).calls
    assert found.mesh == mesh42
    assert re.search(r"(?m)^v of <lambda> +f32", str(found))
    assert found.svg().count("arguments and results of &lt;lambda&gt;") == 2


def test_on_one_device_nothing_moves():
    found = plan(jax.grad(xmap(lambda v: lax.psum(v**2, "i"), ["i"], [])), shaped(8))
    assert (found.mesh, found.transfers, found.bytes_sent, len(found.calls)) == (None, (), 0, 1)
    assert "nothing moves between devices" in str(found)
    assert plan(jnp.sin, shaped(3)).calls == ()


def test_a_partial_step_has_the_name_of_its_function():
    def named_step(scale, v):
        return v * scale

    found = plan(functools.partial(named_step, 2.0), shaped(8))
    assert str(found).startswith("plan of named_step: no call uses a mesh\n")


def returns_text(v):
    return "text"


MISTAKES = [
    (lambda: plan(returns_text, 1.0), TypeError, r"returns_text at .*test_plan_steps.py:\d+ "),
    (
        lambda: plan(lambda v, options: v, 1.0, {"kind": "relu"}),
        TypeError,
        r"^args\[1\]\['kind'\] is 'relu' of type str, but .* Bind a static value",
    ),
    (lambda: plan(3), TypeError, r"^The argument step of plan should be a function .*, but got 3$"),
    (
        lambda: plan(xmap(lambda v: v, ["i"], ["i"], axis_resources={"i": "x"}), shaped(8)),
        ValueError,
        "resources are insufficient",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), MISTAKES)
def test_a_mistake_is_that_of_the_call(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


# ------------------------------------------------------------- arguments that are gathered


def placed(mesh, shape, *spec):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh.physical_mesh, P(*spec)))


def layer(v, w):
    h = jnp.tanh(v @ w)
    return h - lax.pmean(h, "batch")


LAYER = xmap(layer, (["batch", ...], {}), ["batch", ...], axis_resources={"batch": "x"})
GATHERED = [
    # how arguments lie, and the axes over which they are gathered
    (("x", "y"), ("y", None), {"v": ("y",), "w": ("y",)}),
    (("x", None), (None, "x"), {"w": ("x",)}),
    (("x", None), (None, None), {}),
]


@pytest.mark.parametrize(("of_v", "of_w", "expected"), GATHERED)
def test_arguments_that_are_gathered_at_entry(of_v, of_w, expected, mesh42):
    args = placed(mesh42, (16, 32), *of_v), placed(mesh42, (32, 64), *of_w)
    with mesh42:
        found = LAYER.plan(*args)
        compiled = hlo_collectives.collectives(LAYER.lower(*args).compile().as_text())
    assert {array.path: array.gathered for array in found.gathered} == expected
    assert [c.kind for c in compiled].count("all-gather") == len(expected)
    for path, axes in expected.items():
        assert f"\n{path} is gathered over {axes[0]}, which in_axes name" in str(found)


def test_types_with_shardings_stand_for_arrays(mesh42):
    explicit = []

    @jax.jit
    def outer(v, w):
        explicit.extend(array.path for array in LAYER.plan(v, w).gathered)
        return LAYER(v, w)

    lies = NamedSharding(mesh42.physical_mesh, P("x", "y"))
    v = jax.ShapeDtypeStruct((16, 32), np.float32, sharding=lies)
    with mesh42:
        assert [a.gathered for a in LAYER.plan(v, shaped(32, 64)).gathered] == [("y",)]
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        v = jax.device_put(np.ones((16, 32), np.float32), P("x"))
        outer(v, jax.device_put(np.ones((32, 64), np.float32), P("y")))
    assert explicit == ["w"]
