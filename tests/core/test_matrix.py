"""The matrix: every collective and named function, under every placement, in every surrounding, for every dtype.

Products of small tables, so that nothing is listed by hand.  A cell is an :class:`Operation` over an axis (or two), on
an operand that varies over the axis or does not; all cells of a dtype are computed by one xmapped function for each
:class:`Placement` and each mode.  A mode says what surrounds the cells in the body (``INSIDE``) and what is done
with the xmapped function (``OUTSIDE``).

The oracle of values, and by differences of ``jvp``, is NumPy in double precision, on whole arrays; that of other
derivatives is the same function of whole arrays in ``jax.numpy``, differentiated by JAX.  Neither knows of names,
devices or xmap.  What cannot work is in ``CANNOT``, with its error.
"""

import contextlib
import functools
import inspect
import itertools
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sampling import covering

from xmap_compat import Mesh, SerialLoop, xmap
from xmap_compat import lax as xlax
from xmap_compat import numpy as xnp

# ------------------------------------------------------------------------------- placements

MESHES = {
    "8": ((8,), ("x",)),
    "2x2": ((2, 2), ("x", "y")),
    "4x2": ((4, 2), ("x", "y")),
    "4x1x2": ((4, 1, 2), ("x", "o", "y")),
    "2x2x2": ((2, 2, 2), ("x", "y", "z")),
}
SIZES = (8, 4)  # of the axes a and b


class Placement(NamedTuple):
    """Where a and b go.

    Attributes:
      inner: a mesh axis that is left for an xmap inside the xmap.
    """

    resources: dict[str, Any]
    mesh: str = "4x2"
    sizes: tuple[int, int] = SIZES
    inner: str | None = None

    @property
    def looped(self):
        return any(isinstance(r, SerialLoop) for r in self.flat())

    def flat(self):
        for resource in self.resources.values():
            yield from resource if isinstance(resource, tuple) else (resource,)


PLACEMENTS = {
    "none": Placement({}),
    "full": Placement({"a": "x"}, "8"),
    "full over two": Placement({"a": ("x", "y")}),
    "full over two, minor first": Placement({"a": ("y", "x")}),
    "partial": Placement({"a": "x"}, inner="y"),
    "partial over two": Placement({"a": ("x", "y")}, "2x2"),
    "partial over two, minor first": Placement({"a": ("y", "x")}, "2x2"),
    "both full": Placement({"a": "x", "b": "y"}, sizes=(4, 2)),
    "partial and full": Placement({"a": "y", "b": "x"}),
    "both partial": Placement({"a": "x", "b": "y"}),
    "the other": Placement({"b": ("x", "y")}, "2x2"),
    "size one": Placement({"a": "o"}, "4x1x2", inner="y"),
    "size one and two more": Placement({"a": ("y", "o"), "b": "x"}, "4x1x2"),
    "loop": Placement({"b": SerialLoop(2)}),
    "mesh, and a loop": Placement({"a": "x", "b": SerialLoop(2)}, inner="y"),
    "mesh, and a loop within a mesh axis": Placement({"a": "x", "b": ("y", SerialLoop(2))}),
}

# ------------------------------------------------------------------------------- operations


class Operation(NamedTuple):
    """A function over a named axis, and its definition: a paragraph of operations.txt.

    Attributes:
      named: ``(x, axis, n) -> result`` in a body; x has two elements, n participants share the axis.
      parts: ``(numpy or jax.numpy, rows) -> result``; ``rows`` holds what each participant has.  The result has a first
        dimension for the participants, unless the operation removes the axis.
      in_place: for pdot and einsum, what each participant contributes to the sum: inside a body the cotangent is
        used as it is, as in legacy.
      removes: whether the result lacks the axis.
      dtypes: initials of those that it takes.
      one_axis: whether it takes one only.
      smooth: whether its result carries derivatives.
    """

    named: Callable[..., Any]
    parts: Callable[..., Any]
    in_place: Callable[..., Any] | None
    removes: bool
    dtypes: str
    one_axis: bool
    smooth: bool


