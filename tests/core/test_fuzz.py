"""Random specifications, arguments and resources: a right answer, or an error of ours, and the right one of the two.

A NumPy model (``fuzz_model``) reads what the user wrote, and says the result or that the call should be refused.  No
foreign exception, wrong value or hang passes.  Environment variables:

``XMAP_COMPAT_FUZZ``  how many calls to try (thousands, for a night); without it a fixed few.
``XMAP_COMPAT_SEED``  where to start then; it is printed with a failure, beside hypothesis's own reproduction.
"""

import contextlib
import faulthandler
import math
import os
import sys
import traceback
import warnings

import jax
import numpy as np
import pytest
from fuzz_model import Call, Constant, Index, Leaf, Refused, Total, body_of, is_container
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import xmap_compat
from xmap_compat import Mesh, SerialLoop, serial_loop, xmap

EXAMPLES = int(os.environ.get("XMAP_COMPAT_FUZZ", 0))
SEED = int(os.environ.get("XMAP_COMPAT_SEED", 0))
SECONDS_PER_CALL = 120

# ------------------------------------------------------------------------- right calls

NAMES = ("a", "b", 7)
SIZES = st.fixed_dictionaries(
    {name: st.sampled_from([4, 2, 8, 4, 8, 4, 3, 1, 0]) for name in (*NAMES, "extra")}
)
MESHES = [{"x": 2, "y": 2}, {"x": 2}, {"x": 4, "y": 2}, {"y": 3, "x": 1}, {"x": 8}, None]


def often(draw, percent):
    """True in so many percent of cases; False is simpler."""
    return draw(st.integers(0, 99)) >= 100 - percent


@st.composite
def arrays(draw, sizes):
    """An argument, and the names of its dimensions."""
    if often(draw, 8):
        return draw(st.sampled_from([2, 1.5, True, np.float32(3)])), {}
    names = draw(st.permutations(NAMES))[: draw(st.sampled_from([1, 2, 2, 0]))]
    shape = [(None, size) for size in draw(st.lists(st.integers(1, 3), max_size=2))]
    for name in names:
        size = 5 if often(draw, 2) else sizes[name]
        shape.insert(draw(st.integers(0, len(shape))), (name, size))
    dims = [size for _, size in shape]
    dtype = draw(st.sampled_from([np.float32, np.int32]))
    data = np.arange(math.prod(dims), dtype=dtype).reshape(dims) % 7 - 2
    return data, {k: name for k, (name, _) in enumerate(shape) if name is not None}


@st.composite
def trees(draw, leaves, depth=2):
    """A pytree, mostly a single leaf."""
    kind = draw(st.sampled_from(["leaf"] * 8 + ["tuple", "list", "dict"] * bool(depth) + ["none"]))
    if kind in ("leaf", "none"):
        return draw(leaves) if kind == "leaf" else None
    children = [draw(trees(leaves, depth - 1)) for _ in range(draw(st.sampled_from([1, 2, 2, 0])))]
    if kind == "dict":
        return dict(zip("uv", children))
    return tuple(children) if kind == "tuple" else children


class Meant:
    """A leaf and the names of its dimensions, while trees of them are made."""

    def __init__(self, leaf, names, rank):
        self.leaf, self.names, self.rank = leaf, names, rank


@st.composite
def written(draw, meant):
    """One specification of a leaf, in any of its forms."""
    names, rank = meant.names, meant.rank
    forms = ["dictionary", "open list", "open tuple", "list", *(["tuple"] if rank else [])]
    form = draw(st.sampled_from(forms))
    if form == "dictionary":
        return {k: names[k] for k in draw(st.permutations(sorted(names)))}
    last = 1 + max(names, default=-1)
    length = draw(st.integers(last, max(rank, last))) if "open" in form else rank
    entries = [names.get(k) for k in range(length)] + ([...] if "open" in form else [])
    return tuple(entries) if "tuple" in form else entries


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Meant))


