"""The maps of the user's function over devices, loops and vectorized axes, as text: in a module, or in place."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xmap_compat.core.call import partition_spec as spec_of
from xmap_compat.core.specs import AxisSpec
from xmap_compat.tools.source.module import Module
from xmap_compat.tools.source.nested import position_in
from xmap_compat.tools.source.rewrite import Rewriting
from xmap_compat.tools.source.text import WIDTH, Names, NotWritable, identifier, literal, partition_spec, prefix

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan

MAPPING = ("one_element", "in_loop", "values_only")  # the helpers that map


def entry_name(plan: CallPlan) -> str:
    """The name of the function that the source defines for the xmapped one."""
    return f"mapped_{identifier(plan.function)}" if plan.function != "<lambda>" else "mapped_function"


def mesh_lines(mesh: jax.sharding.Mesh, name: str) -> list[str]:
    """The construction of a mesh over the same devices."""
    order = {d.id: k for k, d in enumerate(jax.devices())}
    positions = [order.get(d.id, d.id) for d in mesh.devices.flat]
    devices = f"jax.devices()[:{len(positions)}]" if len(positions) < len(order) else "jax.devices()"
    if positions != list(range(len(positions))):
        devices = f"[jax.devices()[k] for k in {tuple(positions)}]"
    shape = f".reshape{mesh.devices.shape}" if mesh.devices.ndim > 1 else ""
    return [f"{name} = Mesh(np.array({devices}){shape}, {literal(tuple(mesh.axis_names))})"]


def value_lines(values: dict[str, Any]) -> list[str]:
    """Declarations of arrays that are too large for the source: the user of the module assigns them."""
    shown = ((name, np.shape(v), np.asarray(v).dtype) for name, v in values.items())
    return [f"{name}: jax.Array  # assign this one: {dtype}{list(shape)}" for name, shape, dtype in shown]


@dataclasses.dataclass
class Maps:
    """The maps of a call.

    Attributes:
      module: what names axes and helpers.
      given, gives: the pytrees of the arguments and of the results, with a text in the place of each spec.
    """

    module: Rewriting
    given: Callable[[Callable[[AxisSpec], str]], str]
    gives: Callable[[Callable[[AxisSpec], str]], str]

    def __post_init__(self):
        self.plan = self.module.plan
        # How many elements a device computes at a time, of axes that it does not compute all at once.
        loops = {a.name: a.local_size for a in self.plan.axes if a.loops}
        self.batches = loops | dict.fromkeys(self.module.one_by_one, 1)

    def innermost_first(self) -> Iterator[tuple[str, list[str]]]:
        """Each map: the function that maps another, and its options."""
        maps = self._maps()
        order = [axis.name for axes in maps for axis in axes]
        for axes in reversed(maps):
            yield self._over(axes, order[: order.index(axes[0].name)])
        if self.plan.mesh is not None:
            placements = self.plan.staged.placed.placements
            options = self._both("in_specs", "out_specs", lambda s: partition_spec(spec_of(s, placements)))
            own = [literal(a) for a in self.plan.mesh.axis_names if a not in self.plan.compiler_axes]
            options += [f"axis_names={{{', '.join(own)}}}"] * bool(own and self.plan.compiler_axes)
            yield "jax.shard_map", [*options, *["check_vma=False"] * (not self.module.typed)]

    def _maps(self) -> list[list[Any]]:
        """The axes of each map, outermost first.  Those that fill the mesh share a map, unless an array has two."""
        local, declared = self.module.names.local, self.plan.staged.declared
        held = [spec.position_of().keys() for spec in jax.tree.leaves((declared.in_specs, declared.out_specs))]
        groups: list[list[Any]] = []
        for axis in (a for a in self.plan.axes if not local[a.name]):
            apart = lambda group, axis=axis: all(len({a.name for a in [*group, axis]} & names) < 2 for names in held)  # noqa: E731
            if (group := next(filter(apart, groups), None)) is None:
                groups.append(group := [])
            group.append(axis)
        mapped = (a for a in self.plan.axes if local[a.name])
        return groups + [[a] for a in sorted(mapped, key=lambda a: a.name not in self.batches)]

    def _over(self, axes: Sequence[Any], outer: Sequence[Any]) -> tuple[str, list[str]]:
        """A map over a device's elements of an axis, perhaps in batches, or over axes of which it has one element."""
        at = lambda spec: next((p for a in axes if (p := position_in(spec, a.name, outer)) is not None), None)  # noqa: E731
        options = [place for place in self._both("in_axes", "out_axes", lambda s: literal(at(s))) if place[-2:] != "=0"]
        axis, local = axes[0], self.module.names.local[axes[0].name]
        if not local:
            return self.module.helper("one_element"), options
        batch = self.batches.get(axis.name)
        if batch is None:
            options.append(f"axis_name={literal(local)}")
        elif batch > 1:
            options.append(f"turns={axis.device_size // batch}")
        if all(axis.name not in a.axes for a in self.plan.arguments):
            options.append(f"axis_size={axis.device_size}")
        return "jax.vmap" if batch is None else self.module.helper("in_loop"), options

    def _both(self, given: str, gives: str, text: Callable[[AxisSpec], str]) -> list[str]:
        return [f"{given}={self.given(text)}", f"{gives}={self.gives(text)}"]


