"""``f.plan(*args)``: what an xmapped call decides and does, as a value that can be read, printed and drawn.

Nothing is executed or compiled.  The call is staged out (traced) exactly as it would run, by an evaluator that
marks everything that each equation of the named program leaves behind; the collectives that are
found in the staged program then tell what each collective over named axes became.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from xmap_compat import _jax, errors, lowering, picture
from xmap_compat.axis_specs import AxisName, AxisSpec, argument_path
from xmap_compat.collectives import RULES, mentioned_names
from xmap_compat.contraction import Subscripts
from xmap_compat.named_shapes import Checker, read_names
from xmap_compat.named_values import Locality, NamedValue
from xmap_compat.resources import DeviceAxis, Placement
from xmap_compat.substitution import STRUCTURED, Evaluator
from xmap_compat.tools import source

WIDTH = 100
MAX_LISTING = 80

# ---------------------------------------------------------------------------- the value


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A named axis and how it is executed.

    Attributes:
      size: its number of elements.
      mesh_axes, mesh_sizes: the mesh axes that split it, major first.
      loops, loop_sizes: the loops that a device runs over its part, outermost first.
    """

    name: AxisName
    size: int
    mesh_axes: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    loops: tuple[Hashable, ...]
    loop_sizes: tuple[int, ...]

    @property
    def device_size(self) -> int:
        """Elements on each device."""
        return self.size // math.prod(self.mesh_sizes)

    @property
    def vmap_size(self) -> int:
        """Elements computed at once on each device."""
        return self.device_size // math.prod(self.loop_sizes)

    @property
    def executed_by(self) -> tuple[str, ...]:
        """``'shard_map'``, ``'loop'`` and ``'vmap'``, those that apply, outermost first."""
        split = bool(self.mesh_axes or self.loops)
        used = (self.mesh_axes, "shard_map"), (self.loops, "loop"), (self.vmap_size != 1 or not split, "vmap")
        return tuple(word for applies, word in used if applies)

    @property
    def execution(self) -> str:
        """The same in words: ``'shard_map over x, vmap of 3'``."""
        words = {
            "shard_map": f"shard_map over {', '.join(map(str, self.mesh_axes))}",
            "loop": f"loop of {' x '.join(map(str, self.loop_sizes))}",
            "vmap": f"vmap of {self.vmap_size}",
        }
        return ", ".join(words[word] for word in self.executed_by)


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument or a result.

    Attributes:
      path: ``params['w1']``.
      dtype: its element type.
      shape: its global shape.
      axes: for each dimension the named axis, or None where it is positional.
      spec: how it is partitioned over the mesh; None where no mesh is used.
      device_shape: the shape of the part on each device.
    """

    path: str
    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[AxisName | None, ...]
    spec: PartitionSpec | None
    device_shape: tuple[int, ...]

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
class Equation:
    """One step of the named program.

    Attributes:
      results: names and types, ``('a', 'f32[5]{batch}')``.
      inner: the programs that it contains (the body of a scan, the branches of a cond), with labels.
    """

    results: tuple[tuple[str, str], ...]
    primitive: str
    params: str
    operands: tuple[str, ...]
    where: Position | None
    inner: tuple[tuple[str, Program], ...]

    @property
    def text(self) -> str:
        """``a: f32[5]{batch} = mul b 2.0``"""
        results = ", ".join(f"{name}: {type}" for name, type in self.results)
        call = " ".join([self.primitive + (f"[{self.params}]" if self.params else ""), *self.operands])
        return f"{results} = {call}" if results else call


@dataclasses.dataclass(frozen=True)
class Program:
    """The user's function over named axes: each variable with its positional and its named shape."""

    inputs: tuple[tuple[str, str], ...]
    equations: tuple[Equation, ...]
    outputs: tuple[str, ...]

    def lines(self, where: bool = True) -> Iterator[tuple[str, str]]:
        """Each line of the listing, and the position that belongs to it."""
        for eqn in self.equations:
            yield eqn.text, str(eqn.where or "") if where else ""
            for label, program in eqn.inner:
                takes = ", ".join(f"{name}: {type}" for name, type in program.inputs)
                yield f"  {label}({takes}):", ""
                for text, place in program.lines(where):
                    yield f"    {text}", place
        yield f"return {', '.join(self.outputs)}", ""

    def __str__(self) -> str:
        inputs = [(f"{name}: {type}", "") for name, type in self.inputs]
        return "\n".join(_two_columns([*inputs, *self.lines()]))


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
      became: ``'local sum, all-reduce over x'``.
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
      arguments, results: one entry for each array.
      program: the function over named axes.
      collectives: in the order of the program.
    """

    function: str
    mesh: jax.sharding.Mesh | None
    axes: tuple[Axis, ...]
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

    def source(self) -> str:
        """The same program for plain JAX, as the source of a module that defines ``mapped_<function>``.

        The user's functions are kept, with their collectives rewritten.  What is written is staged and compared with
        the program of this plan.

        Raises:
          NotImplementedError: something cannot be written, or what is written computes something else; says what.
        """
        return source.write(self)

    def constants(self) -> dict[str, Any]:
        """The arrays that the source declares and leaves to be assigned, because they are too large to be written."""
        return source.values(self)


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
    sites: tuple[_Site, ...]


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
    sites = _Sites()
    staged = _stage(declared, made, args, sites)
    plan = staged.plan
    mesh = plan.scope.mesh if plan.uses_mesh else None
    arguments = _arguments(plan, declared, args)
    return CallPlan(
        declared.name,
        mesh,
        tuple(_axis(p) for p in plan.placements.values() if not isinstance(p.name, DeviceAxis)),
        arguments,
        _results(plan, staged.jaxpr.out_avals),
        _Listing(plan, declared.name).program([a.path for a in arguments]),
        _collectives(sites, staged.jaxpr, mesh),
        staged,
    )


def _stage(declared, made, args, sites) -> Staged:
    plans: list[lowering.Plan] = []

    def call(*args):
        plan = lowering.make_plan(declared, args) if made is None else made
        plans.append(plan)
        return lowering.execute(plan, jax.tree.leaves(args), functools.partial(_Watching, sites=sites))

    jaxpr = jax.make_jaxpr(call)(*args)
    return Staged(declared, plans[-1], jaxpr, jax.tree.structure(args), tuple(sites.found.values()))


def _axis(placement: Placement) -> Axis:
    return Axis(
        placement.name,
        placement.size,
        tuple(map(str, placement.mesh_axes)),
        placement.mesh_sizes,
        placement.loops,
        placement.loop_sizes,
    )


def _arguments(plan, declared, args):
    leaves = jax.tree_util.tree_leaves_with_path(args)
    roots = _parameter_names(declared.fun, len(args))
    arrays = []
    for (path, leaf), spec in zip(leaves, plan.in_specs):
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        arrays.append(_array(argument_path(path[1:], roots[path[0].idx]), aval.dtype, aval.shape, spec, plan))
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
    paths = [argument_path(path, "result") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(_array(p, a.dtype, a.shape, s, plan) for p, a, s in zip(paths, avals, plan.out_specs))


def _array(path: str, dtype: Any, shape: Sequence[int], spec: AxisSpec, plan: lowering.Plan) -> Array:
    named = spec.name_at()
    axes = tuple(named.get(k) for k in range(len(shape)))
    parts = [plan.placements[n].devices if n is not None else 1 for n in axes]
    return Array(
        path,
        dtype,
        tuple(shape),
        axes,
        lowering.partition_spec(spec, plan.placements) if plan.uses_mesh else None,
        tuple(size // part for size, part in zip(shape, parts)),
    )


# ------------------------------------------------------------- what each equation leaves


class _Sites:
    """Equations of the named program that were evaluated, each with a mark for what it leaves in the staged one."""

    def __init__(self):
        self.found: dict[tuple[int, ...], _Site] = {}
        self._path: list[int] = []
        self._positions: list[Position | None] = []

    @contextlib.contextmanager
    def at(self, eqn, operands, loc) -> Iterator[str]:
        """The mark of an equation; an equation in a function that is called twice has two."""
        self._path.append(id(eqn))
        key = tuple(self._path)
        where = _position(eqn) or (self._positions[-1] if self._positions else None)
        site = self.found.setdefault(key, _Site(len(self.found), eqn, tuple(map(_held, operands)), loc, where))
        self._positions.append(where)
        try:
            yield f"{_MARK}{site.number}"
        finally:
            self._path.pop()
            self._positions.pop()


_MARK = "xmap_compat_site_"


@dataclasses.dataclass(frozen=True)
class _Site:
    number: int
    eqn: Any
    operands: tuple[_Held, ...]
    loc: Locality
    where: Position | None


@dataclasses.dataclass(frozen=True)
class _Held:
    """An operand as a device holds it."""

    names: frozenset[AxisName]
    dims: tuple[AxisName | None, ...]
    shape: tuple[int, ...]
    dtype: Any


def _held(value: NamedValue) -> _Held:
    aval = jax.typeof(value.data)
    return _Held(value.names, value.dims, tuple(aval.shape), aval.dtype)


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
        with self.sites.at(eqn, operands, self.loc) as mark, jax.named_scope(mark):
            return super().equation(eqn, operands)


def _collectives(sites: _Sites, jaxpr: Any, mesh: jax.sharding.Mesh | None) -> tuple[Collective, ...]:
    moved: dict[int, list[Transfer]] = {}
    for number, transfer in _transfers(jaxpr, dict(mesh.shape) if mesh is not None else {}):
        moved.setdefault(number, []).append(transfer)
    found = []
    for site in sites.found.values():
        transfers = tuple(_merged(moved.get(site.number, [])))
        if transfers or site.eqn.primitive.name in RULES:
            found.append(_collective(site, transfers))
    return tuple(found)


def _collective(site: _Site, transfers: tuple[Transfer, ...]) -> Collective:
    primitive = site.eqn.primitive.name
    own = primitive in RULES
    local = _LOCAL.get(primitive, _nothing_local)(site) if own else "agreement of the devices to go on"
    crossing = [_phrase(t) for t in transfers]
    if primitive in ("ppermute", "all_to_all") and crossing:
        crossing, local = [*crossing, *([local] if local else [])], ""
    phrases = [*([local] if local else []), *crossing]
    placements = site.loc.placements
    return Collective(
        {"reduce_scatter": "psum_scatter"}.get(primitive, primitive),
        mentioned_names(site.eqn.params) if own else (),
        site.where,
        tuple(_named_type(o.dtype, _positional_shape(o), o.names, placements) for o in site.operands) if own else (),
        ", ".join(phrases) or "nothing to do",
        transfers,
    )


def _positional_shape(held: _Held) -> tuple[int, ...]:
    return tuple(size for size, name in zip(held.shape, held.dims) if name is None)


def _phrase(transfer: Transfer) -> str:
    over = f"over {', '.join(transfer.mesh_axes)}"
    if transfer.kind == "ppermute":
        text = f"one ppermute of {transfer.slabs} slab{'s' if transfer.slabs != 1 else ''} {over}"
    else:
        text = f"{transfer.kind} {over}"
    turns = {1: "", None: " (each turn)"}.get(transfer.times, f" ({transfer.times} times)")
    return text + turns + (" (in a branch)" if transfer.conditional else "")


# ---- the local half of each collective, in words


def _local_names(site):
    present = frozenset().union(*(o.names for o in site.operands))
    return site.loc.local_names(n for n in mentioned_names(site.eqn.params) if n in present)


def _nothing_local(site):
    return ""


def _local_reduction(word):
    def describe_site(site):
        if site.eqn.params.get("axis_index_groups") is not None:
            return f"{word} of the group's members"
        phrases = [f"local {word}"] if _local_names(site) else []
        return ", ".join([*phrases, *_repeats(site, word)])

    return describe_site


def _repeats(site, word="sum"):
    """A sum over an axis that the value does not vary over is a multiplication."""
    present = frozenset().union(*(o.names for o in site.operands))
    own = [n for n in mentioned_names(site.eqn.params) if site.loc.is_own(n) and n not in present]
    count = math.prod(site.loc.placements[n].size for n in own)
    return [f"times {count}"] if word == "sum" and count != 1 else []


def _local_dot(site):
    inputs, output = site.eqn.params["subscripts"]
    labels = [*_local_names(site), *(c for c in set().union(*inputs) if c not in output)]
    holders = [{*o.dims, *own} for o, own in zip(site.operands, inputs)]
    contracts = any(sum(c in held for held in holders) > 1 for c in labels)
    return ", ".join(["local dot" if contracts else "local product", *_repeats(site)])


def _local_move(word):
    return lambda site: word if _local_names(site) else ""


_LOCAL: dict[str, Callable[[_Site], str]] = {
    "psum": _local_reduction("sum"),
    "pmax": _local_reduction("max"),
    "pmin": _local_reduction("min"),
    "pdot": _local_dot,
    "axis_index": lambda site: "index arithmetic",
    "all_gather": _local_move("a local dimension moves"),
    "reduce_scatter": _local_move("local sum"),
    "all_to_all": _local_move("local transposition"),
    "ppermute": _local_move("the rest by local indexing"),
    "pbroadcast": lambda site: "masked sum",
    "device_take": lambda site: "each device takes its part",
}

# ---- what crosses devices, read from the staged program

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


def _transfers(jaxpr: Any, mesh_shape: Mapping[str, int], mark=None, times: int | None = 1, conditional=False):
    """Every collective over mesh axes with the mark of the equation that left it, and how often it runs."""
    body, _ = _jax.open_jaxpr(jaxpr)
    for eqn in body.eqns:
        primitive = eqn.primitive.name
        marks = re.findall(rf"{_MARK}(\d+)", _jax.name_stack(eqn))
        here = int(marks[-1]) if marks else mark
        axes: tuple[str, ...] = ()
        if primitive in _KINDS:
            axes = tuple(a for a in mentioned_names(eqn.params) if isinstance(a, str) and a in mesh_shape)
        devices = math.prod(mesh_shape[a] for a in axes)
        if devices > 1:
            yield here, _transfer(eqn, axes, devices, times, conditional)
        turns = {"scan": eqn.params.get("length"), "while": None}.get(primitive, 1)
        inner = None if times is None or turns is None else times * turns
        branching = conditional or primitive == "cond"
        for sub in _jax.subjaxprs(eqn.params):
            yield from _transfers(sub, mesh_shape, here, inner, branching)


def _transfer(eqn, axes, devices, times, conditional) -> Transfer:
    kind = _KINDS[eqn.primitive.name]
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


def _merged(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Equal transfers once, with the number of times added up."""
    counted: dict[Transfer, int | None] = {}
    for t in transfers:
        key = dataclasses.replace(t, times=None if t.times is None else 1)
        before = counted.get(key, 0)
        counted[key] = None if t.times is None or before is None else before + t.times
    for key, times in counted.items():
        yield dataclasses.replace(key, times=times)


