"""The plan of a call tells the truth, executes nothing, and is drawn rightly.

What a plan says is compared with what JAX says of the same call: shardings and shard shapes of real results,
``NamedSharding``'s map of devices to indices, and the collectives that it lowers the call to.
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

from xmap_compat import Mesh, SerialLoop, pdot, xmap


def matmul(a, b):
    return pdot(a, b, "k")


def matmul_over(resources):
    return xmap(matmul, (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources=resources)


MATMUL_ARGS = (shaped(8, 4), shaped(4, 6))


def line_of(function, text):
    """The number of the line of a function's source that contains some text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


def words_of(plan):
    return " ".join(str(plan).split())


# ---------------------------------------------------------------------- axes and arrays

AXES = {
    # resources: (on each device, at once, in words)
    (): (8, 8, "vmap of 8"),
    ("x", "y"): (1, 1, "shard_map over x, y"),
    ("x",): (2, 2, "shard_map over x, vmap of 2"),
    (SerialLoop(4),): (8, 2, "loop of 4, vmap of 2"),
    (SerialLoop(8),): (8, 1, "loop of 8"),
    ("y", SerialLoop(2)): (4, 2, "shard_map over y, loop of 2, vmap of 2"),
}


@pytest.mark.parametrize("resources", AXES, ids=str)
def test_each_axis_says_how_it_is_executed(resources, mesh42):
    device_size, local_size, words = AXES[resources]
    f = xmap(jnp.sin, ["i", ...], ["i", ...], axis_resources={"i": resources})
    with mesh42:
        plan = f.plan(shaped(8, 3))
    (axis,) = plan.axes
    assert (axis.name, axis.size) == ("i", 8)
    assert (axis.device_size, axis.local_size) == (device_size, local_size)
    assert re.search(rf"(?m)^i +8 +{words}$", str(plan))


ASSIGNMENTS = [{}, {"i": "x"}, {"i": ("y", "x")}, {"i": "x", "j": "y"}, {"k": "y", "i": "x"}]


@pytest.mark.parametrize("resources", ASSIGNMENTS, ids=str)
def test_arrays_are_where_the_call_puts_them(resources, mesh42):
    f = matmul_over(resources)
    with mesh42 as mesh:
        plan = f.plan(*MATMUL_ARGS)
        out = f(np.ones((8, 4), np.float32), np.ones((4, 6), np.float32))
        compiled = f.lower(*MATMUL_ARGS).compile()
    (result,) = plan.results
    assert (result.shape, result.dtype) == (out.shape, out.dtype)
    assert {s.data.shape for s in out.addressable_shards} == {result.device_shape}
    if not resources:
        assert plan.mesh is None
        assert {a.spec for a in (*plan.arguments, result)} == {None}
        assert [a.device_shape for a in plan.arguments] == [(8, 4), (4, 6)]
        return
    assert plan.mesh == mesh
    assert result.spec == out.sharding.spec
    for array, sharding in zip(plan.arguments, compiled.input_shardings[0]):
        ours = NamedSharding(mesh, array.spec)
        assert ours.is_equivalent_to(sharding, len(array.shape))
        assert array.device_shape == sharding.shard_shape(array.shape)


def test_arrays_have_paths_names_and_types():
    def f(params, *rest):
        return {"a": params["w"][0], "b": rest[1]}

    axes = ({"w": [["i", ...]]}, [...], ["i", None, "j"])
    f = xmap(f, axes, {"a": ["i", ...], "b": {1: "j", 2: "i"}})
    numbers = shaped(2, 4, 5, dtype=np.int32)
    plan = f.plan({"w": [shaped(2, 3)]}, shaped(dtype=jnp.bfloat16), numbers)
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
        assert str(plan) and plan._repr_svg_()
        assert (calls, compilations) == ([], [])
        jax.block_until_ready(f(np.arange(8.0, dtype=np.float32)))
        jax.effects_barrier()
    assert calls and compilations
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.function = "g"


# ------------------------------------------------------------------------- collectives

