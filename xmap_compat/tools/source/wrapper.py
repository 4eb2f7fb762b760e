"""The functions of a written module that map the user's: over devices, over loops, over what is vectorized."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xmap_compat.tools.source.module import Module
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
from xmap_compat.tools.source.user_code import AxisNames

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


def entry_name(plan: CallPlan) -> str:
    """The name of the function that the source defines for the xmapped one."""
    return f"mapped_{identifier(plan.function)}" if plan.function != "<lambda>" else "mapped_function"


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


class Wrapper:
    """The functions that map the body: over the devices, over loops, over what is vectorized."""

    def __init__(
        self,
        plan: CallPlan,
        names: AxisNames,
        module: Module,
        fresh: Names,
        unchecked: str | None,
        one_by_one: Iterable[Any],
        only_values: bool,
    ):
        self.plan, self.names, self.module, self.body, self.unchecked = plan, names, module, module.name, unchecked
        self.named = lambda cls: module.expression(cls, cls.__name__)
        self.entry = fresh.like(entry_name(plan))
        self.decorators = [*([f"@{module.helper('values_only')}"] if only_values else []), "@jax.jit"]
        self.mesh, self.per_device, self.mapped_name, self.result = (
            fresh.like(name) for name in ("mesh", "per_device", "mapped", "result")
        )
        self.in_tree = plan.staged.in_tree.children()
        self.out_tree = plan.staged.plan.program.out_tree
        self.parameters = [fresh.like(identifier(root)) for root in _root_names(plan, self.in_tree)]
        self.looped = {a.name: a.local_size for a in plan.axes if a.loops} | dict.fromkeys(one_by_one, 1)
        mapped = [a for a in plan.axes if names.local[a.name]]
        self.mapped = sorted(mapped, key=lambda a: a.name not in self.looped)

    def lines(self) -> list[str]:
        out = Lines()
        called = ", ".join(self.parameters)
        if self.plan.mesh is None:
            out.raw(self.decorators)
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
        out.raw(self.decorators)

        def write():
            out.add(f'"""{_summary(self.plan)}"""')
            if self.unchecked is not None:
                out.raw([f"    # {line}" for line in textwrap.wrap(f"Unchecked: {self.unchecked}.", WIDTH - 6)])
            given = f"mesh={self.mesh}, in_specs={in_specs}, out_specs={results}{_axis_names_of(self.plan)}{unchecked}"
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
        function = self._mapped_body(out)
        called = ", ".join(self.parameters)
        expanded = [self._full_dims(r) for r in self.plan.results]
        if not any(expanded):
            out.add(f"return {function}({called})")
            return
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

    def _mapped_body(self, out) -> str:
        """The body mapped over each axis, the first one outermost; the name of the function that this gives."""
        function = self.body
        for k, axis in reversed(list(enumerate(self.mapped))):
            outer = [a.name for a in self.mapped[:k]]
            where = lambda a, axis=axis, outer=outer: literal(self._position(a, axis, outer))  # noqa: E731
            in_axes = self._by_argument(where)
            results = [where(r) for r in self.plan.results]
            out_axes = prefix(self.out_tree, results, self.named) if results else "None"
            options = []
            if set(in_axes) != {"0"}:
                options.append(f"in_axes=({', '.join(in_axes)}{',' if len(in_axes) == 1 else ''})")
            if out_axes != "0":
                options.append(f"out_axes={out_axes}")
            if axis.name in self.looped:
                maps, batch = self.module.helper("in_loop"), self.looped[axis.name]
                options += [f"turns={axis.device_size // batch}"] if batch > 1 else []
            else:
                maps = "jax.vmap"
                options.append(f"axis_name={literal(self.names.local[axis.name])}")
            if all(axis.name not in a.axes for a in self.plan.arguments):
                options.append(f"axis_size={axis.device_size}")
            out.add(f"{self.mapped_name} = {maps}({', '.join([function, *options])})")
            function = self.mapped_name
        return function


def _at_leaves(function: str, argument: str, structure: Any, dims: Sequence[tuple[int, ...]]) -> str:
    """A function of an array and dimensions applied to an array or at the leaves of a pytree."""
    shown = [literal(d[0] if len(d) == 1 else d) for d in dims]
    if _is_leaf(structure):
        return f"{function}({argument}, {shown[0]})"
    if len(set(shown)) == 1:
        return f"jax.tree.map(lambda a: {function}(a, {shown[0]}), {argument})"
    return f"jax.tree.map({function}, {argument}, {_tree_like(argument, structure, shown)})"


def _tree_like(argument: str, structure: Any, leaves: Sequence[str]) -> str:
    """A pytree of texts with the structure of an argument, which may have classes of the user's."""
    try:
        return tree(structure, leaves)
    except NotWritable:
        return f"jax.tree.unflatten(jax.tree.structure({argument}), [{', '.join(leaves)}])"


def title(plan: CallPlan, entry: str) -> str:
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


def _axis_names_of(plan: CallPlan) -> str:
    """What tells ``shard_map`` which axes are left to the compiler."""
    if plan.mesh is None or not plan.compiler_axes:
        return ""
    return f", axis_names={{{', '.join(literal(a) for a in plan.mesh.axis_names if a not in plan.compiler_axes)}}}"