@st.composite
def specs(draw, tree):
    """Specifications for a tree of leaves: of each leaf, or of whole branches where one will do."""
    if tree is None:
        return draw(st.sampled_from([None, {}, ["a", ...]])) if often(draw, 30) else None
    if isinstance(tree, Meant):
        return draw(written(tree))
    below = leaves_of(tree)
    if below and all(m.names == below[0].names for m in below) and draw(st.booleans()):
        return draw(st.sampled_from([dict(below[0].names), open_list(below[0].names)]))
    if isinstance(tree, dict):
        return {k: draw(specs(v)) for k, v in tree.items()}
    return type(tree)(draw(specs(v)) for v in tree)


def open_list(names):
    return [names.get(k) for k in range(1 + max(names, default=-1))] + [...]


@st.composite
def expressions(draw, arguments, known):
    """A result, the axes that it varies over, and its number of positional dimensions."""
    kinds = ["total", "leaf", "reduced", "leaf", "reduced"] if arguments else []
    kind = draw(st.sampled_from([*kinds, "constant", "index"]))
    if kind == "leaf":
        k = draw(st.integers(0, len(arguments) - 1))
        names = arguments[k].names
        return Leaf(k), set(names.values()), arguments[k].rank - len(names)
    if kind == "index":
        strings = [n for n in known if n != 7]
        name = "nope" if often(draw, 3) else draw(st.sampled_from(strings))
        return Index(name), {name}, 0
    if kind == "constant":
        return Constant(draw(st.integers(1, 3))), set(), 1
    some = {"min_size": 1, "max_size": 2, "unique": True}
    indices = draw(st.lists(st.integers(0, len(arguments) - 1), **some))
    names = {n for k in indices for n in arguments[k].names.values()}
    if kind == "total":
        return Total(tuple(indices)), names, 0
    candidates = sorted({str(n) for n in names - {7}} or {"a"})
    likely = st.sampled_from([*candidates, *candidates, "extra"])
    over = draw(st.lists(likely, **some))
    if often(draw, 5):
        over.append(draw(st.sampled_from(["nope", over[0]])))
    return Total(tuple(indices), tuple(over)), names - set(over), 0


@st.composite
def results(draw, arguments, known):
    """A result with a place for each of its names, and perhaps for more or fewer."""
    expression, names, positional = draw(expressions(arguments, known))
    wanted = set(names)
    if often(draw, 25):
        wanted.add(draw(st.sampled_from(known)))
    if wanted and often(draw, 8):
        wanted.discard(draw(st.sampled_from(sorted(wanted, key=str))))
    rank = positional + len(wanted)
    positions = draw(st.permutations(range(rank)))[: len(wanted)]
    return Meant(expression, dict(zip(positions, sorted(wanted, key=str))), rank)


@st.composite
def resources_of(draw, size, mesh, loop):
    """Resources for an axis, mostly such that divide its size."""
    lengths = {**(mesh or {}), **({"l": loop} if loop else {})}
    likely = st.sampled_from([*lengths, *lengths, SerialLoop(2)])
    entries = list(dict.fromkeys(draw(st.lists(likely, min_size=1, max_size=2))))
    if not often(draw, 8):
        entries.sort(key=lambda r: isinstance(r, SerialLoop) or r == "l")
        lengths |= {r: r.length for r in entries if isinstance(r, SerialLoop)}
        while size % math.prod(lengths[r] for r in entries):
            entries.pop()
    if len(entries) == 1 and draw(st.booleans()):
        return entries[0]
    return draw(st.sampled_from([tuple, list]))(entries)


