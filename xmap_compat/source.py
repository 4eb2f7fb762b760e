"""``plan.source()``: the program of a plan for plain JAX, as Python source.

There are two ways to write it.  The readable one keeps the user's functions, with their collectives rewritten,
under nested ``jax.vmap`` and ``jax.shard_map``.  Where that cannot be done the staged program is
written out, one line for each operation of a device.  Either is run on types before it is handed out.
"""

from __future__ import annotations

import functools
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax, errors
from xmap_compat.collectives import RULES, collectives_in, mentioned_names, mentions_any
from xmap_compat.named_program import trace_flat
from xmap_compat.named_shapes import Checker, while_names
from xmap_compat.resources import DeviceAxis
from xmap_compat.source_body import AxisNames, Body
from xmap_compat.source_helpers import HELPERS
from xmap_compat.source_jaxpr import Writer, vjp_rules
from xmap_compat.source_text import (
    WIDTH,
    Lines,
    Names,
    NotWritable,
    identifier,
    literal,
    partition_spec,
    prefix,
    tree,
)

if TYPE_CHECKING:
    from xmap_compat.plan import CallPlan

RESERVED = ("P", "Mesh", "jax", "jnp", "lax", "mesh", "np", "primitives")


def write(plan: CallPlan, staged: bool = False) -> str:
    """The source of a module that defines ``entry_name(plan)``.

    Args:
      staged: write out the operations of each device, also where the functions can be rewritten.

    Raises:
      NotImplementedError: the program holds something that has no source, as a callback.
    """
    return written(plan, staged)[0]


def values(plan: CallPlan, staged: bool = False) -> dict[str, Any]:
    """Arrays that the program closes over and that are too large to be written, by their names in the source."""
    return written(plan, staged)[1]


def written(plan: CallPlan, staged: bool = False) -> tuple[str, dict[str, Any]]:
    """The source and the values."""
    reasons: list[str] = []
    if any(plan.staged.plan.undeclared):
        raise errors.no_source(plan.function, ["a result varies over an axis that its out_axes leave out"])
    for attempt in _ATTEMPTS[1:] if staged else _ATTEMPTS:
        try:
            text, values = attempt(plan, reasons)
            return _checked(plan, text, values), values
        except NotWritable as reason:
            reasons.append(str(reason))
    raise errors.no_source(plan.function, reasons)


def entry_name(plan: CallPlan) -> str:
    """The name of the function that the source defines for the xmapped one."""
    return f"mapped_{identifier(plan.function)}" if plan.function != "<lambda>" else "mapped_function"


# ------------------------------------------------------------------------------ checking


def _checked(plan: CallPlan, text: str, values: dict[str, Any]) -> str:
    """The text, if it is a module that gives results of the right types."""
    namespace: dict[str, Any] = {"__name__": entry_name(plan), **values}
    args = _argument_types(plan)
    try:
        exec(compile(text, f"<source of {plan.function}>", "exec"), namespace)
        found = jax.eval_shape(namespace[entry_name(plan)], *args)
    except NotWritable:
        raise
    except Exception as error:
        raise NotWritable(f"what was written fails: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    expected = [(r.shape, np.dtype(r.dtype) if hasattr(r.dtype, "kind") else r.dtype) for r in plan.results]
    if [(r.shape, r.dtype) for r in jax.tree.leaves(found)] != expected:
        raise NotWritable("what was written gives results of other types")
    return text


def _argument_types(plan: CallPlan) -> Any:
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in plan.arguments]
    return jax.tree.unflatten(plan.staged.in_tree, types)


# ------------------------------------------------------------------- the parts of a module