# ----------------------------------------------------------------- the program's listing


@dataclasses.dataclass(frozen=True)
class _Recording(Checker):
    """Infers named shapes and remembers those of every jaxpr that it has last looked into."""

    seen: dict[int, dict[Any, frozenset[AxisName]]] = dataclasses.field(default_factory=dict)

    def variables(self, jaxpr, inputs):
        names = super().variables(jaxpr, inputs)
        self.seen[id(_jax.open_jaxpr(jaxpr)[0])] = names
        return names


class _Listing:
    """Reads a named program into a :class:`Program`."""

    def __init__(self, plan: lowering.Plan, name: str):
        self.plan = plan
        self.checker = _Recording(plan.placements, name)
        self.count = 0

    def program(self, paths: Sequence[str]) -> Program:
        jaxpr = self.plan.program.jaxpr
        inputs = [frozenset(spec.position_of()) for spec in self.plan.in_specs]
        names = self.checker.variables(jaxpr, inputs)
        variables = _jax.input_vars(jaxpr)
        consts = [f"const{k}" for k in range(len(variables) - len(paths))]
        return self._read(jaxpr, names, dict(zip(variables, [*consts, *paths])))

    def _read(self, jaxpr, names, called, where=None) -> Program:
        body, _ = _jax.open_jaxpr(jaxpr)
        for v in _jax.input_vars(body):
            called.setdefault(v, self._fresh())
        inputs = tuple((called[v], self._type(v, names)) for v in _jax.input_vars(body))
        equations = tuple(self._equation(eqn, names, called, where) for eqn in body.eqns)
        return Program(inputs, equations, tuple(self._atom(v, called) for v in body.outvars))

    def _equation(self, eqn, names, called, where) -> Equation:
        where = _position(eqn) or where
        operands = tuple(self._atom(v, called) for v in eqn.invars)
        self.checker.equation(eqn, [read_names(names, v) for v in eqn.invars])
        seen = dict(self.checker.seen)
        primitive, params = _call_text(eqn)
        inner = []
        if not _is_plain_call(eqn):
            for label, sub in _labelled_subjaxprs(eqn):
                sub_names = seen.get(id(_jax.open_jaxpr(sub)[0]))
                if sub_names is not None:
                    inner.append((label, self._read(sub, sub_names, {}, where)))
        for v in eqn.outvars:
            called[v] = self._fresh()
        results = tuple((called[v], self._type(v, names)) for v in eqn.outvars)
        return Equation(results, primitive, params, operands, where, tuple(inner))

    def _fresh(self) -> str:
        """a, b, ..., z, aa, ab, ..."""
        letters, k = "", self.count
        self.count += 1
        while True:
            letters = chr(ord("a") + k % 26) + letters
            k = k // 26 - 1
            if k < 0:
                return letters

    def _type(self, v, names):
        return _named_type(v.aval.dtype, v.aval.shape, read_names(names, v), self.plan.placements)

    def _atom(self, v, called):
        if isinstance(v, _jax.Literal):
            return str(np.asarray(v.val)) if np.ndim(v.val) == 0 else short_type(v.aval.dtype, v.aval.shape)
        return called[v]