def operation_in(paragraph):
    """The name of an operation, and what its paragraph says."""
    title, named, parts, *others = paragraph.splitlines()
    name, _, words = title.removeprefix("# ").partition(": ")
    effect, dtypes, *more = words.split()
    in_place = [line.removeprefix("in place: ") for line in others]
    return name, Operation(
        named=function_of("x, axis, n", named),
        parts=function_of("xp, r", parts.removeprefix("= ")),
        in_place=function_of("xp, r", in_place[0]) if in_place else None,
        removes=effect == "removes",
        dtypes=dtypes,
        one_axis="one" in more,
        smooth="index" not in more,
    )


def function_of(parameters, expression):
    return eval(f"lambda {parameters}: {expression}", {**globals(), "nn": jax.nn, "xnp": xnp})


def spread(x, n):
    """One row for each of n participants."""
    return jnp.arange(1, n + 1).astype(x.dtype)[:, None] * x


def spread_rows(xp, rows):
    index = xp.arange(1, 1 + len(rows)).astype(rows.dtype)
    return index[None, :, None] * rows[:, None, :]


def mate(x):
    """A second operand."""
    return x * x + 1


def both(axis):
    """The names, and the first positional dimension."""
    return (*axis, 0) if isinstance(axis, tuple) else (axis, 0)


def braces(axis):
    return "{" + (",".join(axis) if isinstance(axis, tuple) else axis) + "}"


def shuffled(n):
    return np.random.default_rng(n).permutation(n)


def halves(n):
    """Two interleaved groups, one of them listed backwards."""
    return [list(range(0, n, 2)), list(range(1, n, 2))[::-1]]


def by_halves(xp, rows, function):
    """The function of a group, for each of its members."""
    held = {}
    for group in halves(len(rows)):
        held |= dict.fromkeys(group, function(rows[np.array(group)]))
    return xp.stack([held[k] for k in range(len(rows))])


def gaps(xp, x):
    """The same with NaNs in the place of some elements, whole columns among them."""
    return xp.where(x > 0.3, xp.nan, x)


def of_nothing(reduction, x):
    """A reduction that ignores NaN; NumPy warns where nothing is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return reduction(x, axis=0)


def finite(xp, x):
    return xp.where(xp.isnan(x), xp.ones_like(x), x)


def labels(xp, x):
    return xp.round(x).astype(np.int32)


def inner(rows):
    return (rows * mate(rows)).sum(1)


def outer(rows):
    return rows[:, :, None] * mate(rows)[:, None, :]


def unequal(x, axis):
    """A standard deviation has no derivative where all are equal."""
    return x * lax.axis_index(axis).astype(x.dtype)


def unequal_rows(xp, rows):
    return rows * xp.arange(len(rows)).astype(rows.dtype)[:, None]


def times(solution, auxiliary):
    for number in jax.tree.leaves(auxiliary):
        solution = solution * (1 + jnp.max(number))
    return solution


def root_of_half(x, axis, auxiliary):
    """The root of ``2 z = x + the sum of x``, times one more than the numbers beside it."""
    right = x + lax.psum(x, axis)

    def solve(equation, guess):
        return guess - equation(guess) / 2, auxiliary()

    def tangent(linear, y):
        return y / 2

    return times(*lax.custom_root(lambda z: 2 * z - right, 0 * x, solve, tangent, has_aux=True))


def solution_of_half(x, axis, auxiliary):
    right = x + lax.psum(x, axis)

    def solve(_, b):
        return b / 2, auxiliary()

    doubled = functools.partial(jnp.multiply, 2)
    return times(*lax.custom_linear_solve(doubled, right, solve, symmetric=True, has_aux=True))


def half(rows, factor):
    return (rows + rows.sum(0)) / 2 * factor


PARAGRAPHS = Path(__file__).with_name("operations.txt").read_text().split("\n\n")
OPERATIONS: dict[str, Operation] = dict(map(operation_in, PARAGRAPHS))
if jax.__version_info__ < (0, 11, 2):
    # JAX refuses integers beside roots.
    del OPERATIONS["lax.custom_root with an integer"], OPERATIONS["lax.custom_root with a tree"]


def weighted(op):
    """Times the operand's own sum: a cell with derivatives of an operation that has none, such as an index."""

    def parts(xp, rows):
        result = op.parts(xp, rows)
        result = xp.broadcast_to(result, (len(rows), *result.shape)) if op.removes else result
        return rows.sum(1).reshape(-1, *[1] * (result.ndim - 1)) * result.astype(rows.dtype)

    return op._replace(
        named=lambda x, axis, n: x.sum() * op.named(x, axis, n).astype(x.dtype),
        parts=parts,
        removes=False,
    )