def _module(plan: CallPlan, about: Sequence[str], lines: Sequence[str], more: Sequence[str] = ()) -> str:
    """Docstring, the imports that the lines use and some more, the mesh, the lines."""
    body = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    uses = lambda name: f"{name}." in body or f"{name}(" in body  # noqa: E731
    out = Lines()
    out.raw(_docstring(about))
    out.blank()
    imports = {"import jax", *more}
    imports.update(statement for name, statement in _IMPORTS.items() if uses(name))
    if plan.mesh is not None:
        imports.update((_IMPORTS["np"], "from jax.sharding import Mesh", "from jax.sharding import PartitionSpec as P"))
    out.raw(_sorted_imports(imports))
    if plan.mesh is not None:
        out.blank()
        out.raw(mesh_lines(plan.mesh))
    while lines and not lines[0]:
        lines = lines[1:]
    first = lines[0] if lines else ""
    out.blank(2 if first.startswith(("def ", "@")) else 1)
    out.raw(lines)
    return "\n".join(out.lines) + "\n"


_IMPORTS = {
    "functools": "import functools",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
    "primitives": "from jax.extend.core import primitives",
}


def _sorted_imports(statements: Iterable[str]) -> list[str]:
    """Imports in the order of isort: the standard library, then others; ``import`` before ``from``; names joined."""
    plain = sorted(s for s in statements if s.startswith("import "))
    members: dict[str, set[str]] = {}
    for statement in statements:
        if statement.startswith("from "):
            module, _, name = statement.removeprefix("from ").partition(" import ")
            members.setdefault(module, set()).add(name)
    joined = []
    for module in sorted(members):
        bare = sorted((n for n in members[module] if " as " not in n), key=lambda n: (not n[0].isupper(), n))
        joined.extend([f"from {module} import {', '.join(bare)}"] if bare else [])
        joined.extend(f"from {module} import {n}" for n in sorted(members[module]) if " as " in n)
    standard = lambda s: s.split()[1].split(".")[0] in sys.stdlib_module_names  # noqa: E731
    groups = [[s for s in (*plain, *joined) if standard(s) is kind] for kind in (True, False)]
    first, second = groups
    return [*first, *([""] if first and second else []), *second]


def _docstring(about: Sequence[str]) -> list[str]:
    lines = [line.replace("\\", "\\\\").replace('"' * 3, "'" * 3) for line in about]
    return [f'"""{lines[0]}', *lines[1:], '"""'] if len(lines) > 1 else [f'"""{lines[0]}"""']


def mesh_lines(mesh: jax.sharding.Mesh) -> list[str]:
    """The construction of a mesh over the same devices."""
    ids = [d.id for d in mesh.devices.flat]
    out = Lines()
    count = len(jax.devices())
    order = {d.id: k for k, d in enumerate(jax.devices())}
    positions = [order.get(i, i) for i in ids]
    if positions == list(range(len(ids))):
        devices = "jax.devices()" if len(ids) == count else f"jax.devices()[:{len(ids)}]"
    else:
        out.add("devices = jax.devices()")
        devices = f"[devices[k] for k in {literal(tuple(positions))}]"
    shape = ", ".join(map(str, mesh.devices.shape))
    grid = f"np.array({devices})" if mesh.devices.ndim == 1 else f"np.array({devices}).reshape({shape})"
    names = literal(tuple(mesh.axis_names))
    line = f"mesh = Mesh({grid}, {names})"
    if len(line) > 88:
        out.add(f"grid = {grid}")
        line = f"mesh = Mesh(grid, {names})"
    out.add(line)
    return out.lines


# ------------------------------------------------------------------ the user's functions


