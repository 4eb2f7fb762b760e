"""``plan.source()``: the program of a plan for plain JAX, as Python source.

It keeps the user's functions, with their collectives rewritten, under nested ``jax.vmap`` and ``jax.shard_map``.
Before it is handed out it is staged and compared with the plan's program; where it cannot be written, or
computes something else, there is no source, and the reason is said.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat.core import errors
from xmap_compat.core.placement import DeviceAxis
from xmap_compat.core.rules.table import collectives_in, mentions_any
from xmap_compat.tools.source import hazards, proof
from xmap_compat.tools.source.module import Module
from xmap_compat.tools.source.rewrite import AxisNames
from xmap_compat.tools.source.rules import RuleOver, rules_over
from xmap_compat.tools.source.text import (
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
    from xmap_compat.tools.plan import CallPlan


def write(plan: CallPlan) -> str:
    """The source of a module that defines ``entry_name(plan)``.

    Raises:
      NotImplementedError: something cannot be written, or is not certain to be the same program; says what.
    """
    return written(plan)[0]


def values(plan: CallPlan) -> dict[str, Any]:
    """Arrays that the program closes over and that are too large to be written, by their names in the source."""
    return written(plan)[1]


def written(plan: CallPlan) -> tuple[str, dict[str, Any]]:
    """The source and the values."""
    if plan.staged.plan.nested or mentions_any(plan.staged.plan.program.jaxpr, _device_axes(plan)):
        raise errors.no_source(plan.function, ["nested calls of xmap that use the mesh"])
    if any(plan.staged.plan.undeclared):
        raise errors.no_source(plan.function, ["a result varies over an axis that its out_axes leave out"])
    names = _axis_names(plan)
    try:
        rules = rules_over(plan)
        unchecked = _why_unchecked(plan, names, rules)
        if unchecked is None:
            try:
                return _made(plan, names, rules, None)
            except NotWritable as reason:
                unchecked = f"with types JAX gives {str(reason).partition('fails: ')[2] or reason}"
        return _made(plan, names, rules, unchecked)
    except NotWritable as reason:
        raise errors.no_source(plan.function, [str(reason)]) from reason.__cause__


def _made(
    plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], unchecked: str | None
) -> tuple[str, dict[str, Any]]:
    made = _rewritten(plan, names, rules, unchecked)
    _check(plan, made)
    try:
        _check_derivative(plan, made)
    except NotWritable as reason:
        if plan.mesh is not None and unchecked is None:
            raise
        # It fails aloud, and values are the same: the module says so.
        made = made._replace(
            text=_with_note(
                made.text, f"JAX cannot differentiate this: {str(reason).partition('fails: ')[2].rstrip('.')}."
            )
        )
    return made.text, made.values


def _device_axes(plan: CallPlan) -> list[DeviceAxis]:
    return [name for name in plan.staged.plan.placements if isinstance(name, DeviceAxis)]


def _why_unchecked(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver]) -> str | None:
    """Why JAX cannot check which values vary over the mesh, as far as that is known before it is tried."""
    over = collectives_in(plan.staged.plan.program.jaxpr).union(*(rule.names for rule in rules))
    vmapped = [n for n in names.mesh if names.local[n] and n in over]
    if plan.mesh is not None and vmapped:
        return f"types know no collectives over axes of jax.vmap, as {literal(names.local[vmapped[0]])}"
    if plan.mesh is not None and hazards.differentiates(plan.staged.plan.program.jaxpr):
        return "a gradient that is taken inside is each element's own, of which types know nothing"
    return None


class Written(NamedTuple):
    """A module.

    Attributes:
      values: arrays that it closes over and that are too large to be written, by their names in it.
      entry: the name of the function for the xmapped one.
      to_prove: the module with the xmaps inside as ``nested``.
      prove: finds what the module, executed to a namespace, computes otherwise than the plan.
    """

    text: str
    values: dict[str, Any]
    entry: str
    to_prove: str
    nested: dict[str, Any]
    prove: Callable[[dict[str, Any]], str | None]


def entry_name(plan: CallPlan) -> str:
    """The name of the function that the source defines for the xmapped one."""
    return f"mapped_{identifier(plan.function)}" if plan.function != "<lambda>" else "mapped_function"


# ------------------------------------------------------------------------------ checking


def _check(plan: CallPlan, made: Written) -> None:
    """Raise unless a module gives results of the right types, and computes what the plan's program computes."""
    args = _argument_types(plan)
    try:
        found = jax.eval_shape(_executed(plan, made)[made.entry], *args)
    except Exception as error:
        raise NotWritable(f"what was written fails: {_first_line(error)}") from error
    expected = [(r.shape, np.dtype(r.dtype) if hasattr(r.dtype, "kind") else r.dtype) for r in plan.results]
    if [(r.shape, r.dtype) for r in jax.tree.leaves(found)] != expected:
        raise NotWritable("what was written gives results of other types")
    try:
        difference = made.prove(_executed(plan, made, {**proof.STAND_INS, **made.nested}))
    except Exception as error:
        raise NotWritable(f"what was written cannot be compared with the plan: {_first_line(error)}") from error
    if difference is not None:
        raise NotWritable(f"what was written computes something else: {difference}")