@st.composite
def calls(draw):
    """A call that is right in most respects."""
    sizes = draw(SIZES)

    def as_meant(pair):
        return Meant(pair[0], pair[1], np.ndim(pair[0]))

    count = draw(st.sampled_from([1, 2, 2, 3, 0]))
    args = tuple(draw(trees(arrays(sizes).map(as_meant))) for _ in range(count))
    arguments = leaves_of(args)
    known = sorted({n for m in arguments for n in m.names.values()} | {"extra"}, key=str)
    outs = draw(trees(results(arguments, known)))
    mesh, loop = draw(st.sampled_from(MESHES)), draw(st.sampled_from([None, None, 2]))
    in_axes, out_axes = draw(specs(args)), draw(specs(outs))
    if type(in_axes) is tuple and draw(st.booleans()):
        in_axes = list(in_axes)
    mentioned = [n for n in (*NAMES, "extra") if n == "extra" or n in known or often(draw, 10)]
    given = {n: sizes[n] for n in mentioned if n == "extra" or draw(st.booleans())}
    placed = [n for n in mentioned if often(draw, 60)]
    axis_resources = {n: draw(resources_of(sizes[n], mesh, loop)) for n in placed}

    def plain(tree):
        return jax.tree.map(lambda m: m.leaf, tree, is_leaf=lambda x: isinstance(x, Meant))

    return Call(plain(args), in_axes, out_axes, plain(outs), given, axis_resources, mesh, loop)


# ------------------------------------------------------------------------- damaged calls


def values(text):
    names = {"np": np, "PartitionSpec": PartitionSpec, "SerialLoop": SerialLoop}
    return [eval(line, names) for line in text.strip().splitlines()]


STRANGE_SPECS = values("""
0
"a"
None
...
object()
np.int64(1)
1.5
b"a"
{"a"}
PartitionSpec("a")
PartitionSpec()
[]
{}
()
[...]
[None]
(None, ...)
[[]]
([],)
{"u": []}
[{}]
[..., ...]
["a"]
["a", "a"]
["a", ..., "b"]
[..., "a"]
[None, "a", ...]
["nope", ...]
["a", "b", 7, ...]
[("a", "b"), ...]
[["a"], ...]
[{"a"}, ...]
[PartitionSpec("a")]
[None, None, None, None, "a", ...]
{0: "a"}
{9: "a"}
{-1: "a"}
{0: "a", 1: "a"}
{"a": 0}
{0.0: "a"}
{True: "a"}
{np.int64(0): "b"}
{0: None}
{0: ...}
{0: ("a", "b")}
{0: ["a"]}
{0: np.zeros(1)}
{0: [{}], "u": [{}]}
{None: "a"}
""")
STRANGE_SIZES = values("""
[3]
"a"
{"a": 2.5}
{"a": True}
{"a": None}
{"a": -1}
{"a": "3"}
{("a",): 1}
{None: 1}
{"a": 5}
None
{}
""")
STRANGE_RESOURCES = values("""
"x"
[("a", "x")]
{"a": None}
{"a": ...}
{"a": {"x"}}
{"a": (("x",),)}
{"a": PartitionSpec("x")}
{"a": "nowhere"}
{"a": ("x", "x")}
{"a": (SerialLoop(2), "x")}
{"a": ["l", "x"]}
{"a": SerialLoop}
{"nope": "x"}
{"nope": "nowhere"}
{"nope": ("x", "x")}
{None: "x"}
{"a": "x", "b": "x"}
{"a": "l", "b": "l"}
{"a": np.zeros(1)}
{"a": 4}
{"a": SerialLoop(3)}
{"b": ("x", SerialLoop(2))}
""")
STRANGE_ARGUMENTS = values("""
()
(None,)
({},)
(np.ones(4),)
(1.0, np.ones((2, 4)))
""")
STRANGE = {
    "axis_sizes": STRANGE_SIZES,
    "axis_resources": STRANGE_RESOURCES,
    "mesh": MESHES,
    "args": STRANGE_ARGUMENTS,
}


@st.composite
def with_a_strange_node(draw, tree):
    """The tree with one of its nodes replaced."""
    if is_container(tree) and tree and draw(st.booleans()):
        if isinstance(tree, dict):
            key = draw(st.sampled_from(list(tree)))
            return {**tree, key: draw(with_a_strange_node(tree[key]))}
        at = draw(st.integers(0, len(tree) - 1))
        return type(tree)(
            draw(with_a_strange_node(x)) if k == at else x for k, x in enumerate(tree)
        )
    return draw(st.sampled_from(STRANGE_SPECS))