def _named_type(dtype, shape, names, placements) -> str:
    """``f32[5]{batch}``"""
    ordered = [str(n) for n in placements if n in names]
    return short_type(dtype, shape) + (f"{{{','.join(ordered)}}}" if ordered else "")


_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call")
_HIDDEN_PARAMS = {
    *("sharding", "out_sharding", "weak_type", "mode", "ctx_mesh", "mentions", "unroll", "axis_size", "linear"),
    *("num_consts", "num_carry", "cond_nconsts", "body_nconsts", "ft_in", "ft_out"),
}


def _is_plain_call(eqn) -> bool:
    """A call of a function without collectives (relu, a jnp function) reads best as one step."""
    return eqn.primitive.name in _CALLS and not any(map(_has_collective, _jax.subjaxprs(eqn.params)))


def _has_collective(jaxpr) -> bool:
    body, _ = _jax.open_jaxpr(jaxpr)
    return any(e.primitive.name in RULES or any(map(_has_collective, _jax.subjaxprs(e.params))) for e in body.eqns)


def _call_text(eqn) -> tuple[str, str]:
    """A name for the step and its parameters, the telling ones."""
    primitive, params = eqn.primitive.name, eqn.params
    if primitive in RULES:
        axes = ",".join(map(str, mentioned_names(params)))
        rest = {k: v for k, v in params.items() if k not in ("axes", "axis_name") and not _is_usual(v)}
        return primitive, ", ".join([axes, *_shown_params(rest)])
    if primitive in _CALLS:
        name = params.get("name") or _inner_name(params)
        return (str(name), "") if name and _is_plain_call(eqn) else (primitive, str(name or ""))
    return primitive, ", ".join(_shown_params(params))