def _check_derivative(plan: CallPlan, made: Written) -> None:
    """Raise if a module cannot be differentiated, and what the plan runs can."""
    leaves, structure = jax.tree.flatten(_argument_types(plan))
    function = _executed(plan, made)[made.entry]
    flat = lambda *given: jax.tree.leaves(function(*jax.tree.unflatten(structure, given)))  # noqa: E731
    error = _derivative_error(flat, leaves)
    if error is not None and _derivative_error(jaxpr_as_fun(plan.staged.jaxpr), leaves) is None:
        raise NotWritable(f"its derivative fails: {_first_line(error)}") from error


def _derivative_error(flat: Callable[..., Any], leaves: Sequence[Any]) -> Exception | None:
    """What differentiating a function of arrays raises."""
    smooth = [k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.inexact)]

    def derivative(leaves):
        def of_smooth(*given):
            values = dict(zip(smooth, given))
            outs = flat(*(values.get(k, x) for k, x in enumerate(leaves)))
            return [x for x in outs if jnp.issubdtype(x.dtype, np.inexact)]

        results, pull = jax.vjp(of_smooth, *(leaves[k] for k in smooth))
        return pull(results)

    try:
        jax.eval_shape(derivative, leaves)
    except Exception as error:
        return error
    return None


def _executed(plan: CallPlan, made: Written, stand_ins: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a module defines; stand-ins take the places of helpers."""
    module = types.ModuleType(f"_source_of_{entry_name(plan)}")
    vars(module).update({**made.values, **(stand_ins or {})})
    tree = ast.parse(made.to_prove if stand_ins else made.text)
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in (stand_ins or {})]
    sys.modules[module.__name__] = module  # where definitions of classes look for it
    try:
        exec(compile(tree, f"<source of {plan.function}>", "exec"), vars(module))
    finally:
        sys.modules.pop(module.__name__, None)
    return vars(module)


def _first_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _argument_types(plan: CallPlan) -> Any:
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in plan.arguments]
    return jax.tree.unflatten(plan.staged.in_tree, leaves)


# ------------------------------------------------------------------- the parts of a module


def _module(plan: CallPlan, about: Sequence[str], lines: Sequence[str], more: Sequence[str], mesh: str) -> str:
    """Docstring, the imports that the lines use and some more, the mesh, the lines."""
    body = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    imports = {"import jax", *more}
    imports.update(line for name, line in _IMPORTS.items() if re.search(rf"\b{name}\.", body))
    if plan.mesh is not None:
        imports.update((_IMPORTS["np"], "from jax.sharding import Mesh", "from jax.sharding import PartitionSpec as P"))
    made = mesh_lines(plan.mesh, mesh) if plan.mesh is not None else []
    return _formatted("\n".join([*_docstring(about), "", *_sorted_imports(imports), "", *made, *lines, ""]))


def _formatted(text: str) -> str:
    """The text as a formatter leaves it, if ruff or black is installed."""
    for name, options in (("ruff", ["format", "--isolated", f"--line-length={WIDTH}", "-"]), ("black", ["-q", "-"])):
        if importlib.util.find_spec(name) is not None:
            command = [sys.executable, "-m", name, *options]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
            if done.returncode == 0:
                return done.stdout
    return re.sub("\n{4,}", "\n\n\n", text)


_IMPORTS = {
    "functools": "import functools",
    "itertools": "import itertools",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
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


def _with_note(text: str, note: str) -> str:
    """A module with one more paragraph in its docstring."""
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    lines = _docstring([*docstring.rstrip("\n").split("\n"), "", *textwrap.wrap(note, WIDTH)])
    return text.replace(text[: text.index('"""', 3) + 3], "\n".join(lines), 1)


def _docstring(about: Sequence[str]) -> list[str]:
    lines = [line.replace("\\", "\\\\").replace('"' * 3, "'" * 3) for line in about]
    return [f'"""{lines[0]}', *lines[1:], '"""'] if len(lines) > 1 else [f'"""{lines[0]}"""']


def mesh_lines(mesh: jax.sharding.Mesh, name: str) -> list[str]:
    """The construction of a mesh over the same devices."""
    ids = [d.id for d in mesh.devices.flat]
    order = {d.id: k for k, d in enumerate(jax.devices())}
    positions = [order.get(i, i) for i in ids]
    if positions == list(range(len(ids))):
        devices = "jax.devices()" if len(ids) == len(order) else f"jax.devices()[:{len(ids)}]"
    else:
        devices = f"[jax.devices()[k] for k in {literal(tuple(positions))}]"
    shape = ", ".join(map(str, mesh.devices.shape))
    grid = f"np.array({devices})" if mesh.devices.ndim == 1 else f"np.array({devices}).reshape({shape})"
    return [f"{name} = Mesh({grid}, {literal(tuple(mesh.axis_names))})"]


# ------------------------------------------------------------------ the user's functions


def _axis_names(plan: CallPlan) -> AxisNames:
    return AxisNames(
        {a.name: a.mesh_axes for a in plan.axes},
        _local_names(plan),
        tuple(plan.mesh.axis_names) if plan.mesh is not None else (),
        {a.name: a.size for a in plan.axes},
    )


def _rewritten(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], unchecked: str | None) -> Written:
    """The user's functions under nested vmaps, within a shard_map if there is a mesh.

    Args:
      unchecked: why JAX cannot check which values vary over the mesh; None if it can.
    """
    looped = [a for a in plan.axes if a.loops]
    if len(looped) > 1:
        raise NotWritable("several axes on loops")
    if any(looped[0].name not in r.axes for r in plan.results if looped):
        raise NotWritable("a loop that is not around all results")
    typed = plan.mesh is not None and unchecked is None
    hazards.check(plan, typed)
    if rules and hazards.differentiates(plan.staged.plan.program.jaxpr):
        raise NotWritable("a backward rule with collectives, and a gradient that is taken inside")
    reserved = ("P", "Mesh") if plan.mesh is not None else ()
    made = lambda proving: Module(  # noqa: E731
        plan.staged.declared.fun, plan.staged.plan.program.jaxpr, names, reserved, rules, typed, proving
    )
    module = made(False)
    fresh = Names(module.taken)
    wrapper = _Wrapper(plan, names, module, fresh, unchecked)
    mapped = wrapper.lines()
    lines = [*_definitions(module), "", "", *mapped]
    about = [_title(plan, wrapper.entry)]
    if module.edits:
        about.extend(["", "What changed in the functions:", ""])
    for edit in module.edits:
        where = f"  {os.path.basename(edit.file)}:{edit.line}  "
        about.extend([where + edit.old, "-> ".rjust(len(where)) + edit.new])
    text = _module(plan, about, lines, list(module.imports), wrapper.mesh)
    to_prove, nested = text, {}
    if module.nested:
        # What an xmap inside is evaluated to is no nest of vmaps: it is compared as an xmap.
        of_xmaps = made(True)
        to_prove = _module(plan, about, _definitions(of_xmaps), list(of_xmaps.imports), wrapper.mesh)
        nested = proof.nested_xmaps(of_xmaps.nested)
    prove = lambda there: proof.prove_functions(plan, names, there, module.name)  # noqa: E731
    return Written(text, module.values, wrapper.entry, to_prove, nested, prove)


