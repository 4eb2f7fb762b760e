"""The functions of a generated module that map the user's function over devices, loops and vectorized axes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from xmap_compat.tools.source.module import Module
from xmap_compat.tools.source.text import WIDTH, Names, NotWritable, axes, identifier, literal, partition_spec, prefix
from xmap_compat.tools.source.user_code import AxisNames

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


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


def batches_of(plan: CallPlan, one_by_one: Iterable[Any]) -> dict[Any, int]:
    """How many elements a device computes at a time, of axes that it does not compute all at once."""
    return {a.name: a.local_size for a in plan.axes if a.loops} | dict.fromkeys(one_by_one, 1)


def mapped_over(
    axis: Any, function: str, places: Iterable[str], module: Module, plan: CallPlan, batch: int | None
) -> str:
    """A function that maps another over a device's elements of an axis, in batches if these have a size."""
    options = [place for place in places if not place.endswith("=0")]
    if batch is None:
        options.append(f"axis_name={literal(module.names.local[axis.name])}")
    elif batch > 1:
        options.append(f"turns={axis.device_size // batch}")
    if all(axis.name not in a.axes for a in plan.arguments):
        options.append(f"axis_size={axis.device_size}")
    maps = "jax.vmap" if batch is None else module.helper("in_loop")
    return f"{maps}({', '.join([function, *options])})"


def own_axes(plan: CallPlan) -> list[str]:
    """The option of ``jax.shard_map`` that leaves axes to the compiler, if there are any."""
    own = [literal(a) for a in plan.mesh.axis_names if a not in plan.compiler_axes] if plan.mesh is not None else []
    return [f"axis_names={{{', '.join(own)}}}"] * bool(own and plan.compiler_axes)


class _Group(NamedTuple):
    """An argument or the result: the name of its variable, its pytree, and the arrays in the pytree."""

    name: str
    structure: Any
    arrays: Sequence[Any]

    def like(self, leaves: Iterable[str], whole: bool = False) -> str:
        """A pytree of texts with this structure, or a prefix of it unless ``whole`` is true."""
        leaves = list(leaves)
        try:
            return prefix(self.structure, leaves, whole=whole)
        except NotWritable:  # the user's own classes
            return f"jax.tree.unflatten(jax.tree.structure({self.name}), [{', '.join(leaves)}])"