def _rewritten(plan: CallPlan, reasons: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The user's functions under nested vmaps, within a shard_map if there is a mesh."""
    devices = [name for name in plan.staged.plan.placements if isinstance(name, DeviceAxis)]
    if plan.staged.plan.nested or mentions_any(plan.staged.plan.program.jaxpr, devices):
        raise NotWritable("nested calls of xmap")
    looped = [a for a in plan.axes if a.loops]
    if len(looped) > 1 or any(looped[0].name not in r.axes for r in plan.results if looped):
        raise NotWritable("loops that are not around all results")
    _check_hazards(plan)
    names = AxisNames(
        {a.name: a.mesh_axes for a in plan.axes},
        _local_names(plan),
        tuple(plan.mesh.axis_names) if plan.mesh is not None else (),
        {a.name: a.size for a in plan.axes},
    )
    entry = entry_name(plan)
    body = Body(plan.staged.declared.fun, plan.staged.plan.program.jaxpr, names, [*RESERVED[:2], "mesh", entry])
    taken = [*RESERVED, *body.functions, *body.helpers, *body.values, entry, "per_device", "mapped", "result"]
    wrapper = _Wrapper(plan, names, body.name, Names(taken))
    lines = [*value_lines(body.values), *body.assignments]
    for helper in body.helpers:
        lines.extend(["", "", *HELPERS[helper].rstrip().split("\n")])
    for function in body.functions.values():
        lines.extend(["", "", *function])
    lines.extend(["", "", *wrapper.lines()])
    about = [_title(plan)]
    if body.edits:
        about.extend(["", "What changed in the functions:", ""])
    for edit in body.edits:
        where = f"  {os.path.basename(edit.file)}:{edit.line}  "
        about.extend([where + edit.old, "-> ".rjust(len(where)) + edit.new])
    return _module(plan, about, lines, list(body.imports)), body.values


def _local_names(plan: CallPlan) -> dict[Any, str | None]:
    """What the vmap of each axis calls it: its own name, unless that is a mesh axis or no string."""
    taken = Names([*map(str, plan.mesh.axis_names)] if plan.mesh is not None else [])
    local: dict[Any, str | None] = {}
    for axis in plan.axes:
        vmapped = axis.device_size != 1 or not axis.mesh_axes
        wanted = axis.name if isinstance(axis.name, str) else identifier(str(axis.name))
        local[axis.name] = taken.like(wanted) if vmapped else None
    return local


def _check_hazards(plan: CallPlan) -> None:
    """Refuse what plain JAX computes otherwise than xmap."""
    placements = plan.staged.plan.placements
    _check_rules(plan)
    _check_contractions(plan.staged.plan.program.jaxpr)
    for site in plan.staged.sites:
        primitive, params = site.eqn.primitive.name, site.eqn.params
        held = frozenset().union(*(o.names for o in site.operands))
        if primitive in RULES:
            for name in mentioned_names(params):
                others = {m for n in held if n in placements and n != name for m in placements[n].mesh_axes}
                if name in placements and name not in held and others & set(placements[name].mesh_axes):
                    raise NotWritable(f"{primitive} over {name} of a value that does not vary over it")
        if primitive == "cond":
            varying = {m for n in site.operands[0].names if n in placements for m in placements[n].mesh_axes}
            if varying and any(map(collectives_in, params["branches"])):
                raise NotWritable("a collective in a branch that not all devices take")
        if primitive == "while" and (collectives_in(params["cond_jaxpr"]) or collectives_in(params["body_jaxpr"])):
            checker = Checker(placements, plan.function)
            _, names = while_names(checker, params, [o.names for o in site.operands])
            if any(placements[n].mesh_axes for n in names if n in placements):
                raise NotWritable("a collective in a loop that not all devices leave together")


def _check_contractions(jaxpr: Any) -> None:
    """Refuse contractions over names that the body differentiates: in a gradient inside it they sum no cotangents."""
    operations = list(_operations(jaxpr))
    contractions = {_call(eqn) for eqn, backward in operations if eqn.primitive.name == "pdot" and not backward}
    if contractions and any(_call(eqn) in contractions for eqn, backward in operations if backward):
        raise NotWritable("a contraction over names that is differentiated inside the body")


def _call(eqn: Any) -> tuple[Any, ...]:
    """The user's innermost call that an equation came from."""
    return tuple(_jax.user_frames(eqn)[:1])


def _operations(jaxpr: Any, backward: bool = False) -> Iterator[tuple[Any, bool]]:
    """The equations of a program, at any depth, and whether they belong to the backward pass of a derivative in it."""
    body, _ = _jax.open_jaxpr(jaxpr)
    for eqn in body.eqns:
        transposed = backward or "transpose(" in _jax.name_stack(eqn)
        yield eqn, transposed
        for sub in _jax.subjaxprs(eqn.params):
            yield from _operations(sub, transposed)


def _check_rules(plan: CallPlan) -> None:
    """Refuse backward rules to which plain JAX gives other cotangents than xmap.

    Under ``vmap`` it gives each element of an axis the cotangent of a sum, and without types of varying
    values it gives each device that holds a copy of a result a part of its cotangent.
    """
    body = plan.staged.plan.body
    types = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]  # noqa: E731
    parts = [frozenset(m for n in r.axes if n is not None for m in _axis_of(plan, n).mesh_axes) for r in plan.results]
    mesh_shape = plan.mesh.shape if plan.mesh is not None else {}
    copied = any(size > 1 and any(m not in own for own in parts) for m, size in mesh_shape.items())
    rules = (eqn for eqn, _ in _operations(plan.staged.plan.program.jaxpr) if eqn.primitive.name == "custom_vjp_call")
    for eqn in rules:
        _, forward, backward = vjp_rules(eqn, lambda fun, avals: trace_flat(fun, types(avals), body))
        if any(map(collectives_in, (eqn.params["call_jaxpr"], forward, backward))):
            raise NotWritable("a backward rule with collectives")
        if copied and not _is_linear(eqn, backward):
            raise NotWritable("a backward rule that is not linear in the cotangents, or not known to be")


