"""The plan of a whole program: every transfer of its xmapped calls, forward and backward, as XLA compiles them.

The oracle is the optimized HLO, read by the tests' own reader (tests/compiled.py): what each device sends over each
mesh axis.
"""

import collections
import functools
import math
import re
import xml.etree.ElementTree as ElementTree
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
from xmap_compat import SerialLoop, pdot, plan, xmap
from xmap_compat.tools.text import show_bytes

SIZES = {"x": 4, "y": 2}
DTYPES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2}


# ---------------------------------------------------------------------------- the oracle


def axes_of(groups):
    """The mesh axes along which the devices of some group differ."""
    at = [[np.unravel_index(d, tuple(SIZES.values())) for d in group] for group in groups]
    return tuple(
        a for k, a in enumerate(SIZES) if any(len({c[k] for c in group}) > 1 for group in at)
    )


def sent_by_hlo(text):
    """Bytes that each device sends by mesh axes, of a program without loops: each kind by its own formula."""
    sent = collections.Counter()
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\((.*)", line)
        if not match:
            continue
        arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1])
        result = sum(
            DTYPES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
            for dtype, dims in arrays
        )
        if match[2] == "collective-permute":
            pairs = re.findall(
                r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=\{(.*?)\}\}", match[3] + "}")[0]
            )
            sent[axes_of([tuple(map(int, pair)) for pair in pairs])] += result
            continue
        groups = replica_groups(match[3])
        n = len(next(iter(groups)))
        factor = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}.get(match[2], (n - 1) / n)
        sent[axes_of(groups)] += result * factor
    return {axes: bytes for axes, bytes in sent.items() if bytes}


def compiled_text(step, args):
    return jax.jit(step).lower(*args).compile().as_text()


def sent_by_plan(found):
    sent = collections.Counter()
    for t in found.transfers:
        sent[tuple(a for a in SIZES if a in t.mesh_axes)] += t.total
    return dict(sent)


def assert_as_compiled(found, text):
    """Equal for each mesh axis, but for the parts of bytes that are rounded up, once for each transfer."""
    ours, theirs = sent_by_plan(found), sent_by_hlo(text)
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
    {"batch": ("x", "y")},
    {"batch": "y", "inputs": "x", "classes": "x"},
    {"hidden": ("y", "x")},
    {"hidden": "x", "inputs": "y", "classes": "y"},
    {"classes": ("x", "y")},
    {"batch": "x", "classes": "y"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resources", ASSIGNMENTS, ids=str)
def test_a_training_step_sends_what_it_is_compiled_to_send(resources, mesh42):
    step = network_step(resources)
    with mesh42:
        found = plan(step, *NETWORK_ARGS)
        assert_as_compiled(found, compiled_text(step, NETWORK_ARGS))


def rotated(v, by, n):
    return lax.ppermute(v, "i", [(k, (k + by) % n) for k in range(n)])


MOVES = {
    "ppermute": (lambda v: (rotated(v, 1, 8) * v).sum(), ["i"], {"i": ("x", "y")}),
    "ppermute of a part": (lambda v: jnp.sin(rotated(v, 3, 8)) * v, ["i", ...], {"i": "x"}),
    "all_gather": (lambda v: jnp.sin(lax.all_gather(v, "i")).sum() * v, ["i", ...], {"i": "y"}),
    "psum_scatter": (lambda v: lax.psum_scatter(v**2, "i", tiled=True), ["i", ...], {"i": "x"}),
    "all_to_all": (
        lambda v: lax.all_to_all(v**2, "i", 0, 0, tiled=True),
        ["i", ...],
        {"i": ("y", "x")},
    ),
    "pmax": (lambda v: lax.pmax(v, "i") * v, ["i", ...], {"i": "x"}),
}


@pytest.mark.parametrize(
    "name", [*list(MOVES)[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in list(MOVES)[2:])]
)
def test_a_gradient_of_each_collective_sends_what_it_is_compiled_to_send(name, mesh42):
    body, out_axes, resources = MOVES[name]
    f = xmap(body, ["i", ...], out_axes, axis_resources=resources)
    square = lambda v: f(v)
    with mesh42:
        step = lambda v, ct: jax.vjp(square, v)[1](ct)
        args = (shaped(8, 16), jax.eval_shape(f, shaped(8, 16)))
        assert_as_compiled(plan(step, *args), compiled_text(step, args))


# Bodies with equal collectives, or some that only look equal; the number of all-reduces, and of rows about equal ones.
REPEATED = {
    "equal": (lambda v: lax.psum(v, "i") * jnp.sin(lax.psum(v, "i")), 1, 1),
    "equal expressions": (lambda v: lax.psum(v * 2, "i") * jnp.sin(lax.psum(v * 2, "i")), 1, 1),
    "mean and variance": (lambda v: jnp.mean(v, axis="i") + jnp.sin(jnp.var(v, axis="i")), 2, 1),
    "equal results of equal ones": (
        lambda v: lax.pmax(v - lax.pmax(v, "i"), "i") * lax.pmax(v, "i"),
        2,
        1,
    ),
    "another literal": (lambda v: lax.psum(v * 2, "i") * jnp.sin(lax.psum(v * 3, "i")), 2, 0),
    "another type": (lambda v: lax.psum(v, "i") * lax.psum(v.astype(jnp.int32), "i"), 2, 0),
    "another reduction": (lambda v: lax.psum(v, "i") * jnp.sin(lax.pmax(v, "i")), 2, 0),
    "another order": (lambda v: lax.psum(v[::-1], "i") * jnp.sin(lax.psum(v, "i")), 2, 0),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_collective_of_what_another_one_had_is_no_transfer(name, mesh42):
    body, count, others = REPEATED[name]
    step = xmap(lambda v: jnp.sum(body(v)), ["i", ...], ["i"], axis_resources={"i": "x"})
    with mesh42:
        found, args = plan(step, shaped(8, 16)), (shaped(8, 16),)
        assert_as_compiled(found, compiled_text(step, args))
        rows = [row.became for row in step.plan(*args).collectives]
    assert len(found.transfers) == count
    assert rows.count("no transfer") == others


# ----------------------------------------------------------------------- what a transfer tells


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, start=1) if text in line)