def _definitions(module: Module) -> list[str]:
    """The lines of a module before the function for the xmapped one."""
    lines = [*value_lines(module.values), *module.helper_lines()]
    for definition in module.definitions.values():
        lines.extend([*([] if len(definition) == 1 else ["", ""]), *definition])
    return lines


def _local_names(plan: CallPlan) -> dict[Any, str | None]:
    """What the vmap of each axis calls it: its own name, unless that is a mesh axis or no string."""
    taken = Names([*map(str, plan.mesh.axis_names)] if plan.mesh is not None else [])
    local: dict[Any, str | None] = {}
    for axis in plan.axes:
        vmapped = axis.device_size != 1 or not axis.mesh_axes
        wanted = axis.name if isinstance(axis.name, str) else identifier(str(axis.name))
        local[axis.name] = taken.like(wanted) if vmapped else None
    return local


class _Wrapper:
    """The functions that map the body: over the devices, over loops, over what is vectorized."""

    def __init__(self, plan: CallPlan, names: AxisNames, module: Module, fresh: Names, unchecked: str | None):
        self.plan, self.names, self.body, self.fresh, self.unchecked = plan, names, module.name, fresh, unchecked
        self.named = lambda cls: module.expression(cls, cls.__name__)
        self.entry = fresh.like(entry_name(plan))
        self.mesh, self.per_device, self.mapped_name, self.result = (
            fresh.like(name) for name in ("mesh", "per_device", "mapped", "result")
        )
        self.in_tree = plan.staged.in_tree.children()
        self.out_tree = plan.staged.plan.program.out_tree
        self.parameters = [fresh.like(identifier(root)) for root in _root_names(plan, self.in_tree)]
        self.loops = [a for a in plan.axes if a.loops]
        self.mapped = [a for a in plan.axes if names.local[a.name] and not a.loops]

    def lines(self) -> list[str]:
        out = Lines()
        called = ", ".join(self.parameters)
        if self.plan.mesh is None:
            out.raw(["@jax.jit"])
            out.block(f"def {self.entry}({called}):", lambda: self._on_device(out, _summary(self.plan)))
            return out.lines
        about = "What each device computes from its parts of the arguments."
        out.block(f"def {self.per_device}({called}):", lambda: self._on_device(out, about))
        out.blank(2)
        specs = self._by_argument(lambda a: partition_spec(a.spec or ()))
        results = prefix(self.out_tree, [partition_spec(r.spec or ()) for r in self.plan.results], self.named)
        same = len(set(specs)) == 1 and specs[0].startswith("P(")
        in_specs = specs[0] if same else f"({', '.join(specs)}{',' if len(specs) == 1 else ''})"
        unchecked = "" if self.unchecked is None else ", check_vma=False"
        out.raw(["@jax.jit"])

        def write():
            out.add(f'"""{_summary(self.plan)}"""')
            if self.unchecked is not None:
                out.raw([f"    # {line}" for line in textwrap.wrap(f"Unchecked: {self.unchecked}.", WIDTH - 6)])
            given = f"mesh={self.mesh}, in_specs={in_specs}, out_specs={results}{unchecked}"
            out.add(f"{self.mapped_name} = jax.shard_map({self.per_device}, {given})")
            out.add(f"return {self.mapped_name}({called})")

        out.block(f"def {self.entry}({called}):", write)
        return out.lines

    def _by_argument(self, leaf: Callable[[Any], str]) -> list[str]:
        texts, start = [], 0
        for parameter, group in zip(self.parameters, self.in_tree):
            leaves = [leaf(a) for a in self.plan.arguments[start : start + group.num_leaves]]
            start += group.num_leaves
            try:
                texts.append(prefix(group, leaves) if leaves else "None")
            except NotWritable:  # classes of the user's: the structure is the argument's
                texts.append(f"jax.tree.unflatten(jax.tree.structure({parameter}), [{', '.join(leaves)}])")
        return texts

    # ---- on a device

    def _on_device(self, out, about):
        out.add(f'"""{about}"""')
        self._squeeze(out)
        function = self._vmaps(out)
        called = ", ".join(self.parameters)
        if self.loops:
            self._loop(out, function)
        expanded = [self._full_dims(r) for r in self.plan.results]
        if not any(expanded):
            out.add(f"return {self.result}" if self.loops else f"return {function}({called})")
            return
        if not self.loops:
            out.add(f"{self.result} = {function}({called})")
        out.add(f"return {_at_leaves('jnp.expand_dims', self.result, self.out_tree, expanded)}")

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
            out_axes = (
                prefix(self.out_tree, [where(r) for r in self.plan.results], self.named)
                if self.plan.results
                else "None"
            )
            options = [f"axis_name={literal(self.names.local[axis.name])}"]
            if all(axis.name not in a.axes for a in self.plan.arguments):
                options.append(f"axis_size={axis.device_size}")
            if out_axes != "0":
                options.insert(0, f"out_axes={out_axes}")
            if set(in_axes) != {"0"}:
                options.insert(0, f"in_axes=({', '.join(in_axes)}{',' if len(in_axes) == 1 else ''})")
            out.add(f"{self.mapped_name} = jax.vmap({function}, {', '.join(options)})")
            function = self.mapped_name
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
        batch = f", batch_size={axis.local_size}" if axis.local_size != 1 else ""
        out.add(f"{self.result} = lax.map({chunk}, {packed_scanned}{batch})")
        positions = [self._position(r, axis, []) for r in self.plan.results]
        if any(positions):
            shown = [literal(p) for p in positions]
            moved = _at_leaves_with("lambda a, k: jnp.moveaxis(a, 0, k)", self.result, self.out_tree, shown)
            out.add(f"{self.result} = {moved}")