def _axis_of(plan: CallPlan, name: Any) -> Any:
    return next(a for a in plan.axes if a.name == name)


def _is_linear(eqn: Any, backward: Any) -> bool:
    """Whether a backward rule may be given a part of the cotangents, as rules should be and those that clip are not."""
    count = sum(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars)
    inputs = _jax.open_jaxpr(backward)[0].invars
    return _linear_outputs(backward, [False] * (len(inputs) - count) + [True] * count) is not None


def _linear_outputs(jaxpr: Any, given: Sequence[bool]) -> list[bool] | None:
    """Which results depend on the given inputs; None if one does not do so linearly, as far as can be told."""
    body, _ = _jax.open_jaxpr(jaxpr)
    depends: set[Any] = set()
    depends.update(v for v, is_given in zip(body.invars, given) if is_given)
    for eqn in body.eqns:
        flags = [not isinstance(v, _jax.Literal) and v in depends for v in eqn.invars]
        if not any(flags):
            continue
        primitive = eqn.primitive.name
        if primitive in ("jit", "pjit", "closed_call"):
            inner = _linear_outputs(next(iter(_jax.subjaxprs(eqn.params))), flags)
            if inner is None:
                return None
            depends.update(v for v, flag in zip(eqn.outvars, inner) if flag)
            continue
        bilinear = primitive in _BILINEAR and sum(flags) == 1
        in_first = primitive in _LINEAR_IN_FIRST and not any(flags[1:])
        selects = primitive == "select_n" and not flags[0]
        if primitive not in _LINEAR and not bilinear and not in_first and not selects:
            return None
        depends.update(eqn.outvars)
    return [not isinstance(v, _jax.Literal) and v in depends for v in body.outvars]


_BILINEAR = ("mul", "dot_general", "pdot", "conv_general_dilated")
_LINEAR_IN_FIRST = ("div", "gather", "dynamic_slice")
_LINEAR = (
    *("add", "add_any", "sub", "neg", "reduce_sum", "broadcast_in_dim", "reshape", "transpose", "squeeze", "copy"),
    *("expand_dims", "convert_element_type", "slice", "concatenate", "rev", "cumsum", "psum", "all_gather", "ppermute"),
    *("reduce_scatter", "all_to_all", "pbroadcast", "real", "imag", "pad"),
)