# Bodies over an axis i of 8 elements with 4 float32 each (16 where they are cut), and what they become on 4 devices of
# 2 elements each (over x) and on 8 devices (over x, y).  On one device nothing moves.
COLLECTIVES = """
psum         | lax.psum(x, 'i')                              | all-reduce      | all-reduce
psum         | lax.psum(x, ('i', 0))                         | all-reduce      | all-reduce
psum         | lax.psum(jnp.float32(2) + 0 * jnp.ones(4), 'i') | -             | -
all_gather   | lax.all_gather(x, 'i', axis=1)                | all-gather      | all-gather
ppermute     | lax.ppermute(x, 'i', ROTATION)                | ppermute        | ppermute
ppermute     | lax.ppermute(x, 'i', [(k, k) for k in range(8)]) | -            | ppermute
ppermute     | lax.pshuffle(x, 'i', [1, 0, 3, 2, 5, 4, 7, 6]) | -              | ppermute
psum_scatter | lax.psum_scatter(x, 'i', tiled=True)          | reduce-scatter  | reduce-scatter
all_to_all   | lax.all_to_all(x, 'i', 0, 0, tiled=True)      | all-to-all      | all-to-all
pbroadcast   | lax.pbroadcast(x, 'i', 3)                     | all-reduce      | all-reduce
pdot         | pdot(x, x, 'i')                               | all-reduce      | all-reduce
axis_index   | lax.axis_index('i')                           | -               | -
psum         | lax.psum(x, 'i', axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]) | all-gather | all-gather
"""
ROTATION = [(k, (k + 1) % 8) for k in range(8)]
ROWS = [tuple(map(str.strip, row.split("|"))) for row in COLLECTIVES.strip().splitlines()]
REDUCED = re.compile(r"psum\((?!.*groups)|pdot|all_gather|pbroadcast")
PLACES = {(): 1, ("x",): 4, ("x", "y"): 8}
MOVES = {
    "all-reduce": ("all_reduce", lambda size, n: 2 * math.ceil(size * (n - 1) / n)),
    "all-gather": ("all_gather", lambda size, n: size * (n - 1)),
    "reduce-scatter": ("reduce_scatter", lambda size, n: size * (n - 1) // n),
    "all-to-all": ("all_to_all", lambda size, n: size * (n - 1) // n),
    "ppermute": ("collective_permute", lambda size, n: size),
}


def lowered_moves(text):
    """``(kind, type on a device)`` of each collective in a StableHLO program."""
    operand = re.compile(r": \(tensor<((?:\d+x)*)\w+>")
    for kind, (name, _) in MOVES.items():
        for found in re.finditer(rf'"stablehlo\.{name}"', text):
            shape = operand.search(text, found.end())[1]
            yield kind, math.prod(map(int, shape.split("x")[:-1]))


def planned_moves(plan):
    for transfer in plan.transfers:
        shape = re.fullmatch(r"f32\[(.*)\]|i32\[(.*)\]", transfer.operand)
        sizes = (shape[1] or shape[2] or "").split(",")
        for _ in range(transfer.times):
            yield transfer.kind, math.prod(map(int, filter(None, sizes)))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_each_collective_says_what_moves_for_it(row, place, mesh42):
    """And this is what JAX lowers the call to."""
    name, body, *kinds = row
    kind = ["-", *kinds][len(place)]
    size = 16 if "tiled" in body else 4
    # A result that varies as it comes needs no operation where it leaves.
    out_axes = [...] if REDUCED.search(body) else ["i", ...]
    fun = eval(f"lambda x: {body}")
    f = xmap(fun, ["i", ...], out_axes, axis_resources={"i": place})
    with mesh42:
        plan = f.plan(shaped(8, size))
        text = f.lower(shaped(8, size)).as_text()
    (collective,) = plan.collectives
    assert (collective.primitive, collective.axes) == (name, ("i",))
    assert sorted(planned_moves(plan)) == sorted(lowered_moves(text))
    if kind == "-":
        assert (collective.became, plan.bytes_sent) == ("no transfer", 0)
        return
    assert collective.became == f"{kind} over {', '.join(place)}"
    _, rule = MOVES[kind]
    sizes = [4 * elements for _, elements in lowered_moves(text)]
    assert collective.bytes_sent == sum(rule(size, PLACES[place]) for size in sizes)


def test_collectives_name_the_line_of_the_user(mesh42):
    def helper(x):
        return jax.nn.logsumexp(x, axis="j")

    def f(x):
        total = lax.psum(x, "i")
        return jax.jit(helper)(total)

    with mesh42:
        plan = xmap(f, ["i", "j"], [...], axis_resources={"j": "y"}).plan(shaped(4, 6))
    places = [(c.primitive, c.where.line) for c in plan.collectives]
    in_helper = line_of(helper, "logsumexp")
    in_f = line_of(f, "lax.psum")
    assert places == [("psum", in_f), ("pmax", in_helper), ("psum", in_helper)]
    assert {c.where.file for c in plan.collectives} == {__file__}
    assert f"test_plan.py:{in_f}" in str(plan)


def summed(x):
    return lax.psum(x, "i")


def in_scan(x):
    return lax.scan(lambda c, t: (c + summed(t), None), jnp.zeros(()), x)[0]


def in_while(x):
    return lax.while_loop(lambda c: c.max() < 9, lambda c: c + summed(x), lax.pmax(x, "i"))


def in_cond(x):
    is_positive = lax.pmax(x[0], ("i", "j")) > 0
    return lax.cond(is_positive, summed, lambda v: lax.pmax(v, "i"), x)


def called_twice(x):
    g = jax.jit(summed)
    return g(x) + g(x * 2)


TURNS = {
    # body, loop over j: what becomes of each psum over i
    (in_scan, 1): ["all-reduce over x (3 times)"],
    (in_scan, 5): ["all-reduce over x (15 times)"],
    (in_while, 1): ["all-reduce over x (each iteration)"],
    (in_cond, 1): ["all-reduce over x (in a branch)"],
    (summed, 5): ["all-reduce over x (5 times)"],
    (called_twice, 1): ["all-reduce over x"] * 2,
}


@pytest.mark.parametrize("case", TURNS, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_turns_and_branches_are_counted(case, mesh42):
    body, loops = case
    resources = {"i": "x"}
    if loops > 1:
        resources["j"] = SerialLoop(loops)
    f = xmap(body, ["i", "j", ...], ["j", ...], axis_resources=resources)
    with mesh42:
        plan = f.plan(shaped(4, 5, 3))
    assert [c.became for c in plan.collectives if c.primitive == "psum"] == TURNS[case]
    if body is in_while:
        assert plan.bytes_sent is None
        assert "in each iteration of a while loop" in words_of(plan)
        return
    assert plan.bytes_sent == sum(t.bytes_sent * t.times for t in plan.transfers)


def test_equal_transfers_of_one_collective_are_one_word(mesh42):
    """Every device sends one element to the next and one to the one before: two rounds alike."""
    pairs = []
    for d in range(0, 8, 2):
        pairs.append((d, (d + 2) % 8))
        pairs.append((d + 1, (d - 1) % 8))
    body = lambda x: lax.ppermute(x, "i", pairs)
    with mesh42:
        plan = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "x"}).plan(shaped(8, 3))
    (collective,) = plan.collectives
    assert [(t.kind, t.bytes_sent) for t in collective.transfers] == [("ppermute", 12)] * 2
    assert collective.became == "ppermute over x"
    assert collective.bytes_sent == plan.bytes_sent == 24


def test_a_mesh_of_one_device_moves_nothing():
    f = xmap(summed, ["i"], [], axis_resources={"i": "x"})
    plan = f.plan(shaped(8), mesh=Mesh(jax.devices()[:1], "x"))
    assert str(plan).startswith("plan of summed: mesh x: 1 (1 cpu device)\n")
    assert [c.became for c in plan.collectives] == ["no transfer"]


# ---------------------------------------------------------------------------- nested calls

NESTED = {
    (): "vmap of 6",
    ("y",): "shard_map over y, vmap of 3",
    (SerialLoop(3),): "loop of 3, vmap of 2",
    ("y", SerialLoop(3)): "shard_map over y, loop of 3",
}


@pytest.mark.parametrize("resources", NESTED, ids=str)
def test_nested_calls_are_in_the_plan_of_the_outer_one(resources, mesh42):
    inner = xmap(lambda v: v * 2, ["k"], ["k"], axis_resources={"k": resources})
    body = lambda v: jax.jit(lambda w: inner(w) + 1)(v) + inner(v)
    outer = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        jax.eval_shape(outer, shaped(4, 6))  # then JAX has traces of the inner functions
        outer.plan(shaped(4, 6))  # and traces of them in a plan
        plan = outer.plan(shaped(4, 6))
    (nested,) = plan.nested
    assert [axis.name for axis in plan.axes] == ["i"]
    assert (nested.function, nested.axes[0].size) == ("<lambda>", 6)
    assert f"k of <lambda> 6 {NESTED[resources]}" in words_of(plan)


def test_a_nested_call_is_found_wherever_it_is():
    inner = xmap(lambda v: v * 3, ["k"], ["k"], axis_resources={"k": SerialLoop(2)})
    middle = xmap(lambda v: inner(v).sum(), ["j", ...], ["j"])

    def f(v):
        loss = lambda w: jax.vmap(middle)(jnp.stack([w, w])).sum()
        return lax.scan(lambda c, row: (c + inner(row), None), jax.grad(loss)(v)[0], v)[0]

    plan = xmap(f, ["i", ...], ["i", ...]).plan(shaped(2, 3, 4))
    sizes = {(axis.name, *axis.loop_sizes) for call in plan.nested for axis in call.axes}
    assert sizes == {("j",), ("k", 2)}


# ---------------------------------------------------------------------------- the report


def training_step(params, x):
    """The mean of every gradient over a batch."""
    loss = lambda p: sum(jnp.vdot(w[: len(x)], x) ** 2 for w in p.values())
    means = jax.tree.map(lambda g: lax.pmean(g, "batch"), jax.grad(loss)(params))
    return jax.tree.map(jnp.subtract, params, means)


def test_a_plan_with_a_hundred_parameters_fits_a_screen(mesh42):
    f = xmap(training_step, ({}, ["batch", ...]), {}, axis_resources={"batch": "x"})
    params = {f"w{k:03}": shaped(8 + k % 5) for k in range(100)}
    with mesh42:
        plan = f.plan(params, shaped(8, 4))
    assert len(str(plan).splitlines()) <= 60
    for k in range(5):
        row = f"params['w{k:03}'] + 39 alike f32[{8 + k}] f32[{8 + k}] [.]"
        assert row in words_of(plan)
    each = [2 * math.ceil(4 * (8 + k) * 3 / 4) for k in range(5)]
    assert (len(plan.collectives), plan.bytes_sent) == (100, 20 * sum(each))
    where = f"test_plan.py:{line_of(training_step, 'lax.pmean')}"
    assert f"psum over batch 100 {where}" in words_of(plan)
    assert len(re.findall(r"bold\">[^<]* \+ 39 alike<", plan.svg())) == 5


def test_the_report_says_it_all(mesh42):
    with mesh42:
        plan = matmul_over({"i": "x", "k": "y"}).plan(*MATMUL_ARGS)
    where = f"test_plan.py:{line_of(matmul, 'pdot')}"
    assert words_of(plan) == (
        "plan of matmul: mesh x: 4, y: 2 (8 cpu devices) "
        "AXIS SIZE EXECUTED BY i 8 shard_map over x, vmap of 2 "
        "k 4 shard_map over y, vmap of 2 j 6 vmap of 6 "
        "ARRAY TYPE ON A DEVICE DIMENSIONS a f32[8,4] f32[2,2] [i, k] "
        "b f32[4,6] f32[2,6] [k, j] result f32[8,6] f32[2,6] [i, j] "
        "COLLECTIVE TIMES WHERE BECAME BYTES SENT "
        f"pdot over k 1 {where} all-reduce over y 48 B "
        "each device holds 112 B of arguments and results "
        "in all, each device sends 48 B over y"
    )


# -------------------------------------------------------------------------- the pictures

LAYOUTS = [
    # mesh shape, array shape, spec
    ((8,), (16, 3), P("x")),
    ((4, 2), (8, 6), P("x", "y")),
    ((4, 2), (8, 6), P("y")),
    ((4, 2), (6, 8), P(None, ("y", "x"))),
    ((4, 2), (), P()),
    ((4, 2), (5, 8, 3), P(None, "x")),
    ((2, 2, 2), (4, 3, 4, 4), P("z", None, "x", "y")),
]


def identity_plan(mesh_shape, shape, spec):
    """The plan of an identity whose argument lies as a PartitionSpec says."""
    axes = tuple("xyz"[: len(mesh_shape)])
    resources = {"all": axes}
    named = {}
    for k, entry in enumerate(spec):
        if entry is not None:
            named[k] = f"axis{k}"
            resources[f"axis{k}"] = entry
    # A second argument, for an array that is not split uses no mesh by itself.
    both = (named, ["all"])
    f = xmap(lambda a, b: (a, b), both, both, axis_resources=resources)
    with Mesh(np.array(jax.devices()).reshape(mesh_shape), axes):
        return f.plan(shaped(*shape), shaped(8))


@pytest.mark.parametrize(("mesh_shape", "shape", "spec"), LAYOUTS)
def test_blocks_are_on_the_devices_that_jax_puts_them_on(mesh_shape, shape, spec):
    plan = identity_plan(mesh_shape, shape, spec)
    array = plan.arguments[0]
    assert array.spec == PartitionSpec(*spec)
    expected = {}
    for device, index in NamedSharding(plan.mesh, spec).devices_indices_map(shape).items():
        starts = [s.start or 0 for s in index]
        block = tuple(start // size for start, size in zip(starts, array.device_shape))
        expected.setdefault(block, set()).add(device.id)
    # Blocks are drawn in their order, after those of the mesh.
    tips = re.findall(r"<title>device (.*?)</title>", plan.svg())[8:]
    found = [devices_in(tip) for tip in tips[: len(expected)]]
    assert found == [expected[block] for block in sorted(expected)]


def devices_in(tip):
    """``'0-2 5'`` -> ``{0, 1, 2, 5}``"""
    found = set()
    for run in tip.split():
        first, _, last = run.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


SVG = "{http://www.w3.org/2000/svg}"


def texts_of(tree):
    return [text.text for text in tree.iter(f"{SVG}text")]


def test_the_picture_stands_alone(mesh42, tmp_path):
    with mesh42:
        plan = matmul_over({"i": "x", "k": "y"}).plan(*MATMUL_ARGS)
    plan.save_svg(tmp_path / "plan.svg")
    written = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert written == plan.svg() == plan._repr_svg_()
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in written
    tree = ElementTree.fromstring(written)
    width = float(tree.get("width"))
    height = float(tree.get("height"))
    for text in tree.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height
    where = f"test_plan.py:{line_of(matmul, 'pdot')}"
    assert {
        *("matmul", "mesh", "x 4", "a", "f32[8,4]", "f32[2,2] on a device"),
        *("i 8 over x", "k 4 over y", f"pdot over k: 48 B ({where})", "all-reduce over y"),
        *("each device holds 112 B of arguments and results", "and sends 48 B over y"),
    } <= {*texts_of(tree)}


def test_the_bars_are_as_long_as_what_is_sent(mesh42):
    def body(v):
        total = lax.psum(v, "i")
        return total + lax.psum(v[:1], "i")

    with mesh42:
        plan = xmap(body, ["i", ...], [...], axis_resources={"i": "x"}).plan(shaped(8, 100))
    tree = ElementTree.fromstring(plan.svg())
    bars = [r for r in tree.iter(f"{SVG}rect") if r.get("class") == "sent"]
    assert [float(bar.get("width")) for bar in bars] == pytest.approx([468, 468 / 100], abs=0.1)


def test_arrays_are_drawn_in_proportion_and_what_all_devices_hold_is_plain(mesh42):
    f = xmap(lambda v, w: v * w, (["i", ...], [...]), ["i", ...], axis_resources={"i": "x"})
    with mesh42:
        tree = ElementTree.fromstring(f.plan(shaped(784, 512), shaped(512)).svg())
    blocks = [r for r in tree.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    mesh, rest = blocks[:8], blocks[8:]
    assert len({block.get("fill") for block in mesh}) == 8
    (*rows, whole) = rest[:5]
    height = sum(float(row.get("height")) for row in rows)
    assert height / float(rows[0].get("width")) == pytest.approx(784 / 512, rel=0.01)
    assert (whole.get("fill"), whole.get("class")) == (None, "sheet")
    texts = texts_of(tree)
    assert (texts.count("all"), texts.count("0-1")) == (1, 1)
    assert "v + 1 alike" in texts