def _is_usual(value):
    """Whether a parameter of a collective is as it is when one does not ask for anything."""
    return value is False or value == "auto" or (isinstance(value, Subscripts) and not any(value.inputs))


def _inner_name(params):
    """The name of the one function that a custom rule was made for."""
    for sub in _jax.subjaxprs(params):
        body, _ = _jax.open_jaxpr(sub)
        if len(body.eqns) == 1:
            return body.eqns[0].params.get("name", body.eqns[0].primitive.name)
    return None


def _shown_params(params: Mapping[str, Any]) -> list[str]:
    shown = []
    for key, value in params.items():
        if key in _HIDDEN_PARAMS or value is None or value is False or callable(value):
            continue
        if any(True for _ in _jax.subjaxprs(value)):
            continue
        text = np.dtype(value).name if isinstance(value, np.dtype) else repr(value)
        if len(text) <= 48 and " at 0x" not in text:
            shown.append(f"{key}={text}")
    return shown


def _labelled_subjaxprs(eqn) -> Iterator[tuple[str, Any]]:
    for key, value in eqn.params.items():
        subs = list(_jax.subjaxprs(value))
        for k, sub in enumerate(subs):
            yield (f"{key}[{k}]" if len(subs) > 1 else key.removesuffix("_jaxpr").replace("jaxpr", "body")), sub