class _Wrapper:
    """The functions that map the body: over the devices, over loops, over what is vectorized."""

    def __init__(self, plan: CallPlan, names: AxisNames, body: str, fresh: Names):
        self.plan, self.names, self.body, self.fresh = plan, names, body, fresh
        self.in_tree = plan.staged.in_tree.children()
        self.out_tree = plan.staged.plan.program.out_tree
        self.parameters = [fresh.like(identifier(root)) for root in _root_names(plan, self.in_tree)]
        self.loops = [a for a in plan.axes if a.loops]
        self.mapped = [a for a in plan.axes if names.local[a.name] and not a.loops]

    def lines(self) -> list[str]:
        out = Lines()
        called = ", ".join(self.parameters)
        entry = entry_name(self.plan)
        if self.plan.mesh is None:
            out.raw(["@jax.jit"])
            out.block(f"def {entry}({called}):", lambda: self._on_device(out, _summary(self.plan)))
            return out.lines
        about = "What each device computes from its parts of the arguments."
        out.block(f"def per_device({called}):", lambda: self._on_device(out, about))
        out.blank(2)
        specs = self._by_argument(lambda a: partition_spec(a.spec or ()))
        results = prefix(self.out_tree, [partition_spec(r.spec or ()) for r in self.plan.results])
        in_specs = f"({', '.join(specs)}{',' if len(specs) == 1 else ''})"
        # Types of values that vary over mesh axes do not know collectives over vmapped axes.
        unchecked = ", check_vma=False"
        out.raw(["@jax.jit"])

        def write():
            out.raw([f'    """{_summary(self.plan)}"""'])
            call = f"jax.shard_map(per_device, mesh=mesh, in_specs={in_specs}, out_specs={results}{unchecked})"
            out.add(f"mapped = {call}")
            out.add(f"return mapped({called})")

        out.block(f"def {entry}({called}):", write)
        return out.lines

    def _by_argument(self, leaf: Callable[[Any], str]) -> list[str]:
        texts, start = [], 0
        for group in self.in_tree:
            arrays = self.plan.arguments[start : start + group.num_leaves]
            texts.append(prefix(group, [leaf(a) for a in arrays]) if arrays else "None")
            start += group.num_leaves
        return texts

    # ---- on a device

    def _on_device(self, out, about):
        out.raw([f'    """{about}"""'])
        self._squeeze(out)
        function = self._vmaps(out)
        called = ", ".join(self.parameters)
        if self.loops:
            self._loop(out, function)
        expanded = [self._full_dims(r) for r in self.plan.results]
        if not any(expanded):
            out.add("return result" if self.loops else f"return {function}({called})")
            return
        if not self.loops:
            out.add(f"result = {function}({called})")
        out.add(f"return {_at_leaves('jnp.expand_dims', 'result', self.out_tree, expanded)}")

    def _full_dims(self, array) -> tuple[int, ...]:
        """Dimensions of axes that fill their mesh axes: one element on each device."""
        return tuple(k for k, n in enumerate(array.axes) if n is not None and not self.names.local[n])

    def _squeeze(self, out):
        start = 0
        for parameter, group in zip(self.parameters, self.in_tree):
            dims = [self._full_dims(a) for a in self.plan.arguments[start : start + group.num_leaves]]
            start += group.num_leaves
            if any(dims):
                out.add(f"{parameter} = {_at_leaves('jnp.squeeze', parameter, group, dims)}")

    def _labels(self, array) -> list[Any]:
        """The dimensions of an array on a device, with the axes that are still to be mapped."""
        return [n for n in array.axes if n is None or self.names.local[n]]

    def _position(self, array, axis, outer) -> int | None:
        """Where an axis is after the outer ones have been mapped."""
        labels = [n for n in self._labels(array) if n is None or n not in outer]
        return labels.index(axis.name) if axis.name in labels else None

    def _vmaps(self, out) -> str:
        """Nested vmaps, the first axis outermost; the name of the function that they give."""
        function = self.body
        looped = [a.name for a in self.loops]
        for axis in reversed(self.mapped):
            outer = [*looped, *(a.name for a in self.mapped[: self.mapped.index(axis)])]
            where = lambda a, axis=axis, outer=outer: literal(self._position(a, axis, outer))  # noqa: E731
            in_axes = self._by_argument(where)
            out_axes = prefix(self.out_tree, [where(r) for r in self.plan.results]) if self.plan.results else "None"
            options = [f"axis_name={literal(self.names.local[axis.name])}"]
            if all(axis.name not in a.axes for a in self.plan.arguments):
                options.append(f"axis_size={axis.device_size}")
            if out_axes != "0":
                options.insert(0, f"out_axes={out_axes}")
            if set(in_axes) != {"0"}:
                options.insert(0, f"in_axes=({', '.join(in_axes)}{',' if len(in_axes) == 1 else ''})")
            out.add(f"mapped = jax.vmap({function}, {', '.join(options)})")
            function = "mapped"
        return function

    def _loop(self, out, function):
        """The looped axis: chunk after chunk."""
        (axis,) = self.loops
        scanned, start = [], 0
        for parameter, group in zip(self.parameters, self.in_tree):
            arrays = self.plan.arguments[start : start + group.num_leaves]
            start += group.num_leaves
            positions = [self._position(a, axis, []) for a in arrays]
            if all(p is None for p in positions):
                continue
            if None in positions:
                raise NotWritable("a loop over some arrays of an argument")
            if any(positions):
                shown = [literal(p) for p in positions]
                moved = _at_leaves_with("lambda a, k: jnp.moveaxis(a, k, 0)", parameter, group, shown)
                out.add(f"{parameter} = {moved}")
            scanned.append(parameter)
        if not scanned:
            raise NotWritable("a loop over an axis that no argument has")
        called = ", ".join(self.parameters)
        packed_scanned = scanned[0] if len(scanned) == 1 else f"({', '.join(scanned)})"
        chunk = self.fresh.like("one")

        def write():
            if len(scanned) > 1:
                out.add(f"{', '.join(scanned)} = {slices}")
            out.add(f"return {function}({called})")

        slices = scanned[0] if len(scanned) == 1 else self.fresh.like("slices")
        out.block(f"def {chunk}({slices}):", write)
        batch = f", batch_size={axis.vmap_size}" if axis.vmap_size != 1 else ""
        out.add(f"result = lax.map({chunk}, {packed_scanned}{batch})")
        positions = [self._position(r, axis, []) for r in self.plan.results]
        if any(positions):
            shown = [literal(p) for p in positions]
            moved = _at_leaves_with("lambda a, k: jnp.moveaxis(a, 0, k)", "result", self.out_tree, shown)
            out.add(f"result = {moved}")


