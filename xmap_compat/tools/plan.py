"""``f.plan(*args)``: what an xmapped call decides and does, as a value that can be read, printed and drawn.

Nothing is executed or compiled.  The call is staged out (traced) exactly as it would run, by an evaluator that
marks everything that each equation of the named program leaves behind; what is found in the staged program under
a mark tells what each collective over named axes became.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from xmap_compat import _jax, errors, lowering, nested_marks, source
from xmap_compat.axis_specs import AxisName, AxisSpec, argument_path
from xmap_compat.collectives import RULES, mentioned_names
from xmap_compat.named_values import NamedValue
from xmap_compat.resources import DeviceAxis, Placement
from xmap_compat.substitution import STRUCTURED, Evaluator
from xmap_compat.tools import picture
from xmap_compat.tools.listing import Listing, Position, Program, named_type, position_of
from xmap_compat.tools.text import (
    Rows,
    escape,
    grouped,
    html_table,
    listed,
    plural,
    short_type,
    show_bytes,
    show_spec,
    table,
    tally,
)

# A plan of a large program fits a screen; its parts can be printed by themselves.
SCREEN, LEAST_LISTING, MAX_ROWS, MAX_INPUTS, MAX_OPERANDS = 60, 16, 12, 6, 3

# ---------------------------------------------------------------------------- the value


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result.

    Attributes:
      root: the argument that it is (in): ``params``; ``result`` for results.
      keys: the way from there, as in ``jax.tree_util.tree_flatten_with_path``.
      dtype: its element type.
      shape: its global shape.
      axes: for each dimension the named axis, or None where it is positional.
      spec: how it is partitioned over the mesh; None where no mesh is used.
      device_shape: the shape of the part on each device.
    """

    root: str
    keys: tuple[Any, ...]
    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[AxisName | None, ...]
    spec: PartitionSpec | None
    device_shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """``params['w1']``"""
        return argument_path(self.keys, self.root)

    @property
    def type(self) -> str:
        return short_type(self.dtype, self.shape)

    @property
    def device_type(self) -> str:
        return short_type(self.dtype, self.device_shape)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device."""
        return math.prod(self.device_shape) * _itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Nested:
    """A call of an xmapped function in the body.

    Attributes:
      function: its name.
      axes: its own named axes; the mesh axes that split them are taken from the mesh of the outer call.
      where: the call.
    """

    function: str
    axes: tuple[Placement, ...]
    where: Position | None


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective between devices.

    Attributes:
      kind: ``'all-reduce'``, ``'all-gather'``, ``'reduce-scatter'``, ``'all-to-all'`` or ``'ppermute'``.
      mesh_axes: the mesh axes that it goes over.
      devices: how many devices take part in each group.
      operand: its type on each device.
      slabs: for a ppermute, how many elements of the named axis each sender sends; else None.
      bytes_sent: what each device sends at least, once, as rings do it.
      times: how often a call runs it; None in a while loop, of which nobody knows the number of turns.
      conditional: whether it is in a branch of a cond.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    devices: int
    operand: str
    slabs: int | None
    bytes_sent: int
    times: int | None
    conditional: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over named axes of the user's program, and what it became on the devices.

    Attributes:
      primitive: as in the program: ``'psum'``, ``'pdot'``, ...; ``'while'`` for the agreement of devices to go on.
      axes: the named axes, in the user's order.
      where: the user's call.
      operands: their named types.
      became: ``'local sum, all-reduce over x'``: what a device does for it, in the order of its first steps.
      transfers: what crosses devices; empty if nothing does.
    """

    primitive: str
    axes: tuple[AxisName, ...]
    where: Position | None
    operands: tuple[str, ...]
    became: str
    transfers: tuple[Transfer, ...]

    @property
    def bytes_sent(self) -> int | None:
        """What each device sends in a call, all turns and branches counted; None in a while loop."""
        if any(t.times is None for t in self.transfers):
            return None
        return sum(t.bytes_sent * (t.times or 0) for t in self.transfers)


