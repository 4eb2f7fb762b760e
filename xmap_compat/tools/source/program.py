"""``plan.source()``: the program of a plan for plain JAX, as Python source.

The program keeps the user's functions under nested ``jax.vmap`` and ``jax.shard_map``, with their collectives
rewritten.  It is traced and compared with the plan's program first.  If it cannot be generated, or computes
something else, you get the reason instead of the source.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat.core.collectives import collectives_in
from xmap_compat.core.mesh import entered
from xmap_compat.core.placement import current_scope
from xmap_compat.tools import errors
from xmap_compat.tools.configuration import configured, flags, statements, taken_from
from xmap_compat.tools.source import beside, hazards, proof
from xmap_compat.tools.source.hazards import RuleOver, rules_over
from xmap_compat.tools.source.helper_texts import HELPERS, helper_lines, names_of, with_needs
from xmap_compat.tools.source.imports import IMPORTED, imports_for
from xmap_compat.tools.source.module import Module
from xmap_compat.tools.source.table import STAND_INS, nested_xmaps
from xmap_compat.tools.source.text import EDITED, Names, NotWritable, identifier, literal, module_text, noted
from xmap_compat.tools.source.user_code import AxisNames
from xmap_compat.tools.source.wrapper import MAPPING, Wrapper, entry_name, mesh_lines, value_lines

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


class Written(NamedTuple):
    """A generated module.

    Attributes:
      text: its source.
      entry: the function that it defines.
      values: by name, the arrays that are too large for the source, and that you assign.
      derivative: whether both it and the original can be differentiated.
    """

    text: str
    entry: str
    values: dict[str, Any]
    derivative: bool


def written(plan: CallPlan) -> Written:
    """The module, traced and compared with the plan.

    Raises:
      NotImplementedError: a part cannot be generated, or may be another program; the message names it.
    """
    return kept(plan, "written", lambda: _written(plan))


def kept(plan: CallPlan, what: str, make: Callable[[], Any]) -> Any:
    """What is made once for a plan, under the options of JAX that its call was made under."""
    if what not in plan.staged.kept:
        with configured(plan.staged.configuration):
            try:
                plan.staged.kept[what] = make()
            except NotWritable as reason:
                raise errors.no_source(plan.function, [str(reason)]) from reason.__cause__
            except Exception as error:
                raise errors.no_source(plan.function, [errors.unreadable(error)]) from error
    return plan.staged.kept[what]


def _written(plan: CallPlan) -> Written:
    if plan.staged.placed.nested:
        raise NotWritable("a call of xmap in the body of another: ask for the source of the outer call")
    if any(plan.staged.placed.undeclared):
        raise NotWritable("a result varies over an axis that its out_axes do not name")
    names, rules = axis_names(plan), rules_over(plan)
    unchecked = why_unchecked(plan, names, rules)
    if unchecked is None:
        try:
            return _proved(plan, names, rules, None)
        except NotWritable as reason:
            unchecked = f"with types JAX gives {str(reason).partition('fails: ')[2] or reason}"
    return _proved(plan, names, rules, unchecked)


def axis_names(plan: CallPlan) -> AxisNames:
    """The name of each axis in plain JAX.  Where it is split in part, no part has the user's own name.

    A collective that is not rewritten then raises a NameError.
    """
    inner: dict[Any, tuple[tuple[str, ...], int]] = {}
    for axis in (a for call in plan.nested for a in call.axes):
        own = (axis.mesh_axes, math.prod(axis.loop_sizes))
        if inner.setdefault(axis.name, own) != own:
            raise NotWritable(f"the axis {axis.name} of nested calls of xmap, which place it differently: rename one")
    inner = {name: own for name, own in inner.items() if own != ((), 1)}
    if inner and hazards.differentiates(plan.staged.placed.program.jaxpr):
        raise NotWritable("a nested call of xmap with resources, and a gradient that is taken inside")
    order = tuple(plan.mesh.axis_names) if plan.mesh is not None else ()
    taken = Names(map(str, (*order, *inner, *(axis.name for axis in plan.axes))))
    local: dict[Any, str | None] = {}
    for axis in plan.axes:
        stays = isinstance(axis.name, str) and not axis.mesh_axes and axis.name not in order
        fills = bool(axis.mesh_axes) and axis.device_size == 1
        wanted = str(axis.name) if stays else taken.like(f"{identifier(str(axis.name))}_local")
        local[axis.name] = None if fills else wanted
    return AxisNames({a.name: a.mesh_axes for a in plan.axes}, local, order, {a.name: a.size for a in plan.axes}, inner)


def why_unchecked(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver]) -> str | None:
    """Why JAX cannot check which values vary over the mesh, if that is known before trying; else None."""
    if any(mesh_axes for mesh_axes, _ in names.inner.values()):
        return "what an xmap inside gathers is the same on devices, of which types know nothing"
    over = collectives_in(plan.staged.placed.program.jaxpr).union(*(rule.names for rule in rules))
    vmapped = [n for n in names.mesh if names.local[n] and n in over]
    if plan.mesh is not None and vmapped:
        return f"types know no collectives over axes of jax.vmap, as {literal(names.local[vmapped[0]])}"
    if plan.mesh is not None and hazards.differentiates(plan.staged.placed.program.jaxpr):
        return "a gradient that is taken inside is each element's own, of which types know nothing"
    return None


def _proved(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], unchecked: str | None) -> Written:
    """The user's functions under nested vmaps, within a shard_map if there is a mesh: generated, then proved.

    Args:
      unchecked: why JAX cannot check which values vary over the mesh; None if it can.
    """
    typed = plan.mesh is not None and unchecked is None
    reserved = {*STAND_INS, *(("P", "Mesh") if plan.mesh is not None else ()), *with_needs(MAPPING)}
    module = Module(plan, names, rules, typed)
    module.write(reserved | names_of(HELPERS))
    needed = with_needs(module.helpers)
    if module.gave_way:
        module.write(reserved | names_of(needed))
    wrapper = Wrapper(module, Names(module.taken), unchecked)
    text = _text(plan, module, wrapper)
    entry = executed(plan, text, module.values)[wrapper.entry]
    with entered(plan.mesh if wrapper.takes_mesh else None):  # no types are in effect then
        given = {wrapper.mesh: current_scope().mesh} if wrapper.takes_mesh else {}
        note, derivative = _check(plan, functools.partial(entry, **given), typed)
    # The plan evaluates a nested xmap not as a nest of vmaps, so the proof compares it as an xmap.
    if (of_xmaps := module).nested:
        of_xmaps = copy.copy(module)
        of_xmaps.names, of_xmaps.proving = names, True
        of_xmaps.write(reserved | names_of(needed))
    to_prove = "\n".join([*of_xmaps.imports, *_definitions(of_xmaps)]) if module.nested else text
    stand_ins = {**IMPORTED, **module.values, **STAND_INS, **nested_xmaps(of_xmaps.nested)}
    try:
        function = eval(module.name, executed(plan, to_prove, stand_ins))
        difference = proof.difference_from(plan, proof.graph_of(plan, names), function)
    except Exception as error:
        raise NotWritable(
            f"the generated program cannot be compared with the plan: {beside.in_words(error)}"
        ) from error
    if difference is not None:
        raise NotWritable(f"the generated program computes something else: {difference}")
    return Written(noted(text, note) if note else text, wrapper.entry, module.values, derivative)


def _text(plan: CallPlan, module: Module, wrapper: Wrapper) -> str:
    """The module: docstring, the imports of the lines and of the definitions, the mesh, and the lines."""
    mapped = wrapper.lines()
    lines = [*_definitions(module), "", "", *mapped]
    imports = {"import jax", *module.imports, *imports_for(lines)}
    if plan.mesh is not None:
        imports.add("from jax.sharding import PartitionSpec as P")
    if isinstance(plan.mesh, jax.sharding.Mesh):
        imports |= {"import numpy as np", "from jax.sharding import Mesh"}
        lines = [*mesh_lines(plan.mesh, wrapper.mesh), *lines]
    lines = [*statements(plan.staged.configuration), *lines]
    about = [f"{plan.function} as a program for plain JAX: call {wrapper.entry}."]
    about += ["", EDITED, ""] if module.edits else []
    for file, line, old, new in sorted(module.edits):
        where = f"  {os.path.basename(file)}:{line}  "
        about += [where + old, "-> ".rjust(len(where)) + new]
    about += ["", f"Written under {'; '.join(flags())}: set the same before JAX starts."] if flags() else []
    return module_text(about, imports, lines)


def _definitions(module: Module) -> list[str]:
    """The lines of a module that precede the function for the xmapped one."""
    lines = [*value_lines(module.values), *helper_lines(module.helpers, module.names.all)]
    for definition in module.definitions.values():
        lines.extend([*([] if len(definition) == 1 else ["", ""]), *definition])
    return lines


def executed(plan: CallPlan, text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a module; returns the names that it defines, without the given ones."""
    module = types.ModuleType(f"_source_of_{entry_name(plan)}")
    vars(module).update(given)
    tree = ast.parse(text)
    taken_from(tree)  # the options are in effect
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in given]
    sys.modules[module.__name__] = module  # definitions of classes look for it there
    try:
        exec(compile(tree, f"<source of {plan.function}>", "exec"), vars(module))
    finally:
        sys.modules.pop(module.__name__, None)
    return vars(module)