def _at_leaves(function: str, argument: str, structure: Any, dims: Sequence[tuple[int, ...]]) -> str:
    """A function of an array and dimensions applied to an array or at the leaves of a pytree."""
    shown = [literal(d[0] if len(d) == 1 else d) for d in dims]
    return _at_leaves_with(function, argument, structure, shown)


def _at_leaves_with(function: str, argument: str, structure: Any, shown: Sequence[str]) -> str:
    if _is_leaf(structure):
        return _applied(function, argument, shown[0])
    if len(set(shown)) == 1:
        return f"jax.tree.map(lambda a: {_applied(function, 'a', shown[0])}, {argument})"
    return f"jax.tree.map({function}, {argument}, {tree(structure, shown)})"


def _applied(function: str, argument: str, shown: str) -> str:
    """``jnp.squeeze`` or ``lambda a, k: jnp.moveaxis(a, k, 0)`` of two texts."""
    _, is_lambda, expression = function.partition(": ")
    if not is_lambda:
        return f"{function}({argument}, {shown})"
    return expression.replace("(a,", f"({argument},").replace(" k", f" {shown}")


# --------------------------------------------------------------------- the staged program


def _staged(plan: CallPlan, reasons: Sequence[str], typed: bool, sparing: bool) -> tuple[str, dict[str, Any]]:
    names = Names(RESERVED)
    entry = entry_name(plan)
    names.take(entry)
    writer = Writer(names, typed, sparing)
    structure = plan.staged.in_tree
    groups = structure.children()
    roots = _root_names(plan, groups)
    parameters = [names.like(identifier(root)) for root in roots]
    leaves = [names.like(identifier(a.path)) if not _is_leaf(g) else "" for g, a in _by_argument(plan, groups)]
    out = Lines()

    def body():
        out.raw([f'    """{_summary(plan)}"""'])
        texts, start = [], 0
        for parameter, group in zip(parameters, groups):
            if _is_leaf(group):
                texts.append(parameter)
            elif group.num_leaves:
                own = leaves[start : start + group.num_leaves]
                texts.extend(own)
                out.add(f"{', '.join(own)}{',' if len(own) == 1 else ''} = jax.tree.leaves({parameter})")
            start += group.num_leaves
        results = writer.jaxpr(plan.staged.jaxpr, texts, out)
        out.add(f"return {_result(plan, results)}")

    out.raw(["@jax.jit"])
    out.block(f"def {entry}({', '.join(parameters)}):", body)
    lines = [*value_lines(writer.constants), *writer.functions.lines]
    lines = [*lines, "", "", *out.lines] if lines else out.lines
    about = [_title(plan), "", "Each line is an operation of one device."]
    if reasons:
        why = f"The functions themselves could not be rewritten because of {reasons[0]}."
        about.extend(textwrap.wrap(why, WIDTH))
    return _module(plan, about, lines), writer.constants