def test_each_transfer_says_what_it_is_for(mesh42):
    with mesh42:
        found = plan(network_step({"batch": "x", "hidden": "y"}), *NETWORK_ARGS)
    told = [
        (t.kind, t.mesh_axes, t.devices, t.axes, t.where.line, t.derivative, t.times)
        for t in found.transfers
    ]
    hidden, logits, mean = map(line_of, ("hidden = relu", "logits = pdot", "return -lax.pmean"))
    assert told == [
        ("all-reduce", ("y",), 2, ("hidden",), logits, False, 1),
        ("all-reduce", ("x",), 4, ("batch",), mean, False, 1),
        ("all-reduce", ("x",), 4, ("batch",), logits, True, 1),
        ("all-reduce", ("x",), 4, ("batch",), hidden, True, 1),
    ]
    # On a device logits are 6 x 8 numbers, w2 is 8 x 8 and w1 32 x 8; all-reduce sends 2 (n - 1) / n of them.
    assert [t.bytes_sent for t in found.transfers] == [
        6 * 8 * 4,
        6,
        8 * 8 * 4 * 3 // 2,
        32 * 8 * 4 * 3 // 2,
    ]
    assert found.bytes_sent == sum(t.bytes_sent for t in found.transfers)


def test_turns_of_a_scan_over_steps_are_multiplied(mesh42):
    total = xmap(lambda v: lax.psum(v, "i"), ["i", ...], [...], axis_resources={"i": "x"})

    def epoch(v, count):
        once = lambda v, _: (v - total(v), None)
        v, _ = lax.scan(once, v, None, length=5)
        v, _ = lax.scan(lambda v, _: lax.scan(once, v, None, length=3), v, None, length=2)
        return lax.while_loop(
            lambda c: c[0] < count, lambda c: (c[0] + 1, c[1] - total(c[1])), (0, v)
        )

    with mesh42:
        found = plan(epoch, shaped(8, 3), shaped(dtype=np.int32))
    assert [t.times for t in found.transfers] == [5, 6, None]
    assert found.bytes_sent is None
    assert "in each iteration of a while loop" in " ".join(str(found).split())