# ------------------------------------------------------------------------------------ cells


class Cell(NamedTuple):
    """An operation over an axis or two, on an operand that varies over a, or is alike."""

    operation: str
    axis: tuple[str, ...]
    operand: str

    def __str__(self):
        return f"{self.operation} over {' and '.join(self.axis)}, {self.operand}"


KINDS = {"a": (("a",), "varying"), "alike": (("a",), "alike"), "b and a": (("b", "a"), "varying")}


def applies(cell, dtype):
    op = OPERATIONS[cell.operation]
    return dtype in op.dtypes and (len(cell.axis) == 1 or not op.one_axis)


def operation_of(cell, smooth):
    op = OPERATIONS[cell.operation]
    return weighted(op) if smooth and not op.smooth else op


class Named:
    """Cells in a body: ``call({cell: operand}) -> {cell: result}``."""

    xp = jnp

    def __init__(self, sizes, smooth, inner):
        self.sizes, self.smooth, self.inner = sizes, smooth, inner

    def operand(self, cell, values):
        return values["u"] if cell.operand == "alike" else values["x"] * values["u"]

    def call(self, operands, axis_of=lambda cell: cell.axis):
        results = {}
        for cell, h in operands.items():
            names = axis_of(cell)
            n = math.prod(self.sizes[name] for name in names)
            axis = names if len(names) > 1 else names[0]
            results[cell] = operation_of(cell, self.smooth).named(h, axis, n)
        return results

    def index(self):
        return lax.axis_index("a")

    def two(self, h):
        """The operand, and twice it, along a first positional dimension."""
        return jnp.stack([h, 2 * h])


class Whole:
    """The same on whole arrays, with a leading dimension for each name; results vary over all names if ``spread``."""

    def __init__(self, xp, sizes, smooth, spread):
        self.xp, self.sizes, self.smooth, self.spread = xp, sizes, smooth, spread

    def operand(self, cell, values):
        a, b = self.sizes["a"], self.sizes["b"]
        h = values["u"] if cell.operand == "alike" else values["x"] * values["u"]
        return self.xp.broadcast_to(h, (a, b, *h.shape[-1:]))

    def call(self, operands, axis_of=lambda cell: cell.axis, names="ab", in_place=False):
        return {
            cell: self.one(operation_of(cell, self.smooth), h, axis_of(cell), names, in_place)
            for cell, h in operands.items()
        }

    def one(self, op, h, axis, names, in_place):
        parts, removes = op.parts, op.removes
        if in_place and op.in_place:
            parts, removes = op.in_place, False
        front = [names.index(name) for name in axis]
        rest = [k for k in range(len(names)) if k not in front]
        rows = h.transpose(*rest, *front, len(names))
        sizes = rows.shape[:-1]
        rows = rows.reshape(-1, math.prod(h.shape[k] for k in front), h.shape[-1])

        def on_rows(r):
            return parts(self.xp, r)

        if self.xp is np:
            out = np.stack([on_rows(r) for r in rows])
        else:
            out = jax.vmap(on_rows)(rows)
        if not removes:
            out = out.reshape(*sizes, *out.shape[2:])
            order = [*rest, *front]
            return out.transpose(*np.argsort(order), *range(len(order), out.ndim))
        tail = out.shape[1:]
        out = out.reshape((*(h.shape[k] for k in rest), *tail))
        if not self.spread:
            return out
        out = out.reshape(*(1 if k in front else h.shape[k] for k in range(len(names))), *tail)
        return self.xp.broadcast_to(out, (*h.shape[: len(names)], *tail))

    def index(self):
        return self.xp.arange(self.sizes["a"])[:, None]

    def two(self, h):
        return self.xp.stack([h, 2 * h], 2)

    def twice(self, operands):
        """The results for operands and for twice them, along a first positional dimension."""
        once, again = self.call(operands), self.call(each(lambda h: 2 * h, operands))
        return {cell: self.xp.stack([once[cell], again[cell]], 2) for cell in operands}