def _title(plan: CallPlan) -> str:
    return f"{plan.function} as a program for plain JAX: call {entry_name(plan)}."


def value_lines(values: dict[str, Any]) -> list[str]:
    """Declarations of arrays that are too large to be written: to be assigned by whoever uses the module."""
    shown = ((name, np.shape(v), np.asarray(v).dtype) for name, v in values.items())
    return [f"{name}: jax.Array  # assign this one: {dtype}{list(shape)}" for name, shape, dtype in shown]


def _root_names(plan, groups):
    roots, start = [], 0
    for k, group in enumerate(groups):
        path = plan.arguments[start].path if group.num_leaves else f"arg{k}"
        depth = min((path.index(c) for c in "[." if c in path), default=len(path))
        root = path if _is_leaf(group) else path[:depth]
        roots.append(root)
        start += group.num_leaves
    return roots


def _by_argument(plan, groups):
    start = 0
    for group in groups:
        for array in plan.arguments[start : start + group.num_leaves]:
            yield group, array
        start += group.num_leaves


def _is_leaf(structure) -> bool:
    return jax.tree_util.treedef_is_leaf(structure) and structure.num_leaves == 1


def _result(plan, results):
    return tree(plan.staged.plan.program.out_tree, results)


def _summary(plan: CallPlan) -> str:
    takes = ", ".join(f"{a.path}: {a.type}" for a in plan.arguments)
    gives = ", ".join(a.type for a in plan.results)
    text = f"{takes} -> {gives}."
    if len(text) <= 76:
        return text
    count = lambda n: f"{n} array{'s' if n != 1 else ''}"  # noqa: E731
    return f"{count(len(plan.arguments))} -> {count(len(plan.results))}."


_ATTEMPTS: tuple[Callable[[Any, Sequence[str]], tuple[str, dict[str, Any]]], ...] = (
    _rewritten,
    functools.partial(_staged, typed=True, sparing=True),
    functools.partial(_staged, typed=True, sparing=False),
    functools.partial(_staged, typed=False, sparing=False),
)
