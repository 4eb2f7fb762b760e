"""Stage 1: the parsed arguments of ``xmap``, and the arguments of a call, bound to their specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core.errors import LEGACY, quoted, reference
from xmap_compat.core.fit import broadcast_specs, check_argument, check_containers, infer_sizes
from xmap_compat.core.placement import Resources
from xmap_compat.core.specs import AxisName, AxisSpec, argument_path, spec_names


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The arguments that the user gave to xmap, parsed.

    Attributes:
      fun, name: the user's function, and what messages call it.
      in_specs, out_specs: ``in_axes`` and ``out_axes`` with an ``AxisSpec`` for each specification.
      in_source, out_source: the same as the user wrote them, for messages.
      sizes: ``axis_sizes``.
      resources: the resources of each axis in ``axis_resources``.
      names: every axis, in order of appearance.
      backend: the platform that the user asked for.
      undeclared: whether results may vary over axes on the mesh that their specs leave out.
    """

    fun: Callable[..., Any]
    name: str
    in_specs: Any
    out_specs: Any
    in_source: Any
    out_source: Any
    sizes: dict[AxisName, int]
    resources: Resources
    names: tuple[AxisName, ...]
    backend: str | None
    undeclared: bool = False

    def key(self) -> Hashable:
        """A key that is equal for equivalent declarations of one function."""
        in_leaves, in_tree = jax.tree.flatten(self.in_specs)
        out_leaves, out_tree = jax.tree.flatten(self.out_specs)
        return (
            (tuple(in_leaves), in_tree),
            (tuple(out_leaves), out_tree),
            repr((self.in_source, self.out_source)),  # messages show specs as they were written
            tuple(self.sizes.items()),
            tuple(self.resources.items()),
            self.backend,
            self.undeclared,
        )


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flattened once.

    Attributes:
      leaves, paths, specs: each array or scalar, its path (``args[0]['w']``), and its spec.
      tree: the pytree structure of the leaves.
      sizes: the axis sizes that follow from the arguments and ``axis_sizes``.
    """

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    specs: tuple[AxisSpec, ...]
    tree: Any
    sizes: dict[AxisName, int]

    @property
    def names(self) -> list[frozenset[AxisName]]:
        """The named axes of each leaf."""
        return [frozenset(spec.position_of()) for spec in self.specs]

    @property
    def origins(self) -> dict[AxisName, str]:
        """For each axis the first argument that has it."""
        origins: dict[AxisName, str] = {}
        for names, path in zip(self.names, self.paths):
            for name in names:
                origins.setdefault(name, path)
        return origins

    def types(self) -> Any:
        """The arguments as types with their named dimensions removed."""
        types = list(map(_positional_type, self.leaves, self.specs))
        return jax.tree.unflatten(self.tree, types)


def _positional_type(leaf, spec):
    aval = jax.typeof(leaf)
    shape = list(aval.shape)
    for position, _ in reversed(spec.names):
        del shape[position]
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


def bind_arguments(declared: Declaration, args: tuple[Any, ...]) -> Arguments:
    """Stage 1 of a call: give each argument its spec and infer the axis sizes; raise where they do
    not fit.
    """
    needed = [name for name in spec_names(declared.in_specs) if name not in declared.sizes]
    if needed and not args:
        raise _size_not_inferred(needed, called_without=declared.name)
    specs = broadcast_specs("in_axes", declared.in_specs, args, declared.in_source)
    check_containers("in_axes", specs, args, "args")
    by_path, tree = jax.tree_util.tree_flatten_with_path(args)
    paths = []
    leaves = []
    shapes = []
    for spec, (path_of_leaf, leaf) in zip(specs, by_path):
        path = argument_path(path_of_leaf, "args")
        if _jax.is_reference(leaf):
            raise reference(path)
        shape = jnp.shape(leaf)
        check_argument(spec, shape, path, is_scalar=not shape and jax.typeof(leaf).weak_type)
        paths.append(path)
        leaves.append(leaf)
        shapes.append(shape)
    sizes = infer_sizes(specs, shapes, paths, declared.sizes)
    unknown = [name for name in declared.names if name not in sizes]
    if unknown:
        raise _size_not_inferred(unknown)
    return Arguments(tuple(leaves), tuple(paths), tuple(specs), tree, sizes)


def _size_not_inferred(names: Iterable[Hashable], called_without: str = "") -> ValueError:
    ours = (
        f"There are no arguments. Call {called_without} with its arguments; its plan also takes "
        "jax.ShapeDtypeStruct(shape, dtype)"
    )
    if not called_without:
        ours = (
            f"No array has the axes {quoted(names)}, as containers in the place of arguments are "
            "empty. Give their sizes in axis_sizes"
        )
    legacy = (
        f"Failed to infer size of axes: {', '.join(map(str, names))}. You've probably passed in "
        "empty containers in place of arguments that had those axes in their in_axes. Provide the "
        "sizes of missing axes explicitly via axis_sizes to fix this error."
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")