@dataclasses.dataclass
class Wrapper:
    """The functions that map the body.

    Attributes:
      unchecked: why JAX cannot check which values vary over the mesh; None if it can.
      one_by_one: axes whose elements are computed one at a time.
      only_values: whether the function must not be differentiated.
    """

    plan: CallPlan
    names: AxisNames
    module: Module
    fresh: Names
    unchecked: str | None
    one_by_one: Iterable[Any]
    only_values: bool

    def __post_init__(self):
        self.takes_mesh = isinstance(self.plan.mesh, jax.sharding.AbstractMesh)
        self.entry = self.fresh.like(entry_name(self.plan))
        self.mesh, self.per_device, self.mapped, result = (
            self.fresh.like(name) for name in ("mesh", "per_device", "mapped", "result")
        )
        self.result = _Group(result, self.plan.staged.placed.program.out_tree, self.plan.results)
        self.arguments, rest = [], iter(self.plan.arguments)
        for k, structure in enumerate(self.plan.staged.in_tree.children()):
            arrays = list(itertools.islice(rest, structure.num_leaves))
            path = arrays[0].path if arrays else f"arg{k}"
            root = path if structure.node_data() is None else re.split(r"[\[.]", path)[0]
            self.arguments.append(_Group(self.fresh.like(identifier(root)), structure, arrays))
        self.called = f"({', '.join(group.name for group in self.arguments)})"
        given = self.called if len(self.arguments) > 1 else self.called.replace(")", ",)")
        self.given = _Group(given, self.plan.staged.in_tree, self.plan.arguments)
        self.batches = batches_of(self.plan, self.one_by_one)

    def lines(self) -> list[str]:
        takes = ", ".join(f"{a.path}: {a.type}" for a in self.plan.arguments)
        about = f"{takes} -> {', '.join(r.type for r in self.plan.results)}."
        if len(about) > 76:
            about = f"Arrays: {len(self.plan.arguments)} -> {len(self.plan.results)}."
        decorators = [*([f"@{self.module.helper('values_only')}"] if self.only_values else []), "@jax.jit"]
        called = self.called
        if self.takes_mesh:
            decorators = [f"@jax.jit(static_argnames={literal(self.mesh)})"]
            called = f"{self.called[:-1]}{', ' * bool(self.arguments)}*, {self.mesh})"
        entry = lambda body: [*decorators, *self._function(self.entry, about, body, called)]  # noqa: E731
        if self.plan.mesh is None:
            return entry(self._on_device())
        what = "What each device computes from its parts of the arguments."
        on_device = self._function(self.per_device, what, self._on_device(), self.called)
        return [*on_device, "", "", *entry(self._over_devices())]

    def _function(self, name: str, about: str, body: Iterable[str], called: str) -> list[str]:
        return [f"def {name}{called}:", *(f"    {line}" for line in (f'"""{about}"""', *body))]

    def _places(self, texts: Sequence[str], given: str, gives: str) -> list[str]:
        """Options of a map, with a text for each array of the arguments and the results."""
        count = len(self.plan.arguments)
        named = lambda cls: self.module.expression(cls, cls.__name__)  # noqa: E731
        results = prefix(self.result.structure, texts[count:], named)
        return [f"{given}={self.given.like(texts[:count])}", f"{gives}={results}"]

    def _over_devices(self) -> Iterator[str]:
        """The body of the function that maps over the mesh."""
        specs = [partition_spec(array.spec or ()) for array in (*self.plan.arguments, *self.plan.results)]
        options = [f"mesh={self.mesh}", *self._places(specs, "in_specs", "out_specs"), *own_axes(self.plan)]
        if self.unchecked is not None:
            options.append("check_vma=False")
            yield from (f"# {line}" for line in textwrap.wrap(f"Unchecked: {self.unchecked}.", WIDTH - 6))
        mapped = f"jax.shard_map({', '.join([self.per_device, *options])})"
        if self.takes_mesh and self.only_values:
            mapped = f"{self.module.helper('values_only')}({mapped})"
        yield f"{self.mapped} = {mapped}"
        yield f"return {self.mapped}{self.called}"

    def _on_device(self) -> Iterator[str]:
        """The body of the function that maps the user's function over the elements of one device."""
        for group in self.arguments:
            if squeezed := self._at_full_axes("jnp.squeeze", group):
                yield f"{group.name} = {squeezed}"
        maps = list(self._maps())
        yield from reversed(maps)
        returned = f"{self.mapped if maps else self.module.name}{self.called}"
        if expanded := self._at_full_axes("jnp.expand_dims", self.result):
            yield f"{self.result.name} = {returned}"
        yield f"return {expanded or returned}"

    def _at_full_axes(self, function: str, group: _Group) -> str | None:
        """Call a function over the dimensions of axes that fill their mesh axes: a device has one element of each."""
        full = [[k for k, n in enumerate(a.axes) if n is not None and not self.names.local[n]] for a in group.arrays]
        shown = list(map(axes, full))
        if not any(full):
            return None
        if group.structure.node_data() is None:
            return f"{function}({group.name}, {shown[0]})"
        if len(set(shown)) == 1:
            return f"jax.tree.map(lambda a: {function}(a, {shown[0]}), {group.name})"
        return f"jax.tree.map({function}, {group.name}, {group.like(shown, whole=True)})"

    def _maps(self) -> Iterator[str]:
        """A statement for each axis, the outermost one first."""
        local = self.names.local
        axes_left = [[n for n in a.axes if n is None or local[n]] for a in (*self.plan.arguments, *self.plan.results)]
        mapped = sorted((a for a in self.plan.axes if local[a.name]), key=lambda a: a.name not in self.batches)
        for axis in mapped:
            places = [literal(left.index(axis.name) if axis.name in left else None) for left in axes_left]
            axes_left = [[n for n in left if n != axis.name] for left in axes_left]
            function = self.module.name if axis is mapped[-1] else self.mapped
            given, batch = self._places(places, "in_axes", "out_axes"), self.batches.get(axis.name)
            yield f"{self.mapped} = {mapped_over(axis, function, given, self.module, self.plan, batch)}"
