"""The plan of a call tells the truth, executes nothing, and is drawn rightly.

What a plan says is compared with what JAX says of the same call: shardings and shard shapes of real results,
``NamedSharding``'s map of devices to indices, and the collectives in the compiled program.  Pictures are read back:
the blocks of the SVG by their colours and tips, and the characters of the text picture.
"""

import dataclasses
import inspect
import math
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from placements import shaped

import xmap_compat
from xmap_compat import Mesh, SerialLoop, pdot, serial_loop, xmap
from xmap_compat.tools.grid import block_holders, ranges
from xmap_compat.tools.text import show_bytes


def grid(*shape):
    return np.array(jax.devices()[: math.prod(shape)]).reshape(shape)


def matmul(a, b):
    return pdot(a, b, "k")


MATMUL = {"in_axes": (["i", "k"], ["k", "j"]), "out_axes": ["i", "j"]}
MATMUL_ARGS = (shaped(8, 4), shaped(4, 6))


def line_of(function, text):
    """The number of the line of a function's source that contains some text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


def by_primitive(plan):
    return {c.primitive: c for c in plan.collectives}


# ---------------------------------------------------------------------- axes and arrays

AXES = {
    # resources: (mesh axes, loop sizes, on each device, at once, executed by)
    "none": (None, ((), (), 8, 8, ("vmap",))),
    "full": (("x", "y"), (("x", "y"), (), 1, 1, ("shard_map",))),
    "part": ("x", (("x",), (), 2, 2, ("shard_map", "vmap"))),
    "loop": (SerialLoop(4), ((), (4,), 8, 2, ("loop", "vmap"))),
    "all loops": (SerialLoop(8), ((), (8,), 8, 1, ("loop",))),
    "part, loop": (("y", SerialLoop(2)), (("y",), (2,), 4, 2, ("shard_map", "loop", "vmap"))),
}


@pytest.mark.parametrize("case", AXES)
def test_each_axis_says_how_it_is_executed(case, mesh42):
    resources, expected = AXES[case]
    given = {} if resources is None else {"i": resources}
    with mesh42:
        (axis,) = (
            xmap(jnp.sin, ["i", ...], ["i", ...], axis_resources=given).plan(shaped(8, 3)).axes
        )
    found = (axis.mesh_axes, axis.loop_sizes, axis.device_size, axis.local_size, axis.executed_by)
    assert (axis.name, axis.size, found) == ("i", 8, expected)


ASSIGNMENTS = {
    "none": {},
    "rows": {"i": "x"},
    "rows over all": {"i": ("y", "x")},
    "blocks": {"i": "x", "j": "y"},
    "contracted": {"k": "x"},
    "contracted and rows": {"k": "y", "i": "x"},
}


@pytest.mark.parametrize("resources", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_arrays_are_where_the_call_puts_them(resources, mesh42):
    f = xmap(matmul, **MATMUL, axis_resources=resources)
    with mesh42 as mesh:
        plan = f.plan(*MATMUL_ARGS)
        out = jax.block_until_ready(f(np.ones((8, 4), np.float32), np.ones((4, 6), np.float32)))
        compiled = f.lower(*MATMUL_ARGS).compile()
    (result,) = plan.results
    assert result.shape == out.shape
    assert result.dtype == out.dtype
    assert {s.data.shape for s in out.addressable_shards} == {result.device_shape}
    if not resources:
        assert plan.mesh is None
        assert [a.spec for a in (*plan.arguments, result)] == [None] * 3
        assert [a.device_shape for a in plan.arguments] == [a.shape for a in plan.arguments]
        return
    assert plan.mesh == mesh
    assert result.spec == out.sharding.spec
    for array, sharding in zip(plan.arguments, compiled.input_shardings[0]):
        assert NamedSharding(mesh, array.spec).is_equivalent_to(sharding, len(array.shape))
        assert array.device_shape == sharding.shard_shape(array.shape)


def test_arrays_have_paths_names_and_types():
    def f(params, *rest):
        return {"a": params["w"][0], "b": rest[1]}

    axes = ({"w": [["i", ...]]}, [...], ["i", None, "j"])
    f = xmap(f, axes, {"a": ["i", ...], "b": {1: "j", 2: "i"}})
    plan = f.plan(
        {"w": [shaped(2, 3)]}, shaped(dtype=jnp.bfloat16), shaped(2, 4, 5, dtype=np.int32)
    )
    found = [(a.path, a.type, a.axes) for a in (*plan.arguments, *plan.results)]
    assert found == [
        ("params['w'][0]", "f32[2,3]", ("i", None)),
        ("rest[0]", "bf16[]", ()),
        ("rest[1]", "i32[2,4,5]", ("i", None, "j")),
        ("result['a']", "f32[2,3]", ("i", None)),
        ("result['b']", "i32[4,5,2]", (None, "j", "i")),
    ]
    assert [a.device_bytes for a in plan.arguments] == [24, 2, 160]


# ------------------------------------------------------------------- nothing is executed


@pytest.fixture
def compilations():
    """How often XLA has compiled since the test began."""
    seen = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_plan_neither_compiles_nor_executes(compilations, mesh42):
    calls = []

    def f(x):
        jax.debug.callback(calls.append, x)
        return lax.psum(x, "i")

    f = xmap(f, ["i"], [...], axis_resources={"i": "x"})
    with mesh42:
        plan = f.plan(shaped(8))
        for show in (
            str,
            repr,
            lambda p: p.svg(),
            lambda p: p._repr_svg_(),
        ):
            assert show(plan)
        assert (calls, compilations) == ([], [])
        jax.block_until_ready(f(np.arange(8.0, dtype=np.float32)))
        jax.effects_barrier()
    assert calls
    assert compilations


def test_a_plan_cannot_be_changed():
    plan = xmap(jnp.sin, ["i"], ["i"]).plan(shaped(3))
    for value in (plan, plan.axes[0], plan.arguments[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)


# ------------------------------------------------------------------------- collectives


def rotation(n):
    return [(k, (k + 1) % n) for k in range(n)]


# Bodies over an axis i of 8 elements with 4 float32 each (16 where they are cut); what they become on (none) one
# device, (part) 4 devices of 2 elements each and (full) 8 devices; and what each device must send.
# Sizes on a device: 8 elements x 4 x 4 B / devices.
GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
COLLECTIVES = {
    "psum": (
        lambda x: lax.psum(x, "i"),
        ("no transfer", 0),
        ("all-reduce over x", 2 * 3 * 16 // 4),
        ("all-reduce over x, y", 2 * 7 * 16 // 8),
    ),
    "psum, and of a dimension": (
        lambda x: lax.psum(x, ("i", 0)),
        ("no transfer", 0),
        ("all-reduce over x", 2 * 3 * 4 // 4),
        ("all-reduce over x, y", 2 * 4),
    ),
    "psum of what does not vary": (
        lambda x: lax.psum(jnp.float32(2) + 0 * jnp.ones(4), "i"),
        *[("no transfer", 0)] * 3,
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "i", axis=1),
        ("no transfer", 0),
        ("all-gather over x", 3 * 32),
        ("all-gather over x, y", 7 * 16),
    ),
    "ppermute": (
        lambda x: lax.ppermute(x, "i", rotation(8)),
        ("no transfer", 0),
        ("ppermute over x", 16),
        ("ppermute over x, y", 16),
    ),
    "ppermute to themselves": (
        lambda x: lax.ppermute(x, "i", [(k, k) for k in range(8)]),
        ("no transfer", 0),
        ("no transfer", 0),
        ("ppermute over x, y", 16),
    ),
    "pshuffle": (
        lambda x: lax.pshuffle(x, "i", [1, 0, 3, 2, 5, 4, 7, 6]),
        *[("no transfer", 0)] * 2,
        ("ppermute over x, y", 16),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        ("no transfer", 0),
        ("reduce-scatter over x", 3 * 64 // 4),
        ("reduce-scatter over x, y", 7 * 64 // 8),
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
        ("no transfer", 0),
        ("all-to-all over x", 3 * 128 // 4),
        ("all-to-all over x, y", 7 * 64 // 8),
    ),
    "pbroadcast": (
        lambda x: lax.pbroadcast(x, "i", 3),
        ("no transfer", 0),
        ("all-reduce over x", 2 * 3 * 16 // 4),
        ("all-reduce over x, y", 2 * 7 * 16 // 8),
    ),
    "pdot": (
        lambda x: pdot(x, x, "i"),
        ("no transfer", 0),
        ("all-reduce over x", 2 * 3 * 64 // 4),
        ("all-reduce over x, y", 2 * 7 * 64 // 8),
    ),
    "axis_index": (lambda x: lax.axis_index("i"), *[("no transfer", 0)] * 3),
    "psum in groups": (
        lambda x: lax.psum(x, "i", axis_index_groups=GROUPS),
        ("no transfer", 0),
        ("all-gather over x", 3 * 2 * 16),
        ("all-gather over x, y", 7 * 16),
    ),
}
PRIMITIVES = {
    **{name: name.partition(" ")[0].rstrip(",") for name in COLLECTIVES},
    "pshuffle": "ppermute",
}
PLACES = {"none": None, "part": "x", "full": ("x", "y")}
CASES = [(name, place) for name in COLLECTIVES for place in PLACES]


def plan_and_lowered(name, place, mesh):
    """One collective by itself: its plan, and what JAX lowers the call to."""
    body, *_ = COLLECTIVES[name]
    size = 16 if name in ("psum_scatter", "all_to_all") else 4
    resources = {} if PLACES[place] is None else {"i": PLACES[place]}
    reduces = (
        PRIMITIVES[name] in ("psum", "pmax", "pmin", "pdot", "all_gather", "pbroadcast")
        and "groups" not in name
    )
    # A result that varies as it comes needs no operation where it leaves.
    f = xmap(body, ["i", ...], [...] if reduces else ["i", ...], axis_resources=resources)
    with mesh:
        return f.plan(shaped(8, size)), f.lower(shaped(8, size)).as_text()


MOVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ppermute": "collective_permute",
}


def lowered_moves(text):
    """``(kind, type on a device)`` of each collective in a StableHLO program."""
    for kind, name in MOVES.items():
        for found in re.finditer(rf'"stablehlo\.{name}"', text):
            shape, dtype = (
                re.compile(r": \(tensor<((?:\d+x)*)(\w+)>").search(text, found.end()).groups()
            )
            yield kind, dtype, [n for n in map(int, shape.split("x")[:-1]) if n != 1]


def planned_moves(plan):
    for transfer in (t for c in plan.collectives for t in c.transfers for _ in range(t.times)):
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", transfer.operand).groups()
        yield transfer.kind, dtype, [n for n in map(int, filter(None, shape.split(","))) if n != 1]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_each_collective_says_what_moves_for_it(name, place, mesh42):
    """And this is what JAX lowers the call to."""
    became, sent = COLLECTIVES[name][1 + list(PLACES).index(place)]
    plan, text = plan_and_lowered(name, place, mesh42)
    (collective,) = plan.collectives
    assert (collective.primitive, collective.axes) == (PRIMITIVES[name], ("i",))
    assert (collective.became, collective.bytes_sent) == (became, sent)
    assert sorted(planned_moves(plan)) == sorted(lowered_moves(text))


def test_collectives_name_the_line_of_the_user(mesh42):
    def helper(x):
        return jax.nn.logsumexp(x, axis="j")

    def f(x):
        total = lax.psum(x, "i")
        return jax.jit(helper)(total)

    with mesh42:
        plan = xmap(f, ["i", "j"], [...], axis_resources={"j": "y"}).plan(shaped(4, 6))
    places = [(c.primitive, c.where.line, c.where.file) for c in plan.collectives]
    assert places == [
        ("psum", line_of(f, "lax.psum"), __file__),
        ("pmax", line_of(helper, "logsumexp"), __file__),
        ("psum", line_of(helper, "logsumexp"), __file__),
    ]
    assert f"test_plan.py:{line_of(f, 'lax.psum')}" in str(plan)


def test_collectives_over_several_axes_keep_the_order_of_the_user(mesh42):
    with mesh42:
        f = xmap(
            lambda x: lax.psum(x, ("j", "i")), ["i", "j"], [], axis_resources={"i": "x", "j": "y"}
        )
        (collective,) = f.plan(shaped(8, 2)).collectives
    assert collective.axes == ("j", "i")
    assert [(t.kind, set(t.mesh_axes), t.devices) for t in collective.transfers] == [
        ("all-reduce", {"x", "y"}, 8)
    ]


def in_scan(x):
    return lax.scan(lambda c, t: (c + lax.psum(t, "i"), None), jnp.zeros(()), x)[0]


def in_while(x):
    return lax.while_loop(lambda c: c.max() < 9, lambda c: c + lax.psum(x, "i"), lax.pmax(x, "i"))


def in_cond(x):
    return lax.cond(
        lax.pmax(x[0], ("i", "j")) > 0, lambda v: lax.psum(v, "i"), lambda v: lax.pmax(v, "i"), x
    )


# What a plan adds to the words of the transfers of a case.
TURN_WORDS = {
    "scan": "all-reduce over x (3 times)",
    "while": "all-reduce over x (each iteration)",
    "cond": "all-reduce over x (in a branch)",
    "serial loop": "all-reduce over x (5 times)",
    "serial loop and scan": "all-reduce over x (15 times)",
}
TURNS = {
    "scan": (in_scan, {}, {"psum": (3, False)}),
    "while": (in_while, {}, {"pmax": (1, False)}),
    "cond": (in_cond, {}, {"pmax": (1, False), "psum": (1, True)}),
    "serial loop": (lambda x: lax.psum(x, "i"), {"j": SerialLoop(5)}, {"psum": (5, False)}),
    "serial loop and scan": (in_scan, {"j": SerialLoop(5)}, {"psum": (15, False)}),
    "called twice": (
        lambda x: (g := jax.jit(lambda v: lax.psum(v, "i")))(x) + g(x * 2),
        {},
        {"psum": (1, False)},
    ),
}


@pytest.mark.parametrize("case", TURNS)
def test_turns_and_branches_are_counted(case, mesh42):
    body, more, expected = TURNS[case]
    with mesh42:
        f = xmap(body, ["i", "j", ...], ["j", ...], axis_resources={"i": "x", **more})
        plan = f.plan(shaped(4, 5, 3))
    for primitive, (times, conditional) in expected.items():
        found = [t for c in plan.collectives if c.primitive == primitive for t in c.transfers]
        assert (times, conditional) in [(t.times, t.conditional) for t in found]
    if case == "while":
        in_loop = by_primitive(plan)["psum"]
        assert [t.times for t in in_loop.transfers] == [None]
        assert in_loop.bytes_sent is None
        assert plan.bytes_sent is None
        assert "in each iteration of a while loop" in " ".join(str(plan).split())
    else:
        assert plan.bytes_sent == sum(
            t.bytes_sent * t.times for c in plan.collectives for t in c.transfers
        )
    assert TURN_WORDS.get(case, "all-reduce over x") in by_primitive(plan)["psum"].became.split(
        ", "
    )
    if case == "called twice":
        assert [c.primitive for c in plan.collectives] == ["psum", "psum"]


def test_equal_transfers_of_one_collective_are_one_word(mesh42):
    """Every device sends one element to the next and one to the one before: two rounds alike."""
    to = {2 * d: (2 * d + 2) % 8 for d in range(4)} | {2 * d + 1: (2 * d - 1) % 8 for d in range(4)}
    with mesh42:
        f = xmap(
            lambda x: lax.ppermute(x, "i", list(to.items())),
            ["i", ...],
            ["i", ...],
            axis_resources={"i": "x"},
        )
        plan = f.plan(shaped(8, 3))
    (collective,) = plan.collectives
    assert [(t.kind, t.times, t.bytes_sent) for t in collective.transfers] == [
        ("ppermute", 1, 3 * 4),
        ("ppermute", 1, 3 * 4),
    ]
    assert collective.became == "ppermute over x"
    assert collective.bytes_sent == plan.bytes_sent == 2 * 3 * 4


@pytest.mark.parametrize(
    ("resources", "size", "expected"),
    [({"i": "x"}, 4, 2 * 3), ({"i": ("x", "y")}, 8, 2 * 4), ({"i": "y"}, 2, 2 * 2)],
    ids=str,
)
def test_parts_of_bytes_are_rounded_up(resources, size, expected, mesh42):
    """Each of n devices sends (n - 1) / n of 4 bytes, twice."""
    with mesh42:
        plan = xmap(lambda x: lax.psum(x, "i"), ["i"], [], axis_resources=resources).plan(
            shaped(size)
        )
    assert plan.bytes_sent == expected


# ---------------------------------------------------------------------------- nested calls

INNER = {
    "none": ({}, ((), ()), ("vmap",)),
    "mesh": ({"k": "y"}, (("y",), ()), ("shard_map", "vmap")),
    "loop": ({"k": SerialLoop(3)}, ((), (3,)), ("loop", "vmap")),
    "mesh and loop": ({"k": ("y", SerialLoop(3))}, (("y",), (3,)), ("shard_map", "loop")),
}


def nested_in(resources):
    """A function with two calls of an xmapped one in its body, one of them in another jitted function."""
    inner = xmap(lambda v: v * 2, ["k"], ["k"], axis_resources=resources)
    return inner, lambda v: jax.jit(lambda w: inner(w) + 1)(v) + inner(v)


def test_nested_calls_are_in_the_plan_of_the_outer_one(mesh42):
    plans = {}
    for case, (resources, (mesh_axes, loop_sizes), executed_by) in INNER.items():
        _, body = nested_in(resources)
        outer = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "x"})
        with mesh42:
            jax.eval_shape(outer, shaped(4, 6))  # then inner functions come from the cache
            plan = plans[case] = outer.plan(shaped(4, 6))
        assert [a.name for a in plan.axes] == ["i"]
        assert len(plan.nested) == 2
        for call in plan.nested:
            (axis,) = call.axes
            assert (axis.name, axis.size, axis.mesh_axes, axis.loop_sizes) == (
                "k",
                6,
                mesh_axes,
                loop_sizes,
            )
            assert axis.executed_by == executed_by
            assert call.where.line == line_of(nested_in, "lambda v: jax.jit")
        assert re.search(r"(?m)^k of <lambda> +6 ", str(plan))
    assert len(set(plans.values())) == len(INNER)


def test_a_nested_call_is_found_wherever_it_is():
    inner = xmap(lambda v: v * 3, ["k"], ["k"], axis_resources={"k": SerialLoop(2)})
    middle = xmap(lambda v: inner(v).sum(), ["j", ...], ["j"])

    def f(v):
        in_gradient = jax.grad(lambda w: jax.vmap(middle)(jnp.stack([w, w])).sum())(v)
        return lax.scan(lambda c, row: (c + inner(row), None), in_gradient[0], v)[0]

    plan = xmap(f, ["i", ...], ["i", ...]).plan(shaped(2, 3, 4))
    assert {tuple(a.name for a in call.axes) for call in plan.nested} == {("j",), ("k",)}
    (looped,) = {call.axes for call in plan.nested if call.axes[0].name == "k"}
    assert looped[0].loop_sizes == (2,)


# ---------------------------------------------------------------------------- the report


def wide(params, x):
    for layer in params["a long name of a layer"]:
        x = (
            jax.nn.softmax(
                pdot(x, layer, "features of the inputs"), axis="a rather long name of an axis"
            )
            * x
        )
    return x


def wide_plan(mesh):
    layer = ["features of the inputs", "a rather long name of an axis"]
    names = {"a long name of a layer": [layer] * 12}
    f = xmap(
        wide, (names, ["batch", *layer]), ["batch", *layer], axis_resources={"batch": ("x", "y")}
    )
    with mesh:
        return f.plan({"a long name of a layer": [shaped(12345, 6)] * 12}, shaped(8, 12345, 6))


def test_reports_fit_eighty_columns(mesh42):
    plan = wide_plan(mesh42)
    assert max(map(len, str(plan).splitlines())) <= 80
    assert max(map(len, str(plan).splitlines())) > 70


def test_layers_in_a_list_are_one_row(mesh42):
    rows = re.sub(r"\s+", " ", str(wide_plan(mesh42)))
    assert rows.count("f32[12345,6]") == 2 and "[0..11]" in rows and " 12 test_plan" in rows


def training_step(count):
    """A step with so many parameters, of five shapes, and the mean of every gradient over a batch."""

    def step(params, x):
        loss = lambda p: sum(jnp.vdot(w[: len(x)], x) ** 2 for w in p.values())
        means = jax.tree.map(lambda g: lax.pmean(g, "batch"), jax.grad(loss)(params))
        return jax.tree.map(jnp.subtract, params, means)

    params = {f"w{k:03}": shaped(8 + k % 5) for k in range(count)}
    return xmap(step, ({}, ["batch", ...]), {}, axis_resources={"batch": "x"}), params, shaped(8, 4)


def test_a_plan_with_a_hundred_parameters_fits_a_screen(mesh42):
    f, params, x = training_step(100)
    with mesh42:
        plan = f.plan(params, x)
    report = str(plan)
    assert len(report.splitlines()) <= 60
    words = re.sub(r"\s+", " ", report)
    for k in range(5):
        assert f"params['w{k:03}'] + 19 alike f32[{8 + k}] f32[{8 + k}] P() [.]" in words
    sent = sum(2 * math.ceil(4 * (8 + k % 5) * 3 / 4) for k in range(100))
    assert (len(plan.collectives), plan.bytes_sent) == (100, sent)
    assert f"psum over batch 100 test_plan.py:{line_of(training_step, 'lax.pmean')}" in words
    assert len(re.findall(r"bold\">[^<]* \+ 19 alike<", plan.svg())) == 10
    assert (
        plan.svg().count('class="edge"') == 12
    )  # the mesh, five kinds of parameters and of results, and x


def test_what_a_report_leaves_out_is_where_it_says(mesh42):
    """Rows and those counted at the end are all of the attribute that the report names."""
    f = xmap(
        lambda *vs: [jnp.sin(v) for v in vs], ["i", ...], ["i", ...], axis_resources={"i": "x"}
    )
    with mesh42:
        plan = f.plan(*[shaped(8, 1 + k) for k in range(70)])
    left_out = re.findall(r"\.\.\. and (\d+) more: see (plan\.\w+)", re.sub(r"\s+", " ", str(plan)))
    assert [where for _, where in left_out] == ["plan.arguments", "plan.results"]
    for count, where in left_out:
        assert len(getattr(plan, where.removeprefix("plan."))) - int(count) >= 11
    drawn = re.findall(r"\.\.\. and (\d+) more: see (plan\.\w+)", plan.svg())
    assert drawn == [("10", "plan.arguments"), ("10", "plan.results")]
    steps = xmap_compat.plan(
        lambda v: [f(v[: 8 * k]) for k in range(1, 15)], shaped(112, 3), mesh=mesh42
    )
    assert (
        "... and 3 more: see plan.calls" in re.sub(r"\s+", " ", str(steps))
        and len(steps.calls) == 14
    )


def test_positions_are_whole(mesh42):
    where = f"test_plan.py:{line_of(wide, 'softmax')}"
    assert len(re.findall(rf"(?<!\S){where}(?!\S)", str(wide_plan(mesh42)))) == 2


def test_the_report_says_it_all(mesh42):
    with mesh42:
        report = str(xmap(matmul, **MATMUL, axis_resources={"i": "x", "k": "y"}).plan(*MATMUL_ARGS))
    words = re.sub(r"\s+", " ", report)
    for text in (
        "plan of matmul: mesh x: 4, y: 2 (8 cpu devices)",
        "i 8 x 2 shard_map over x, vmap of 2",
        "j 6 - 6 vmap of 6",
        "a f32[8,4] f32[2,2] P('x', 'y') [i, k]",
        "b f32[4,6] f32[2,6] P('y') [k, j]",
        "result f32[8,6] f32[2,6] P('x') [i, j]",
        "all-reduce over y",
        f"test_plan.py:{line_of(matmul, 'pdot')}",
        "each device holds 112 B of arguments and results",
        "in all, each device sends 48 B",
    ):
        assert text in words


def test_shared_loops_are_named_in_the_report():
    with serial_loop("chunks", 2):
        f = xmap(
            lambda a, b: (a * 2, b * 3),
            (["i"], ["j"]),
            (["i"], ["j"]),
            axis_resources={"i": "chunks", "j": "chunks"},
        )
        plan = f.plan(shaped(4), shaped(6))
    assert [(a.loops, a.loop_sizes, a.local_size) for a in plan.axes] == [
        (("chunks",), (2,), 2),
        (("chunks",), (2,), 3),
    ]
    assert "chunks" in str(plan)


# -------------------------------------------------------------------------- the pictures

LAYOUTS = [
    # mesh shape, array shape, spec
    ((8,), (16, 3), P("x")),
    ((4, 2), (8, 6), P("x", "y")),
    ((4, 2), (8, 6), P("y")),
    ((4, 2), (6, 8), P(None, "x")),
    ((4, 2), (8, 6), P(("x", "y"))),
    ((4, 2), (6, 8), P(None, ("y", "x"))),
    ((4, 2), (), P()),
    ((4, 2), (5, 8, 3), P(None, "x")),
    ((2, 2, 2), (4, 4, 4), P("x", "y", "z")),
    ((2, 2, 2), (4, 3, 4, 4), P("z", None, "x", "y")),
]


def identity_plan(mesh_shape, shape, spec):
    """The plan of an identity whose argument lies as a PartitionSpec says."""
    named = {k: f"axis{k}" for k, entry in enumerate(spec) if entry is not None}
    with Mesh(grid(*mesh_shape), tuple("xyz"[: len(mesh_shape)])):
        resources = {name: spec[k] for k, name in named.items()}
        # A second argument, for an array that is not split uses no mesh by itself.
        f = xmap(
            lambda a, b: (a, b),
            (named, ["all"]),
            (named, ["all"]),
            axis_resources={**resources, "all": tuple("xyz"[: len(mesh_shape)])},
        )
        return f.plan(shaped(*shape), shaped(8))


@pytest.mark.parametrize("mesh_shape, shape, spec", LAYOUTS, ids=map(str, LAYOUTS))
def test_blocks_are_on_the_devices_that_jax_puts_them_on(mesh_shape, shape, spec):
    plan = identity_plan(mesh_shape, shape, spec)
    array = plan.arguments[0]
    expected = {}
    for device, index in NamedSharding(plan.mesh, spec).devices_indices_map(shape).items():
        starts = [s.start or 0 for s in index]
        block = tuple(start // size for start, size in zip(starts, array.device_shape))
        expected.setdefault(block, set()).add(device.id)
    ids = [d.id for d in plan.mesh.devices.flat]
    holders = block_holders(array, plan.mesh)
    found = {block: {ids[k] for k in holders[block]} for block in np.ndindex(holders.shape[:-1])}
    assert array.spec == PartitionSpec(*spec)
    assert found == expected


SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan):
    """The SVG as a tree; every rectangle with a tip as ``(tip, fill)``."""
    tree = ElementTree.fromstring(plan.svg())
    tips = [
        (r.find(f"{SVG}title").text, r.get("fill"))
        for r in tree.iter(f"{SVG}rect")
        if r.find(f"{SVG}title") is not None
    ]
    return tree, tips


@pytest.mark.parametrize("mesh_shape, shape, spec", LAYOUTS, ids=map(str, LAYOUTS))
def test_blocks_have_the_colours_of_their_devices(mesh_shape, shape, spec):
    _, tips = drawn(identity_plan(mesh_shape, shape, spec))
    colour = {int(m[1]): fill for tip, fill in tips if (m := re.fullmatch(r"device (\d+)", tip))}
    assert len(set(colour.values())) == 8
    blocks = [(m[1], fill) for tip, fill in tips if (m := re.search(r" on device (.*)$", tip))]
    assert blocks
    for devices, fill in blocks:
        if devices == "0-7":
            assert fill is None  # a plain sheet
            continue
        held = [
            re.fullmatch(r"hsl\((\d+),60%,(\d+)%\)", colour[int(d)]).groups()
            for d in devices.split()
        ]
        hues, mean = {hue for hue, _ in held}, np.mean([int(shade) for _, shade in held])
        hue, saturation, lightness = re.fullmatch(r"hsl\((\d+),(\d+)%,(\d+)%\)", fill).groups()
        assert (saturation, hue in hues) == ("60", True) if len(hues) == 1 else saturation == "0"
        assert int(lightness) == pytest.approx(mean if len(hues) == 1 else 50 + mean / 2, abs=1)
    assert len({fill for _, fill in blocks}) == len({devices for devices, _ in blocks})


def test_what_all_devices_hold_is_plain_and_says_how_many_they_are(mesh42):
    scaled = xmap(lambda v, w: v * w, (["i"], [...]), ["i"], axis_resources={"i": "x"})
    with mesh42:
        tree, tips = drawn(scaled.plan(shaped(8), shaped()))
    texts = [t.text for t in tree.iter(f"{SVG}text")]
    assert (texts.count("all 8 devices"), texts.count("0 1"), texts.count("0-7")) == (1, 2, 0)
    assert [fill for tip, fill in tips if tip.endswith("0-7")] == [None]
    assert not list(tree.iter(f"{SVG}pattern"))


def test_the_picture_stands_alone(mesh42, tmp_path):
    plan = wide_plan(mesh42)
    plan.save_svg(tmp_path / "plan.svg")
    written = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert written == plan.svg()
    tree = ElementTree.fromstring(written)
    assert {e.tag.removeprefix(SVG) for e in tree.iter()} <= {
        *("svg", "title", "style", "rect", "text", "path")
    }
    width, height = float(tree.get("width")), float(tree.get("height"))
    for text in tree.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")
    labels = {text.text for text in tree.iter(f"{SVG}text")}
    assert {
        "wide",
        "mesh",
        "↓ x 4",
        "→ y 2",
        "x",
        "↓ batch 8 over x, y",
        "→ features of the inputs 12345",
    } <= labels


def test_arrays_are_drawn_in_proportion_and_copies_are_counted(mesh42):
    f = xmap(
        lambda w, v: (w, v),
        (["i", "j"], ["k"]),
        (["i", "j"], ["k"]),
        axis_resources={"j": "y", "k": ("x", "y")},
    )
    with mesh42:
        tree, _ = drawn(f.plan(shaped(784, 512), shaped(8)))
    edges = [r for r in tree.iter(f"{SVG}rect") if r.get("class") == "edge"]
    width, height = (float(edges[1].get(side)) for side in ("width", "height"))
    assert height / width == pytest.approx(784 / 512, rel=0.01)
    texts = [t.text for t in tree.iter(f"{SVG}text")]
    assert texts.count("each block on 4 devices") == 2  # w, as an argument and as a result
    lefts = {round(float(r.get("x"))) for r in edges}
    assert len(lefts) == 2  # one grid of two columns


def test_arrays_that_lie_alike_are_one_drawing_with_all_names_if_these_are_short(mesh42):
    def names(*keys):
        f = xmap(
            lambda w: sum(w.values()),
            ({key: ["i"] for key in keys},),
            ["i"],
            axis_resources={"i": "x"},
        )
        with mesh42:
            tree, _ = drawn(f.plan({key: shaped(8) for key in keys}))
        return [t.text for t in tree.iter(f"{SVG}text") if t.get("class") == "bold"]

    assert "w['k'], w['q']" in names("q", "k")
    assert "w['keys_of_a_head'] + 1 alike" in names("queries_of_a_head", "keys_of_a_head")


def test_large_splits_keep_their_text():
    f = xmap(matmul, **MATMUL, axis_resources={"i": "x", "j": "y"})
    plan = f.plan(
        shaped(256, 64), shaped(64, 256), mesh=jax.sharding.AbstractMesh((16, 16), ("x", "y"))
    )
    texts = [t.text for t in ElementTree.fromstring(plan.svg()).iter(f"{SVG}text")]
    assert all(texts.count(str(k)) == 2 for k in range(256))  # in the mesh and in the result
    assert {"240-255", "15…"} <= {*texts}


RANGES = {
    (3,): "3",
    (1, 0): "0 1",
    (0, 1, 2, 5): "0-2 5",
    (0, 2, 4, 6): "0 2 4 6",
    tuple(range(16)): "0-15",
}


@pytest.mark.parametrize("numbers", RANGES, ids=str)
def test_lists_of_devices_are_short(numbers):
    assert ranges(numbers) == RANGES[numbers]


BYTES = {
    None: "unknown",
    0: "0 B",
    1023: "1023 B",
    1024: "1 KiB",
    1536: "1.5 KiB",
    12_345_678: "11.8 MiB",
    1000 * 2**20: "1000 MiB",
    1023 * 2**20 + 2**19: "1 GiB",
    2**50: "1 PiB",
}


@pytest.mark.parametrize("count", BYTES)
def test_bytes_have_units_that_a_person_reads(count):
    assert show_bytes(count) == BYTES[count]