def _at_leaves(function: str, argument: str, structure: Any, dims: Sequence[tuple[int, ...]]) -> str:
    """A function of an array and dimensions applied to an array or at the leaves of a pytree."""
    shown = [literal(d[0] if len(d) == 1 else d) for d in dims]
    return _at_leaves_with(function, argument, structure, shown)


def _at_leaves_with(function: str, argument: str, structure: Any, shown: Sequence[str]) -> str:
    if _is_leaf(structure):
        return _applied(function, argument, shown[0])
    if len(set(shown)) == 1:
        return f"jax.tree.map(lambda a: {_applied(function, 'a', shown[0])}, {argument})"
    return f"jax.tree.map({function}, {argument}, {_tree_like(argument, structure, shown)})"


def _tree_like(argument: str, structure: Any, leaves: Sequence[str]) -> str:
    """A pytree of texts with the structure of an argument, which may have classes of the user's."""
    try:
        return tree(structure, leaves)
    except NotWritable:
        return f"jax.tree.unflatten(jax.tree.structure({argument}), [{', '.join(leaves)}])"


def _applied(function: str, argument: str, shown: str) -> str:
    """``jnp.squeeze`` or ``lambda a, k: jnp.moveaxis(a, k, 0)`` of two texts."""
    _, is_lambda, expression = function.partition(": ")
    if not is_lambda:
        return f"{function}({argument}, {shown})"
    return expression.replace("(a,", f"({argument},").replace(" k", f" {shown}")


def _title(plan: CallPlan, entry: str) -> str:
    return f"{plan.function} as a program for plain JAX: call {entry}."


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


def _is_leaf(structure) -> bool:
    return jax.tree_util.treedef_is_leaf(structure) and structure.num_leaves == 1


def _summary(plan: CallPlan) -> str:
    takes = ", ".join(f"{a.path}: {a.type}" for a in plan.arguments)
    gives = ", ".join(a.type for a in plan.results)
    text = f"{takes} -> {gives}."
    if len(text) <= 76:
        return text
    count = lambda n: f"{n} array{'s' if n != 1 else ''}"  # noqa: E731
    return f"{count(len(plan.arguments))} -> {count(len(plan.results))}."