def along(values, r):
    """Numbers or truth values of elements, as an array that broadcasts with a result."""
    return values.reshape(-1, *[1] * (r.ndim - 1))


def zeros_like_results(function, operands):
    results = jax.eval_shape(function, operands)
    return jax.tree.map(lambda r: jnp.zeros(r.shape, r.dtype), results)


def each(function, *trees):
    return {cell: function(*(tree[cell] for tree in trees)) for cell in trees[0]}


# -------------------------------------------------------------- what surrounds cells in a body


class Surrounding(NamedTuple):
    """``body(Named, operands)`` and ``oracle(Whole, operands)``, each giving ``{cell: result}``."""

    body: Callable[..., Any]
    oracle: Callable[..., Any]
    smooth: bool = False


def in_scan(named, operands):
    def step(carry, h):
        return (carry + 1, named.call(h))

    return lax.scan(step, 0, each(named.two, operands))[1]


def in_while(named, operands):
    """Elements of odd index take a second step, with what the others then hold."""
    start = zeros_like_results(named.call, operands)
    steps = 1 + named.index() % 2

    def step(state):
        return (state[0] + 1, each(lambda h: 2 * h, state[1]), named.call(state[1]))

    return lax.while_loop(lambda state: state[0] < steps, step, (0, operands, start))[2]


def in_while_oracle(whole, operands):
    xp = whole.xp
    odd = whole.index() % 2 == 1
    first = whole.call(operands)
    second = whole.call(each(lambda h: 2 * h, operands))
    return each(lambda one, two: xp.where(along(odd, one), two, one), first, second)


def in_cond(named, operands):
    """A branch that all take, and within it one that elements of even index take."""

    nothing = functools.partial(zeros_like_results, named.call)

    def some(h):
        return lax.cond(named.index() % 2 == 0, named.call, nothing, h)

    return lax.cond(lax.psum(jnp.int32(1), "a") > 0, some, nothing, operands)


def in_cond_oracle(whole, operands):
    xp = whole.xp
    even = whole.index() % 2 == 0
    results = whole.call(operands)
    return each(lambda r: xp.where(along(even, r), r, xp.zeros_like(r)), results)


def inner_axis(cell):
    """Over the inner axis too: before the outer one, or, where one axis is all that a function takes, instead of it."""
    return ("c",) if OPERATIONS[cell.operation].one_axis else ("c", *cell.axis)


def in_inner(axis_of):
    def body(named, operands):
        def function(h):
            return named.call(h, axis_of)

        mapped = xmap(function, ["c", ...], ["c", ...], axis_resources=named.inner)
        return mapped(each(named.two, operands))

    return body


def jvp_inside(xp_call, operands):
    return jax.jvp(xp_call, (operands,), (each(lambda h: 1 - h, operands),))[1]


def vjp_inside(named, operands):
    results, pull = jax.vjp(named.call, operands)
    return pull(each(lambda r: r * (1 + named.index()).astype(r.dtype), results))[0]


def vjp_inside_oracle(whole, operands):
    results = whole.call(operands)
    factor = 1 + whole.index()
    cotangents = each(lambda r: r * along(factor, r).astype(r.dtype), results)
    _, pull = jax.vjp(functools.partial(whole.call, in_place=True), operands)
    return pull(cotangents)[0]


def own(cell):
    return cell.axis