@st.composite
def strange_calls(draw):
    """A call with one thing replaced by another, which may be wrong or not."""
    call = draw(calls())
    what = draw(st.sampled_from(["in_axes", "out_axes", *STRANGE]))
    if what in STRANGE:
        setattr(call, what, draw(st.sampled_from(STRANGE[what])))
    else:
        setattr(call, what, draw(with_a_strange_node(getattr(call, what))))
    if what == "args":
        call.results = Constant(2)
    return call


# -------------------------------------------------------------------------------- judging


PACKAGE = os.path.dirname(xmap_compat.__file__)


@contextlib.contextmanager
def whole_tracebacks():
    """Tracebacks end where an error was raised, and not in the file of the user."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def is_ours(error):
    """Raised by the package; or a NameError of JAX's, which is given our words."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return last.filename.startswith(PACKAGE) or "Named axes in scope: " in str(error)


@contextlib.contextmanager
def in_scope(call):
    with contextlib.ExitStack() as stack:
        if call.mesh is not None:
            shape = tuple(call.mesh.values())
            devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
            stack.enter_context(Mesh(devices, tuple(call.mesh)))
        if call.loop is not None:
            stack.enter_context(serial_loop("l", call.loop))
        yield


@contextlib.contextmanager
def no_hang():
    """End the process, with the place, if a call does not."""
    faulthandler.dump_traceback_later(SECONDS_PER_CALL, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def perform(call):
    with warnings.catch_warnings(), in_scope(call), no_hang():
        warnings.simplefilter("error")
        fun = xmap(
            body_of(call.results),
            call.in_axes,
            call.out_axes,
            axis_sizes=call.axis_sizes,
            axis_resources=call.axis_resources,
        )
        return jax.block_until_ready(fun(*call.args))


def placed_on(call):
    """All resources that the call assigns."""
    entries = (call.axis_resources or {}).values()
    return [r for entry in entries for r in (entry if is_container(entry) else [entry])]


def xla_cannot(call):
    """A shard_map all of whose arguments are empty does not compile, by hand neither (jax 0.10 to 0.12)."""
    leaves = jax.tree.leaves(call.args)
    on_mesh = any(r in ("x", "y") for r in placed_on(call))
    return on_mesh and bool(leaves) and all(np.size(x) == 0 for x in leaves)


def judge(call):
    note(f"XMAP_COMPAT_SEED={SEED}\n{call}")
    try:
        expected = call.expected()
    except Refused as reason:
        judge_refusal(call, reason)
        return
    if xla_cannot(call):
        return
    result = perform(call)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected)):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)


def judge_refusal(call, reason):
    try:
        with whole_tracebacks():
            result = perform(call)
    except Exception as error:
        assert is_ours(error) and len(str(error)) > 20, f"foreign: {error!r}"
        return
    raise AssertionError(f"should be refused ({reason}), but gave {result}")


def fuzz(strategy, few):
    def decorate(test):
        options = settings(
            max_examples=EXAMPLES or few,
            deadline=None,
            database=None,
            derandomize=not EXAMPLES,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        test = options(given(strategy)(test))
        return seed(SEED)(test) if EXAMPLES else test

    return decorate


def judge_call(call):
    judge(call)


def judge_strange_call(call):
    judge(call)


test_calls_are_right_or_refused = fuzz(calls(), 80)(judge_call)
test_strange_calls_are_right_or_refused = fuzz(strange_calls(), 140)(judge_strange_call)

# The first calls are those of the tests above.
test_more_calls_are_right_or_refused = pytest.mark.slow(fuzz(calls(), 500)(judge_call))
test_more_strange_calls_are_right_or_refused = pytest.mark.slow(
    fuzz(strange_calls(), 500)(judge_strange_call)
)