# ------------------------------------------------------------------------------ checking


def _check(plan: CallPlan, function: Callable[..., Any], typed: bool) -> tuple[str, bool]:
    """Raise unless a function gives results of a plan's types and, if typed, can be differentiated.

    Returns:
      A note about the derivative if xmap has one and the function has not; whether both have one.
    """
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in plan.arguments]
    args = jax.tree.unflatten(plan.staged.in_tree, leaves)
    try:
        found = jax.tree.leaves(jax.eval_shape(function, *args))
    except Exception as error:
        raise NotWritable(f"the generated program fails: {beside.in_words(error)}") from error
    if [(x.shape, x.dtype) for x in found] != [(r.shape, r.dtype) for r in plan.results]:
        raise NotWritable("the generated program gives results of other types")
    derivative = _derivative(function, args)
    if not isinstance(derivative, Exception):
        hazards.check_branches(derivative)
    if isinstance(_derivative(jaxpr_as_fun(plan.staged.jaxpr), leaves), Exception):
        return "", False
    if not isinstance(derivative, Exception):
        return "", True
    if typed:
        raise NotWritable(f"its derivative fails: {beside.in_words(derivative)}") from derivative
    return f"JAX cannot differentiate this, and xmap can: {beside.in_words(derivative).rstrip('.')}.", False


def _derivative(function: Callable[..., Any], args: Any) -> Any:
    """The gradient of the sum of a function's results, traced, or the error that tracing it raises."""

    def total(args):
        smooth = [x for x in jax.tree.leaves(function(*args)) if jnp.issubdtype(x.dtype, np.inexact)]
        return sum((jnp.sum(x.real.astype(np.float32)) for x in smooth), 0.0)

    try:
        return jax.make_jaxpr(jax.grad(total, allow_int=True))(args)
    except Exception as error:
        return error