INSIDE = {
    "plain": Surrounding(Named.call, Whole.call),
    "jit": Surrounding(lambda named, h: jax.jit(named.call)(h), Whole.call),
    "scan": Surrounding(in_scan, Whole.twice),
    "while": Surrounding(in_while, in_while_oracle),
    "cond": Surrounding(in_cond, in_cond_oracle),
    "vmap": Surrounding(lambda named, h: jax.vmap(named.call)(each(named.two, h)), Whole.twice),
    "inner xmap": Surrounding(in_inner(own), Whole.twice),
    "inner xmap over both": Surrounding(
        in_inner(inner_axis), lambda whole, h: whole.call(each(whole.two, h), inner_axis, "abc")
    ),
    "jvp": Surrounding(
        lambda named, h: jvp_inside(named.call, h),
        lambda whole, h: jvp_inside(whole.call, h),
        smooth=True,
    ),
    "vjp": Surrounding(vjp_inside, vjp_inside_oracle, smooth=True),
}

# ----------------------------------------------------------- what is done with the function


def some_like(tree, phase):
    """Tangents or cotangents."""

    def like(leaf):
        steps = np.arange(math.prod(leaf.shape), dtype=np.float32)
        numbers = np.cos(phase + steps).reshape(leaf.shape).astype(leaf.dtype)
        is_complex = np.issubdtype(leaf.dtype, np.complexfloating)
        return numbers * (1 + 1j) if is_complex else numbers

    return jax.tree.map(like, tree)


def doubled(args):
    return jax.tree.map(lambda x: 2 * x, args)


def of_two(fun, args):
    """Of the arguments and of twice them, by ``jax.vmap``."""
    return jax.vmap(fun)(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), args))


def one_by_one(fun, args):
    return jax.tree.map(lambda *rs: np.stack(rs), fun(args), fun(doubled(args)))


def push(fun, args):
    return jax.jvp(fun, (args,), (some_like(args, 1),))[1]


def push_by_differences(fun, args):
    """The same by central differences, for functions of NumPy in double precision."""

    def moved(h):
        return fun(jax.tree.map(lambda x, t: x + h * t, args, some_like(args, 1)))

    return jax.tree.map(lambda f, b: (f - b) / 2e-5, moved(1e-5), moved(-1e-5))


def pull(fun, args):
    results, transpose = jax.vjp(fun, args)
    return transpose(some_like(results, 2))[0]


def forward_over_reverse(fun, args):
    return push(functools.partial(pull, fun), args)


def reverse_over_forward(fun, args):
    return pull(functools.partial(push, fun), args)


class Use(NamedTuple):
    """``run(function, arguments)`` of the xmapped function and, unless there is an ``oracle``, of the oracle."""

    run: Callable[..., Any]
    smooth: bool = True
    oracle: Callable[..., Any] | None = None


OUTSIDE = {
    "value": Use(lambda fun, args: fun(args), smooth=False),
    "vmap": Use(of_two, smooth=False, oracle=one_by_one),
    "jvp": Use(push, oracle=push_by_differences),
    "vjp": Use(pull),
    "second order, forward over reverse": Use(forward_over_reverse),
    "second order, reverse over forward": Use(reverse_over_forward),
}

MODES = [
    *(("plain", outside) for outside in OUTSIDE),
    *((inside, "value") for inside in INSIDE if inside != "plain"),
    *((inside, "vjp") for inside in ["scan", "cond", "inner xmap over both"]),
]

# ---------------------------------------------------------------------------------- running


def run(fun, args):
    return jax.device_get(jax.jit(fun)(args))


DTYPES = {"f": jnp.float32, "b": jnp.bfloat16, "i": jnp.int32, "c": jnp.complex64}
TOLERANCE = {"f": 1e-3, "b": 6e-2, "i": 1e-5, "c": 1e-3}