def test_forward_mode_says_which_half_is_the_derivative(mesh42):
    f = xmap(lambda v: lax.psum(jnp.sin(v), "i"), ["i", ...], [...], axis_resources={"i": "x"})
    with mesh42:
        found = plan(lambda v: jax.jvp(f, (v,), (v,)), shaped(8, 3))
        twice = plan(lambda v: jax.jvp(lambda v: f(v)[0] * f(2 * v)[1], (v,), (v,)), shaped(8, 3))
    assert [(t.derivative, t.times) for t in found.transfers] == [(False, 1), (True, 1)]
    assert [t.derivative for t in twice.transfers] == [False, True, False, True]


def test_a_derivative_taken_in_the_body_is_one_too(mesh42):
    g = lambda w, x: jax.grad(
        lambda w: jnp.sum(x * lax.ppermute(w**2, "i", [(k, (k + 1) % 4) for k in range(4)]))
    )(w)
    f = xmap(g, (["i", ...], ["i", ...]), ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        found = f.plan(shaped(4, 3), shaped(4, 3))
    assert [(t.kind, t.derivative) for t in found.transfers] == [("ppermute", True)]


def test_what_nobody_needs_is_not_counted(mesh42):
    """XLA drops it: the value of a loss whose gradient alone is asked for, results that are not used."""
    f = xmap(
        lambda v: (lax.pmean(v**2, "i"), lax.pmax(v, "i")),
        ["i", ...],
        [...],
        axis_resources={"i": "x"},
    )
    step = lambda v: jax.grad(lambda v: f(v)[0].sum())(v)
    with mesh42:
        found = plan(step, shaped(8, 3))
        assert (found.transfers, sent_by_hlo(compiled_text(step, (shaped(8, 3),)))) == ((), {})
        assert len(f.plan(shaped(8, 3)).transfers) == 2


def shifted(v):
    return v - lax.ppermute(v, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])


def halved(v):
    """By a solver that has no use for the product with the matrix."""
    return lax.custom_linear_solve(shifted, v, lambda matvec, b: b / 2, lambda vecmat, b: b / 2)


UNNEEDED = {
    # a function, where it is called in vain, and how many of its transfers XLA leaves
    "scan": (
        shifted,
        lambda f, v: lax.scan(lambda c, _: (c + f(c), f(v).sum()), v, None, length=3)[0],
        1,
    ),
    "cond": (
        shifted,
        lambda f, v: lax.cond(v.sum() > 0, lambda: (f(v), v), lambda: (v, 2 * v))[1],
        0,
    ),
    "solve": (halved, lambda f, v: f(v), 0),
}


@pytest.mark.parametrize("name", UNNEEDED)
def test_what_loops_branches_and_solves_do_in_vain_is_not_counted(name, mesh42):
    body, use, expected = UNNEEDED[name]
    f = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    step = lambda v: use(f, v)
    with mesh42:
        found = plan(step, shaped(4, 3))
        assert (
            len(found.transfers)
            == len(hlo_collectives.collectives(compiled_text(step, (shaped(4, 3),))))
            == expected
        )


def test_functions_that_jax_has_traced_before_are_seen_as_well(mesh42):
    step = jax.jit(network_step({"batch": "x"}))
    with mesh42:
        jax.eval_shape(step, *NETWORK_ARGS)
        first, second = plan(step, *NETWORK_ARGS), plan(step, *NETWORK_ARGS)
    assert first.transfers == second.transfers
    assert {t.axes for t in first.transfers} == {("batch",)}
    assert [c.function for c in first.calls] == ["network_loss"]


def test_planning_leaves_no_trace(mesh42):
    """What is compiled after a plan is what is compiled without one."""
    f = xmap(lambda v: lax.psum(v, "i"), ["i", ...], [...], axis_resources={"i": "x"})
    with mesh42:
        plan(lambda v: f(v) + f(v), shaped(8))
        assert "xmap_compat_equation" not in str(
            jax.make_jaxpr(f)(shaped(8)).jaxpr.pretty_print(name_stack=True)
        )