@dataclasses.dataclass
class Wrapper:
    """The function of a generated module that maps the user's function.

    Attributes:
      unchecked: why JAX cannot check which values vary over the mesh; None if it can.
    """

    module: Module
    fresh: Names
    unchecked: str | None

    def __post_init__(self):
        self.plan = self.module.plan
        self.takes_mesh = isinstance(self.plan.mesh, jax.sharding.AbstractMesh)
        self.entry = self.fresh.like(entry_name(self.plan))
        self.mesh, self.mapped = self.fresh.like("mesh"), self.fresh.like("mapped")
        self.arguments, rest = [], iter(self.plan.arguments)
        for k, structure in enumerate(self.plan.staged.in_tree.children()):
            arrays = list(itertools.islice(rest, structure.num_leaves))
            path = arrays[0].path if arrays else f"arg{k}"
            root = path if structure.node_data() is None else re.split(r"[\[.]", path)[0]
            self.arguments.append(self.fresh.like(identifier(root)))
        self.called = f"({', '.join(self.arguments)})"

    def lines(self) -> list[str]:
        takes = ", ".join(f"{a.path}: {a.type}" for a in self.plan.arguments)
        about = f"{takes} -> {', '.join(r.type for r in self.plan.results)}."
        if len(about) > 76:
            about = f"Arrays: {len(self.plan.arguments)} -> {len(self.plan.results)}."
        decorator, called = "@jax.jit", self.called
        if self.takes_mesh:
            decorator = f"@jax.jit(static_argnames={literal(self.mesh)})"
            called = f"{self.called[:-1]}{', ' * bool(self.arguments)}*, {self.mesh})"
        body = (f'"""{about}"""', *self._body())
        return [decorator, f"def {self.entry}{called}:", *(f"    {line}" for line in body)]

    def _body(self) -> Iterator[str]:
        """A statement for each map, the innermost one first."""
        named = lambda cls: self.module.expression(cls, cls.__name__)  # noqa: E731
        gives = lambda text: prefix(self.plan.staged.declared.out_specs, text, named)  # noqa: E731
        function = self.module.name
        for name, options in Maps(self.module, self._given, gives).innermost_first():
            if name == "jax.shard_map":
                options = [f"mesh={self.mesh}", *options]
                why = f"Unchecked: {self.unchecked}." if self.unchecked is not None else ""
                yield from (f"# {line}" for line in textwrap.wrap(why, WIDTH - 6))
            yield f"{self.mapped} = {name}({', '.join([function, *options])})"
            function = self.mapped
        if self.module.only_values:
            function = f"{self.module.helper('values_only')}({function})"
        yield f"return {function}{self.called}"

    def _given(self, text: Callable[[AxisSpec], str]) -> str:
        """The arguments, with a text in the place of each spec."""
        try:
            return prefix(self.plan.staged.declared.in_specs, text)
        except NotWritable:  # the user's own classes
            leaves = ", ".join(map(text, self.plan.staged.placed.in_specs))
            return f"jax.tree.unflatten(jax.tree.structure(({', '.join(self.arguments)},)), [{leaves}])"