@dataclasses.dataclass(frozen=True, repr=False)
class CallPlan:
    """Everything that is decided about one call of an xmapped function.

    Print it, show it in a notebook, or draw it with :meth:`picture` and :meth:`svg`; :meth:`source` writes the
    equivalent program without xmap.

    Attributes:
      function: the name of the xmapped function.
      mesh: the mesh that the call is split over; None where it runs on one device.
      axes: the named axes.
      nested: the calls of xmapped functions in the body, outer ones first.
      arguments, results: one entry for each array.
      program: the function over named axes.
      collectives: in the order of the program.
    """

    function: str
    mesh: jax.sharding.Mesh | None
    axes: tuple[Placement, ...]
    nested: tuple[Nested, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    program: Program
    collectives: tuple[Collective, ...]
    staged: Staged = dataclasses.field(compare=False, hash=False)

    @property
    def bytes_sent(self) -> int | None:
        """What each device sends in a call; None if that depends on a while loop."""
        sent = [c.bytes_sent for c in self.collectives]
        return None if None in sent else sum(n for n in sent if n)

    def __str__(self) -> str:
        return _report(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _html(self)

    def picture(self) -> str:
        """How each array lies on the devices, in characters."""
        return picture.text(self)

    def svg(self) -> str:
        """The same as an SVG drawing."""
        return picture.svg(self)

    def save_svg(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())

    def source(self, staged: bool = False) -> str:
        """The same program for plain JAX, as the source of a module that defines ``mapped_<function>``.

        The user's functions are kept and their collectives rewritten where that can be done; else, or if
        ``staged`` is true, every operation of a device is written out.

        Raises:
          NotImplementedError: the program holds something that has no source, as a callback.
        """
        return source.write(self, staged)

    def constants(self, staged: bool = False) -> dict[str, Any]:
        """The arrays that the source declares and leaves to be assigned, because they are too large to be written."""
        return source.values(self, staged)


@dataclasses.dataclass(frozen=True)
class Staged:
    """What the plan was read from.

    Attributes:
      declared: what the user asked of xmap.
      plan: what the call decided.
      jaxpr: the call as it runs, staged out: ``shard_map`` and what is in it.
      in_tree: the structure of the arguments.
      sites: the equations that may have left collectives.
    """

    declared: lowering.Declaration
    plan: lowering.Plan
    jaxpr: Any
    in_tree: Any
    sites: tuple[Site, ...]


# ---------------------------------------------------------------------------- making it


def describe(declared: lowering.Declaration, *args: Any, **kwargs: Any) -> CallPlan:
    """The plan of one call, which is traced but neither compiled nor executed.

    Args:
      args: as for the call; arrays may be ``jax.ShapeDtypeStruct``.
    """
    if kwargs:
        raise errors.keyword_arguments(kwargs)
    return describe_made(declared, None, args)


def describe_made(declared: lowering.Declaration, made: lowering.Plan | None, args: tuple[Any, ...]) -> CallPlan:
    """The same for a call that is being traced, whose plan has been made: no function of the user is run again."""
    staged = _stage(declared, made, args)
    plan = staged.plan
    mesh = plan.scope.mesh if plan.uses_mesh else None
    arguments = _arguments(plan, declared, args)
    return CallPlan(
        declared.name,
        mesh,
        tuple(p for p in plan.placements.values() if not isinstance(p.name, DeviceAxis)),
        tuple(dict.fromkeys(_nested_in(plan.program.jaxpr, None))),
        arguments,
        _results(plan, staged.jaxpr.out_avals),
        Listing(plan, [a.path for a in arguments]).program(),
        _collectives(staged, mesh),
        staged,
    )


def _stage(declared, made, args) -> Staged:
    plans: list[lowering.Plan] = []
    sites = _Sites()

    def call(*args):
        plan = lowering.make_plan(declared, args) if made is None else made
        plans.append(plan)
        return lowering.execute(plan, jax.tree.leaves(args), functools.partial(_Watching, sites=sites))

    jaxpr = jax.make_jaxpr(call)(*args)
    return Staged(declared, plans[-1], jaxpr, jax.tree.structure(args), tuple(sites.found.values()))


def _nested_in(jaxpr: Any, where: Position | None) -> Iterator[Nested]:
    """The nested calls that the equations of a program come from; ``where`` is that of the program itself."""
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        for call in nested_marks.marked(_jax.name_stack(eqn)):
            yield Nested(call.function, call.axes, where)
        for sub in _jax.subjaxprs(eqn.params):
            yield from _nested_in(sub, position_of(eqn) or where)


def _arguments(plan, declared, args):
    roots = _parameter_names(declared.fun, len(args))
    arrays = []
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(args), plan.in_specs):
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        arrays.append(_array(roots[path[0].idx], path[1:], aval, spec, plan))
    return tuple(arrays)


def _parameter_names(fun: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its positional arguments; ``args[2]`` where it does not say."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    single = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), None)
    more = [f"{rest}[{k}]" if rest else f"args[{k + len(single)}]" for k in range(count - len(single))]
    return [*single, *more][:count]


def _results(plan, avals):
    tree = jax.tree.unflatten(plan.program.out_tree, range(len(avals)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(_array("result", p, a, s, plan) for p, a, s in zip(paths, avals, plan.out_specs))


def _array(root: str, keys: Sequence[Any], aval: Any, spec: AxisSpec, plan: lowering.Plan) -> Array:
    named = spec.name_at()
    axes = tuple(named.get(k) for k in range(len(aval.shape)))
    parts = [plan.placements[n].devices if n is not None else 1 for n in axes]
    partition = lowering.partition_spec(spec, plan.placements) if plan.uses_mesh else None
    device_shape = tuple(size // part for size, part in zip(aval.shape, parts))
    return Array(root, tuple(keys), aval.dtype, tuple(aval.shape), axes, partition, device_shape)


# ------------------------------------------------------------- what each equation leaves


class _Sites:
    """Equations of the named program that were evaluated, each with a mark for what it leaves in the staged one."""

    def __init__(self):
        self.found: dict[tuple[int, ...], Site] = {}
        self._path: list[int] = []
        self._positions: list[Position | None] = []

    @contextlib.contextmanager
    def at(self, eqn, operands) -> Iterator[str]:
        """The mark of an equation; an equation in a function that is called twice has two."""
        self._path.append(id(eqn))
        where = position_of(eqn) or (self._positions[-1] if self._positions else None)
        site = self.found.setdefault(tuple(self._path), Site(len(self.found), eqn, tuple(map(_held, operands)), where))
        self._positions.append(where)
        try:
            yield f"{_MARK}{site.number}"
        finally:
            self._path.pop()
            self._positions.pop()


_MARK = "xmap_compat_site_"


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation of the named program that may have left collectives in the staged one."""

    number: int
    eqn: Any
    operands: tuple[Held, ...]
    where: Position | None


@dataclasses.dataclass(frozen=True)
class Held:
    """An operand of such an equation.

    Attributes:
      names: the axes that it varies over.
      shape: its positional shape.
    """

    names: frozenset[AxisName]
    shape: tuple[int, ...]
    dtype: Any


def _held(value: NamedValue) -> Held:
    aval = jax.typeof(value.data)
    return Held(value.names, tuple(n for n, name in zip(aval.shape, value.dims) if name is None), aval.dtype)


@dataclasses.dataclass(frozen=True)
class _Watching(Evaluator):
    """Evaluates as usual, under a named scope for each equation that may leave collectives between devices."""

    sites: _Sites = dataclasses.field(default_factory=_Sites)

    def call(self, jaxpr, operands, name):
        return self.evaluate(jaxpr, operands)  # each call is a site of its own

    def equation(self, eqn, operands):
        primitive = eqn.primitive.name
        if primitive not in RULES and primitive not in STRUCTURED:
            return super().equation(eqn, operands)
        with self.sites.at(eqn, operands) as mark, jax.named_scope(mark):
            return super().equation(eqn, operands)


def _collectives(staged: Staged, mesh: jax.sharding.Mesh | None) -> tuple[Collective, ...]:
    steps: dict[int, list[Step]] = {}
    for number, step in _steps(staged.jaxpr, dict(mesh.shape) if mesh is not None else {}):
        steps.setdefault(number, []).append(step)
    found = (_collective(site, _merged(steps.get(site.number, [])), staged.plan) for site in staged.sites)
    return tuple(c for c in found if c.transfers or c.operands or c.axes)


def _collective(site: Site, steps: Sequence[Step], plan: lowering.Plan) -> Collective:
    primitive, params = site.eqn.primitive.name, site.eqn.params
    own = primitive in RULES
    transfers = tuple(step for step in steps if isinstance(step, Transfer))
    if not own:  # it holds others, which have rows of their own
        steps = [*(["agreement of the devices to go on"] if primitive == "while" else []), *transfers]
    words = list(dict.fromkeys(step if isinstance(step, str) else _phrase(step, transfers) for step in steps))
    told = [word for word in words if word != RESHAPED] or words
    return Collective(
        {"reduce_scatter": "psum_scatter"}.get(primitive, primitive),
        mentioned_names(params) if own else (),
        site.where,
        tuple(named_type(o.dtype, o.shape, o.names, plan.placements) for o in site.operands) if own else (),
        ", ".join(told) or "nothing to do",
        transfers,
    )


def _phrase(transfer: Transfer, every: Sequence[Transfer]) -> str:
    """A transfer in words, with the number of all that differ from it in what they carry only."""
    kind_of = lambda t: (t.kind, t.mesh_axes, t.slabs, t.conditional)  # noqa: E731
    times = [t.times for t in every if kind_of(t) == kind_of(transfer)]
    total = None if None in times else sum(n for n in times if n)
    over = f"over {', '.join(transfer.mesh_axes)}"
    kind = f"one ppermute of {plural(transfer.slabs, 'slab')}" if transfer.slabs is not None else transfer.kind
    turns = {1: "", None: " (each turn)"}.get(total, f" ({total} times)")
    return f"{kind} {over}{turns}" + (" (in a branch)" if transfer.conditional else "")


# ------------------------------------------------- what a device does, read from the staged program

Step = Transfer | str

# Collectives between devices.
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "ppermute",
}

_INDICES = ("axis_index", "iota")

# Of the rest, what a reader wants to know: other operations change element by element, or only types.
RESHAPED = "a change of shape"
_LOCAL = {
    "reduce_sum": "local sum",
    "reduce_max": "local max",
    "reduce_min": "local min",
    "dot_general": "local dot",
    "transpose": "local transposition",
    **dict.fromkeys(_INDICES, "index arithmetic"),
    **dict.fromkeys(("slice", "dynamic_slice", "gather", "concatenate", "rev"), "local indexing"),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "squeeze", "expand_dims"), RESHAPED),
}


def _steps(
    jaxpr: Any,
    mesh_shape: Mapping[str, int],
    mark: int | None = None,
    times: int | None = 1,
    conditional: bool = False,
) -> Iterator[tuple[int, Step]]:
    """What a staged program does for each marked equation; for collectives over mesh axes also how often."""
    body, _ = _jax.open_jaxpr(jaxpr)
    indices: dict[Any, int | None] = {}  # what an equation computes from the place of the device and nothing else
    for eqn in body.eqns:
        primitive = eqn.primitive.name
        marks = re.findall(rf"{_MARK}(\d+)", _jax.name_stack(eqn))
        here = int(marks[-1]) if marks else mark
        read = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
        if primitive in _INDICES or all(v in indices and indices[v] == here for v in read):
            indices.update(dict.fromkeys(eqn.outvars, here))
        step = _transfer(eqn, mesh_shape, times, conditional) or _local_step(eqn, indices)
        if step is not None and here is not None:
            yield here, step
        turns = {"scan": eqn.params.get("length"), "while": None}.get(primitive, 1)
        inner = None if times is None or turns is None else times * turns
        for sub in _jax.subjaxprs(eqn.params):
            yield from _steps(sub, mesh_shape, here, inner, conditional or primitive == "cond")


def _local_step(eqn: Any, indices: Container[Any]) -> str | None:
    primitive = eqn.primitive.name
    if primitive != "mul":
        return None if eqn.params.get("axes") == () else _LOCAL.get(primitive)
    if eqn.outvars[0] in indices:
        return None
    # A sum over an axis that a value does not vary over is a multiplication by its size.
    factors = [v.val for v in eqn.invars if isinstance(v, _jax.Literal)]
    return f"times {int(np.real(factors[0]))}" if factors else "local product"


def _transfer(eqn, mesh_shape, times, conditional) -> Transfer | None:
    kind = _KINDS.get(eqn.primitive.name)
    if kind is None:
        return None
    axes = tuple(a for a in mentioned_names(eqn.params) if isinstance(a, str) and a in mesh_shape)
    devices = math.prod(mesh_shape[a] for a in axes)
    if devices == 1:
        return None
    avals = [v.aval for v in eqn.invars]
    size = sum(math.prod(a.shape) * _itemsize(a.dtype) for a in avals)
    operand = ", ".join(short_type(a.dtype, a.shape) for a in avals)
    slabs = avals[0].shape[0] if kind == "ppermute" else None
    return Transfer(kind, axes, devices, operand, slabs, _bytes_sent(kind, size, devices), times, conditional)


def _bytes_sent(kind: str, size: int, devices: int) -> int:
    """What each of n devices that hold ``size`` bytes must send: all-reduce is reduce-scatter and all-gather."""
    scattered = -(-size * (devices - 1) // devices)
    return {
        "all-reduce": 2 * scattered,
        "all-gather": size * (devices - 1),
        "reduce-scatter": scattered,
        "all-to-all": scattered,
        "ppermute": size,
    }[kind]


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 0)


def _merged(steps: Sequence[Step]) -> list[Step]:
    """Equal steps once; of transfers with the number of times added up."""
    counted: dict[Step, int | None] = {}
    for step in steps:
        times = step.times if isinstance(step, Transfer) else 1
        key = step if isinstance(step, str) else dataclasses.replace(step, times=None if times is None else 1)
        before = counted.get(key, 0)
        counted[key] = None if times is None or before is None else before + times
    return [s if isinstance(s, str) else dataclasses.replace(s, times=times) for s, times in counted.items()]


# --------------------------------------------------------------------------- the report


def show_mesh(mesh: jax.sharding.Mesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"mesh {axes} ({mesh.size} {mesh.devices.flat[0].platform} devices)"


def execution(axis: Placement) -> str:
    """``shard_map over x, vmap of 3``"""
    words = {
        "shard_map": f"shard_map over {listed(axis.mesh_axes)}",
        "loop": f"loop of {' x '.join(map(str, axis.loop_sizes))}",
        "vmap": f"vmap of {axis.local_size}",
    }
    return ", ".join(words[word] for word in axis.executed_by)


_AXIS_TITLES = ("size", "resources", "on each device", "executed by")


def _axis_cells(axis: Placement) -> tuple[str, ...]:
    loops = [
        f"SerialLoop({n})" if isinstance(loop, tuple) else str(loop) for loop, n in zip(axis.loops, axis.loop_sizes)
    ]
    return str(axis.size), listed([*axis.mesh_axes, *loops]) or "-", str(axis.device_size), execution(axis)


def _axis_rows(plan: CallPlan) -> Rows:
    return [("axis", *_AXIS_TITLES), *((str(a.name), *_axis_cells(a)) for a in plan.axes)]


def _nested_rows(plan: CallPlan) -> Rows:
    calls = [(f"{a.name} of {c.function}", *_axis_cells(a), str(c.where or "")) for c in plan.nested for a in c.axes]
    return [("axis of a nested xmap", *_AXIS_TITLES, "where"), *calls]


def _array_rows(title: str, arrays: Sequence[Array]) -> Rows:
    rows: Rows = [(title, "type", "on each device", "partition spec", "dimensions")]
    for a in arrays:
        dims = ", ".join(str(n) if n is not None else "." for n in a.axes)
        rows.append((a.path, a.type, a.device_type, show_spec(a.spec), f"[{dims}]"))
    return rows


def _collective_rows(plan: CallPlan) -> Rows:
    """A row for the collectives of one call of the user's that became the same."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        name = f"{c.primitive} over {listed(c.axes)}" if c.axes else c.primitive
        alike.setdefault((name, str(c.where or ""), c.became), []).append(c)
    rows: Rows = [("collective", "where", "operands", "became", "bytes sent")]
    for (name, where, became), group in alike.items():
        operands = tally((o for c in group for o in c.operands), MAX_OPERANDS)
        rows.append((f"{len(group)} x {name}" if len(group) > 1 else name, where, operands, became, _sent(group)))
    return rows


def _sent(collectives: Sequence[Collective]) -> str:
    transfers = [t for c in collectives for t in c.transfers]
    total = show_bytes(sum(t.bytes_sent * (t.times or 1) for t in transfers))
    if any(t.times is None for t in transfers):
        return f"{total} a turn"
    return total if transfers else "-"


def _tables(plan: CallPlan) -> list[Rows]:
    """What there is of axes, arguments and results, and collectives."""
    arrays = [_array_rows("argument", plan.arguments), _array_rows("result", plan.results)]
    every = [_axis_rows(plan), _nested_rows(plan), *arrays, _collective_rows(plan)]
    return [grouped(rows, MAX_ROWS) for rows in every if len(rows) > 1]


def _total(plan: CallPlan) -> str:
    if not plan.collectives:
        return "no collectives"
    known = sum(t.bytes_sent * (t.times or 0) for c in plan.collectives for t in c.transfers)
    more = "" if plan.bytes_sent is not None else ", and more in each turn of a while loop"
    return f"in all, each device sends {show_bytes(known)}{more}"


def _title(plan: CallPlan) -> str:
    return f"plan of {plan.function}: {show_mesh(plan.mesh)}"


def _report(plan: CallPlan) -> str:
    tables = ["\n".join(table(rows)) for rows in _tables(plan)]
    if plan.collectives:
        tables[-1] += "\n" + _total(plan)
    else:
        tables.append(_total(plan))
    above = "\n\n".join([_title(plan), *tables, "program"])
    listing = _shortened(plan.program, max(SCREEN - above.count("\n") - 1, LEAST_LISTING))
    return "\n".join([above, *(f"  {line}" for line in listing)])


def _shortened(program: Program, most: int) -> list[str]:
    """A listing of at most so many lines."""
    lines = program.shown(margin=2).splitlines()
    if len(lines) <= most:
        return lines
    inputs = len(program.inputs)
    if inputs > MAX_INPUTS:
        lines = [f"({plural(inputs, 'argument')})", *lines[inputs:]]
    hidden = len(lines) - most + 1
    return [*lines[: most - 1], f"... and {plural(hidden, 'more line')}: print(plan.program)"] if hidden > 1 else lines


_STYLE = (
    "font-family:DejaVu Sans,Verdana,Helvetica,Arial,sans-serif;font-size:13px;color:#1f2430;background:#ffffff;"
    "padding:12px;border-radius:8px"
)


def _html(plan: CallPlan) -> str:
    """A plan for a notebook: the drawing, the tables, and the program to unfold."""
    return (
        f'<div style="{_STYLE}"><div style="font-weight:bold;font-size:15px">{escape(_title(plan))}</div>'
        f'<div style="overflow-x:auto">{plan.svg()}</div>{"".join(map(html_table, _tables(plan)))}'
        f'<div style="margin:6px 0">{escape(_total(plan))}</div>'
        f'<details><summary style="cursor:pointer">program over named axes</summary>'
        f'<pre style="color:#1f2430;background:#ffffff">{escape(plan.program)}</pre></details></div>'
    )