def test_calls_are_those_of_the_functions(mesh42):
    inner = xmap(lambda v: lax.psum(v, "k"), ["k"], [], axis_resources={"k": "y"})
    outer = xmap(inner, ["i", ...], ["i"], axis_resources={"i": "x"})
    other = xmap(lambda v: v * 2, ["i"], ["i"], axis_resources={"i": "x"})
    with mesh42:
        found = plan(lambda v: other(outer(v)) + other(outer(v * 2)), shaped(4, 6))
        assert found.calls == outer.plan(shaped(4, 6)).calls + other.plan(shaped(4)).calls
    assert [(t.mesh_axes, t.axes) for t in found.transfers if t.kind == "all-reduce"][:1] == [
        (("y",), ("k",))
    ]
    assert found.mesh == mesh42


def test_a_call_that_closes_over_values_of_the_step_is_planned(mesh42):
    def step(v, w):
        return jax.grad(
            lambda w: xmap(lambda v: lax.psum(v * w, "i"), ["i"], [], axis_resources={"i": "x"})(v)
        )(w)

    with mesh42:
        found = plan(step, shaped(8), shaped())
    assert [t.axes for t in found.transfers if t.derivative] == [("i",)]
    assert str(found) and found._repr_svg_()


def test_on_one_device_nothing_moves():
    found = plan(jax.grad(xmap(lambda v: lax.psum(v**2, "i"), ["i"], [])), shaped(8))
    assert (found.mesh, found.transfers, found.bytes_sent, len(found.calls)) == (None, (), 0, 1)
    assert "nothing moves between devices" in str(found)


def test_a_mistake_is_that_of_the_call():
    with pytest.raises(ValueError, match="resources are insufficient"):
        plan(xmap(lambda v: v, ["i"], ["i"], axis_resources={"i": "x"}), shaped(8))
    assert plan(jnp.sin, shaped(3)).calls == ()  # the executor is as it was


# ------------------------------------------------------------------------------- compiled


def test_a_step_with_a_scan_gathers_what_it_hands_on_unchanged(mesh42):
    f = xmap(lambda v, w: v @ w, (["b", ...], [...]), ["b", ...], axis_resources={"b": "x"})

    def epoch(v, w):
        return lax.scan(
            lambda w, _: (w - jax.grad(lambda w: (f(v, w) ** 2).sum())(w), None), w, None, length=3
        )[0]

    with mesh42 as mesh:
        v = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("x", "y")))
        w = jax.device_put(np.ones((16, 4), np.float32), NamedSharding(mesh, P("y")))
        found = plan(epoch, v, w)
    assert {t.mesh_axes for t in found.transfers} == {("x",)}
    told = {(g.path, g.mesh_axes, g.bytes_received) for g in found.gathered}
    assert told == {
        ("v", ("y",), 8 * 16 * 4 // 4 // 2)
    }  # w is carried by the scan, and v handed on
    assert "v y 64 B" in re.sub(r"\s+", " ", str(found))


def test_types_with_shardings_and_tracers_stand_for_arrays(mesh42):
    f = xmap(lambda v: v - lax.pmean(v, "b"), ["b", ...], ["b", ...], axis_resources={"b": "x"})
    found = []

    def outer(v):
        found.append(plan(f, v))
        return f(v)

    with mesh42 as mesh:
        v = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=NamedSharding(mesh, P("x", "y")))
        assert [(g.mesh_axes, g.bytes_received) for g in plan(f, v).gathered] == [(("y",), 64)]
        jax.eval_shape(jax.jit(outer), v)
        assert found[0].transfers == plan(f, v).transfers
        assert found[0].gathered == ()


def test_a_scan_without_turns_sends_nothing(mesh42):
    f = xmap(lambda v: v - lax.pmean(v, "b"), ["b", ...], ["b", ...], axis_resources={"b": "x"})
    with mesh42:
        found = plan(
            lambda v: lax.scan(lambda c, _: (f(c), None), v, None, length=0)[0], shaped(8, 3)
        )
    assert (found.sent_over, found.bytes_sent) == ({"x": 0, "y": 0}, 0)


# ------------------------------------------------------------------------- reports and pictures


def many_sums(count):
    mean = xmap(
        lambda tree: lax.pmean(tree, "i"), ({"w": ["i", ...]},), {}, axis_resources={"i": "x"}
    )
    return lambda tree: mean({"w": tree}), {f"p{k:03}": shaped(8, 3 + k % 4) for k in range(count)}