def _position(eqn) -> Position | None:
    for file, function, line, *_ in _jax.user_frames(eqn):
        return Position(file, line, function)
    return None


# --------------------------------------------------------------------------------- text

_SHORT = {"float": "f", "uint": "u", "int": "i", "complex": "c", "bfloat": "bf"}


def short_type(dtype: Any, shape: Sequence[int]) -> str:
    """``f32[3,4]``"""
    name = getattr(dtype, "name", str(dtype))
    kind = re.fullmatch(r"([a-z]+)(\d+)", name)
    if kind and kind[1] in _SHORT:
        name = _SHORT[kind[1]] + kind[2]
    return f"{name}[{','.join(map(str, shape))}]"


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 0)


def show_bytes(count: int | None) -> str:
    """``96 B``, ``1.5 kB``, ``12 MB``."""
    if count is None:
        return "unknown"
    if count < 1000:
        return f"{count} B"
    value, units = count / 1000, iter(("kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while value >= 999.5:
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}"


def _sent(collective: Collective) -> str:
    if collective.bytes_sent is None:
        per_turn = sum(t.bytes_sent * (t.times or 1) for t in collective.transfers)
        return f"{show_bytes(per_turn)} a turn"
    return show_bytes(collective.bytes_sent) if collective.transfers else "-"


def show_mesh(mesh: jax.sharding.Mesh | None) -> str:
    """``mesh x: 4, y: 2 (8 cpu devices)``"""
    if mesh is None:
        return "one device"
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"mesh {axes} ({mesh.size} {mesh.devices.flat[0].platform} devices)"


def _resource_text(axis: Axis) -> str:
    loops = [
        f"SerialLoop({n})" if isinstance(loop, tuple) else str(loop) for loop, n in zip(axis.loops, axis.loop_sizes)
    ]
    return ", ".join([*axis.mesh_axes, *loops]) or "-"


Rows = list[tuple[str, ...]]


def _axis_rows(plan: CallPlan) -> Rows:
    header = ("axis", "size", "resources", "on each device", "executed by")
    return [
        header,
        *((str(a.name), str(a.size), _resource_text(a), str(a.device_size), a.execution) for a in plan.axes),
    ]


def _array_rows(title: str, arrays: Sequence[Array]) -> Rows:
    header = (title, "type", "on each device", "partition spec", "dimensions")
    rows: Rows = [header]
    for a in arrays:
        dims = ", ".join(str(n) if n is not None else "." for n in a.axes)
        rows.append((a.path, a.type, a.device_type, _spec_text(a.spec), f"[{dims}]"))
    return rows


def _spec_text(spec: PartitionSpec | None) -> str:
    return "-" if spec is None else f"P({', '.join(map(repr, spec))})"


def _collective_rows(plan: CallPlan) -> Rows:
    rows: Rows = [("collective", "where", "operands", "became", "bytes sent")]
    for c in plan.collectives:
        name = f"{c.primitive} over {', '.join(map(str, c.axes))}" if c.axes else c.primitive
        rows.append((name, str(c.where or ""), ", ".join(c.operands), c.became, _sent(c)))
    return rows


def _report(plan: CallPlan) -> str:
    title = f"plan of {plan.function}"
    parts = [f"{title}: {show_mesh(plan.mesh)}"]
    tables = [_axis_rows(plan), _array_rows("argument", plan.arguments), _array_rows("result", plan.results)]
    parts.extend("\n".join(_table(rows)) for rows in tables if len(rows) > 1)
    if plan.collectives:
        parts.append("\n".join([*_table(_collective_rows(plan)), f"in all, each device sends {_total(plan)}"]))
    else:
        parts.append("no collectives")
    listing = str(plan.program).splitlines()
    if len(listing) > MAX_LISTING:
        listing = [
            *listing[: MAX_LISTING - 1],
            f"... and {len(listing) - MAX_LISTING + 1} more lines: print(plan.program)",
        ]
    parts.append("\n".join(["program", *("  " + line for line in listing)]))
    return "\n\n".join(parts)


def _total(plan: CallPlan) -> str:
    transfers = [t for c in plan.collectives for t in c.transfers]
    known = sum(t.bytes_sent * (t.times or 0) for t in transfers)
    more = "" if plan.bytes_sent is not None else ", and more in each turn of a while loop"
    return show_bytes(known) + more


def _table(rows: Rows) -> list[str]:
    """Lines of at most WIDTH characters: the widest columns are wrapped until the table fits."""
    gap = 2
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    while sum(widths) + gap * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for number, row in enumerate(rows):
        cells = [_wrapped(cell.upper() if number == 0 else cell, w) for cell, w in zip(row, widths)]
        for k in range(max(map(len, cells))):
            padded = [(cell[k] if k < len(cell) else "").ljust(w) for cell, w in zip(cells, widths)]
            lines.append((" " * gap).join(padded).rstrip())
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Lines that are broken at white space, or else after a comma, or else anywhere."""
    lines: list[str] = []
    for piece in textwrap.wrap(text, width, break_long_words=False) or [""]:
        while len(piece) > width:
            at = piece.rfind(",", 0, width) + 1 or width
            lines.append(piece[:at])
            piece = piece[at:]
        lines.append(piece)
    return lines


def _two_columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Text on the left, a remark at the right end where it fits; long text continues on the next lines, indented."""
    width = WIDTH - 2
    side = max((len(remark) for _, remark in lines), default=0)
    shown = []
    for text, remark in lines:
        indent = " " * (len(text) - len(text.lstrip()) + 4)
        room = width - (side + 2 if side else 0)
        pieces = textwrap.wrap(text, room, subsequent_indent=indent, drop_whitespace=True) or [""]
        pieces[0] = text[: len(text) - len(text.lstrip())] + pieces[0].lstrip()
        shown.append((pieces[0].ljust(room) + "  " + remark).rstrip() if remark else pieces[0])
        shown.extend(pieces[1:])
    return shown


# --------------------------------------------------------------------------------- HTML


def _html(plan: CallPlan) -> str:
    return picture.html(
        f"plan of {plan.function}: {show_mesh(plan.mesh)}",
        [
            _axis_rows(plan),
            _array_rows("argument", plan.arguments),
            _array_rows("result", plan.results),
            _collective_rows(plan),
        ],
        f"in all, each device sends {_total(plan)}" if plan.collectives else "no collectives",
        str(plan.program),
        picture.svg(plan),
    )