def draw(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    few = {"i": [-2, -1, 1, 2], "b": [-1, -0.5, 0.5, 1]}
    if dtype in few:
        x = rng.choice(few[dtype], size=shape)
    else:
        x = rng.normal(size=shape)
    if dtype == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(DTYPES[dtype])


@functools.cache
def arguments(dtype, cells, sizes):
    a, b = sizes
    args = {}
    for k, cell in enumerate(cells):
        args[cell] = {"u": draw(dtype, (b, 2), 2 * k)}
        if cell.operand == "varying":
            args[cell]["x"] = draw(dtype, (a, b, 2), 2 * k + 1)
    return args


def kept(cell, inside, smooth):
    """The axes of a result in the out_axes."""
    removes = operation_of(cell, smooth).removes and inside == "plain"
    return [name for name in "ab" if not removes or name not in cell.axis]


def is_smooth(inside, outside):
    return INSIDE[inside].smooth or OUTSIDE[outside].smooth


def is_compound(inside, outside):
    """Whether a derivative is taken of something else than the plain cells."""
    return inside != "plain" and outside != "value"


def results_of(placement, mode, dtype, cells, run=run):
    inside, outside = mode
    smooth = is_smooth(*mode)
    sizes = dict(zip("abc", (*placement.sizes, 2)))
    named = Named(sizes, smooth, {"c": placement.inner} if placement.inner else {})

    def body(values):
        operands = {cell: named.operand(cell, v) for cell, v in values.items()}
        return INSIDE[inside].body(named, operands)

    specs = {"x": ["a", "b", ...], "u": ["b", ...]}
    args = arguments(dtype, cells, placement.sizes)
    in_axes = {cell: {name: specs[name] for name in values} for cell, values in args.items()}
    fun = xmap(
        body,
        (in_axes,),
        {cell: [*kept(cell, inside, smooth), ...] for cell in cells},
        axis_sizes=dict(zip("ab", placement.sizes)),
        axis_resources=placement.resources,
    )
    shape, names = MESHES[placement.mesh]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    with Mesh(devices, names):
        return run(lambda values: OUTSIDE[outside].run(fun, values), args)


@functools.cache
def expected(sizes, mode, dtype, cells):
    """What the oracle says, and the dtypes of results."""
    inside, outside = mode
    smooth = is_smooth(*mode)
    args = arguments(dtype, cells, sizes)

    def positional(xp, values):
        whole = Whole(xp, dict(zip("ab", sizes)), smooth, spread=inside != "plain")
        operands = {cell: whole.operand(cell, v) for cell, v in values.items()}
        return INSIDE[inside].oracle(whole, operands)

    use = OUTSIDE[outside]

    def in_jax(values):
        return use.run(functools.partial(positional, jnp), values)

    types = jax.eval_shape(in_jax, args)
    # Arguments of bfloat16 have ties, where differences are none.
    if smooth and not (inside == "plain" and use.oracle and dtype != "b"):
        wide = jax.tree.map(lambda x: x.astype(np.float32) if dtype == "b" else x, args)
        return run(in_jax, wide), types
    widest = {"i": np.int64, "c": np.complex128}.get(dtype, np.float64)
    wide = jax.tree.map(lambda x: x.astype(widest), args)
    with np.errstate(over="ignore"):
        return (use.oracle or use.run)(functools.partial(positional, np), wide), types


def difference(result, oracle, type_, tolerance):
    """What is wrong with a result, or None."""
    if (result.shape, result.dtype) != (type_.shape, type_.dtype):
        return f"{result.dtype}{result.shape} instead of {type_.dtype}{type_.shape}"
    if np.issubdtype(type_.dtype, np.integer) or type_.dtype == bool:
        return None if (result == oracle.astype(type_.dtype)).all() else "other integers"
    wide = np.complex128 if np.issubdtype(type_.dtype, np.complexfloating) else np.float64
    result, oracle = result.astype(wide), np.asarray(oracle).astype(wide)
    scale = max(1, np.abs(oracle).max(initial=0))
    close = np.isclose(result, oracle, rtol=tolerance, atol=tolerance * scale)
    if close.all():
        return None
    largest = np.abs(result - oracle).max()
    return f"{(~close).sum()} of {close.size} differ, by up to {largest}"


def wrong_cells(placement, mode, dtype, cells):
    """``["cell: what is wrong", ...]``; if the program of all of them raises, each is tried by itself."""
    try:
        results = results_of(placement, mode, dtype, cells)
    except Exception as error:
        if len(cells) == 1:
            return [f"{cells[0]}: {type(error).__name__}: {str(error)[:500]}"]
        each_wrong = [
            text for cell in cells for text in wrong_cells(placement, mode, dtype, (cell,))
        ]
        return each_wrong or [f"only together: {error!r}"]
    oracle, types = expected(placement.sizes, mode, dtype, cells)

    def compare(*leaves):
        return difference(*leaves, TOLERANCE[dtype])

    wrong = []
    for cell in cells:
        found = jax.tree.map(compare, results[cell], oracle[cell], types[cell])
        wrong += [f"{cell}: {text}" for text in jax.tree.leaves(found)]
    return wrong


# ------------------------------------------------------------------------------- the matrix

#: All cells, in about an hour; else each program computes a share of them, so that all pairs are covered.
EVERYTHING = bool(int(os.environ.get("XMAP_COMPAT_MATRIX", 0)))
OTHER_DTYPES = {("plain", "value"): "bic", ("plain", "vjp"): "bc"}
PROGRAMS = [
    (inside, outside, dtype)
    for inside, outside in MODES
    for dtype in ("fbic" if EVERYTHING else "f" + OTHER_DTYPES.get((inside, outside), ""))
    if dtype != "i" or not is_smooth(inside, outside)
]


def is_extra(program):
    """What a half of the placements is enough for."""
    inside, outside, dtype = program
    return dtype != "f" or is_compound(inside, outside)


PROGRAMS_AND_PLACEMENTS = [
    (program, name)
    for p, program in enumerate(PROGRAMS)
    for k, name in enumerate(PLACEMENTS)
    if EVERYTHING or not is_extra(program) or (p + k) % 2 == 0
]


def turn_of(program):
    """``(k, n)``: the program computes every n-th cell, k places on; programs alike take turns."""
    inside, outside, dtype = program
    if dtype != "f":
        return 0, 9
    smooth = is_smooth(inside, outside)
    k = [mode for mode in MODES if is_smooth(*mode) == smooth].index((inside, outside))
    if smooth:
        return 2 * k, 11 if is_compound(inside, outside) else 12
    return k, 4 if (inside, outside) == ("plain", "value") else 13


def chosen_cells(name, program):
    """The cells that a program computes under a placement."""
    dtype = program[2]
    placement = PLACEMENTS[name]
    offset, share = (0, 1) if EVERYTHING else turn_of(program)
    offset += list(PLACEMENTS).index(name)
    return tuple(
        cell
        for i, operation in enumerate(OPERATIONS)
        for k, kind in enumerate(KINDS.values())
        if (i + 5 * k - offset) % share == 0
        for cell in [Cell(operation, *kind)]
        if applies(cell, dtype) and not (placement.looped and "b" in cell.axis)
    )


def program_id(program):
    inside, outside, dtype = program
    return f"{DTYPES[dtype].__name__}-{outside}" + (f" of {inside}" if inside != "plain" else "")


#: Numbers of the programs in which each mode and dtype occurs, and each placement with and without derivatives.
QUICK = covering(
    [
        {"program": program, "placement": (name, is_smooth(*program[:2]))}
        for program, name in PROGRAMS_AND_PLACEMENTS
    ]
)


@pytest.mark.parametrize(
    ("program", "placement"),
    [
        pytest.param(
            program,
            name,
            id=f"{program_id(program)}-{name}",
            marks=[] if k in QUICK else [pytest.mark.slow],
        )
        for k, (program, name) in enumerate(PROGRAMS_AND_PLACEMENTS)
    ],
)
def test_cells_equal_the_oracle(program, placement):
    inside, outside, dtype = program
    cells = chosen_cells(placement, program)
    assert wrong_cells(PLACEMENTS[placement], (inside, outside), dtype, cells) == []


# --------------------------------------------------------------------- nothing is forgotten


def test_the_chosen_cells_cover_all_pairs():
    """Of operation and placement (with and without derivatives), operation and mode, operation and dtype."""
    seen = set()
    for program, name in PROGRAMS_AND_PLACEMENTS:
        mode, dtype = program[:2], program[2]
        for cell in chosen_cells(name, program):
            seen.add((cell.operation, name, is_smooth(*mode)))
            seen |= {(cell.operation, mode), (cell.operation, dtype), (cell, mode)}
    wanted = set(itertools.product(OPERATIONS, PLACEMENTS, [False, True]))
    wanted |= set(itertools.product(OPERATIONS, MODES))
    for name, operation in OPERATIONS.items():
        wanted |= {(name, dtype) for dtype in operation.dtypes}
        cells = [Cell(name, *kind) for kind in KINDS.values()]
        modes = [mode for mode in MODES if not is_compound(*mode)]
        wanted |= {pair for pair in itertools.product(cells, modes) if applies(pair[0], "f")}
    assert wanted - seen == set()


#: Functions of jax.lax with an ``axis_name`` that say what a shard_map sees, and compute nothing over named axes.
OF_SHARD_MAP = {"pcast", "pvary", "psend", "precv"}
if jax.__version_info__ < (0, 10):
    OF_SHARD_MAP.add("all_gather_start")  # of JAX 0.9.1 and 0.9.2 only: half of an all_gather


def over_named_axes(module):
    for name in dir(module):
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            if "axis_name" in inspect.signature(getattr(module, name)).parameters:
                yield name


def test_every_function_is_in_the_matrix():
    """Each that the package exports, and each of jax.lax that takes a name."""
    functions = {name.split()[0] for name in [*OPERATIONS, *CANNOT]}
    assert {f"xlax.{name}" for name in xlax.__all__} <= functions
    assert {f"xnp.{name}" for name in xnp.__all__} <= functions
    assert {f"lax.{name}" for name in {*over_named_axes(lax)} - OF_SHARD_MAP} <= functions


# --------------------------------------------------------------------------- what cannot be


class Cannot(NamedTuple):
    """Why, and the error that says so; ``body(x)`` has axes a and b, b in a serial loop if ``looped``."""

    reason: str
    error: type[Exception]
    message: str
    body: Callable[[Any], Any]
    looped: bool = False


def over_loop(operation):
    return Cannot(
        "the elements of a looped axis are not there at the same time",
        RuntimeError,
        "axes with loop resources assigned to them cannot be referenced inside the xmapped computation",
        lambda x: OPERATIONS[operation].named(x, "b", SIZES[1]),
        looped=True,
    )


def over_two_axes(operation):
    function = operation.split(".")[1]
    return Cannot(
        "an order along one axis, as in NumPy",
        TypeError,
        f"The axis of {function} should be one, named or positional, but got ",
        lambda x: OPERATIONS[operation].named(x, ("a", "b"), math.prod(SIZES)),
    )


#: These name the looped axis, and communicate nothing.
LOOPABLE = {"lax.axis_size", "jnp.einsum with braces"}
ORDERED = ["argmax", "argmin", "argsort", "sort", "cumprod", "cumsum", "flip"]

#: Everything that the matrix lacks, and why; a label starts with the function.
CANNOT = {
    **{
        f"{name} over a looped axis": over_loop(name) for name in OPERATIONS if name not in LOOPABLE
    },
    **{f"xnp.{name} over two axes": over_two_axes(f"xnp.{name}") for name in ORDERED},
    "lax.ragged_all_to_all": Cannot(
        "what each participant holds differs in size, and a named array has one positional shape",
        NotImplementedError,
        "does not know the operation `ragged_all_to_all`, which uses the named axes `a` at .*",
        lambda x: lax.ragged_all_to_all(x, x, *[np.arange(8)] * 4, axis_name="a"),
    ),
}


@pytest.mark.parametrize("label", CANNOT)
def test_what_cannot_be_is_refused_in_words(label):
    cannot = CANNOT[label]
    resources = {"b": SerialLoop(2)} if cannot.looped else {}
    refused = xmap(cannot.body, ["a", "b", ...], ["a", "b", ...], axis_resources=resources)
    with pytest.raises(cannot.error, match=cannot.message):
        refused(np.ones((*SIZES, 2), np.float32))