def test_equal_transfers_are_one_row_with_a_count(mesh42):
    step, tree = many_sums(48)
    with mesh42:
        found = plan(step, tree)
    report = re.sub(r"\s+", " ", str(found))
    sent = sum(2 * math.ceil((3 + k % 4) * 4 * 3 / 4) for k in range(48))
    assert len(found.transfers) == 48 or sum(t.times for t in found.transfers) == 48
    assert found.bytes_sent == sent
    assert report.count("psum over i 48 ") == 1
    assert len(str(found).splitlines()) <= 60
    assert found.svg().count("psum over i: 1.27 KiB, 48 times") == 1


def test_the_picture_has_a_bar_for_each_transfer(mesh42, tmp_path):
    with mesh42:
        found = plan(network_step({"batch": "x", "hidden": "y"}), *NETWORK_ARGS)
    found.save_svg(tmp_path / "step.svg")
    tree = ElementTree.parse(tmp_path / "step.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in tree.iter(f"{space}text")]
    rows = [k for k, text in enumerate(texts) if "all-reduce" in text]
    assert texts[rows[0] - 1 : rows[0] + 1] == [
        f"pdot over hidden: 192 B (test_plan_steps.py:{line_of('logits = pdot')})",
        "all-reduce over y",
    ]
    assert len(rows) == len(found.transfers) == 4
    assert {"↓ x 4", "→ y 2"} <= set(texts)
    assert (
        f"each device holds {show_bytes(found.calls[0].bytes_held)} of arguments and results"
        in texts
    )
    assert "and sends 1.88 KiB over x, 192 B over y" in texts
    bars = [r for r in tree.iter(f"{space}rect") if r.get("class") == "sent"]
    wide = [float(bar.get("width")) for bar in bars]
    most = max(t.bytes_sent for t in found.transfers)
    assert wide == pytest.approx(
        [max(468 * t.bytes_sent / most, 2) for t in found.transfers], abs=0.1
    )
    assert "prefers-color-scheme:dark" in tree.find(f"{space}style").text
    assert found.svg() in found._repr_svg_()


def test_the_picture_of_a_step_has_the_arrays_of_its_calls(mesh42):
    """As the pictures of these calls have them; a call that uses no mesh is not drawn."""
    alone = xmap(lambda v: 2 * v, ["i"], ["i"])
    split = network_step({"batch": "x", "hidden": "y"})
    with mesh42:
        found = plan(lambda v, *args: (alone(v), split(*args)), shaped(8), *NETWORK_ARGS)
        one = plan(split, *NETWORK_ARGS)
    blocks = lambda svg: re.findall(r"<rect [^>]*><title>([^<]* on device [^<]*)</title>", svg)
    assert blocks(found.svg()) == blocks(one.svg()) != []
    texts = [
        t.text for t in ElementTree.fromstring(found.svg()).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {
        "arguments of network_loss",
        "results of network_loss",
    } <= {*texts}
    assert "w1" in texts and "f32[32,8] on a device" in texts


def test_a_partial_step_has_the_name_of_its_function(mesh42):
    def named_step(scale, v):
        return (
            xmap(lambda v: v * 2, ["i"], ["i"], axis_resources={"i": ("x", SerialLoop(2))})(v)
            * scale
        )

    with mesh42:
        found = plan(functools.partial(named_step, 2.0), shaped(8))
    assert str(found).startswith("plan of named_step: mesh x: 4, y: 2 (8 cpu devices)\n")


def test_an_error_of_jax_names_the_step():
    def step(v):
        return "text"

    with pytest.raises(TypeError, match=r"step at .*test_plan_steps.py:\d+ .*<class 'str'>"):
        plan(step, 1.0)


def test_an_argument_that_is_no_array_is_refused_by_its_path():
    with pytest.raises(
        TypeError, match=r"^args\[1\]\['kind'\] is 'relu' of type str, but .* Bind a static value"
    ):
        plan(lambda v, options: v, 1.0, {"kind": "relu"})


def test_other_things_than_functions_and_meshes_are_refused():
    with pytest.raises(
        TypeError, match=r"^The argument step of plan should be a function .*, but got 3$"
    ):
        plan(3)
