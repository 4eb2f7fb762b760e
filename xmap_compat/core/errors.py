"""One function per message.  Legacy's wording is kept where legacy had the message.

Every function returns an exception for the caller to raise, so that the
traceback ends where the mistake was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.errors import JAXTypeError


def _names(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _set(names: Iterable[Any]) -> str:
    return "{" + ", ".join(sorted(repr(name) for name in names)) + "}"


def show(spec: Any) -> str:
    """A specification as the user wrote it: ``['i', ...]``, not ``['i', Ellipsis]``."""
    if spec is ...:
        return "..."
    if type(spec) in (list, tuple):
        inside = ", ".join(map(show, spec)) + ("," if type(spec) is tuple and len(spec) == 1 else "")
        return f"[{inside}]" if type(spec) is list else f"({inside})"
    if type(spec) is dict:
        return "{" + ", ".join(f"{key!r}: {show(value)}" for key, value in spec.items()) + "}"
    fields = getattr(type(spec), "__match_args__", ())
    if fields and (isinstance(spec, tuple) or dataclasses.is_dataclass(spec)):
        return f"{type(spec).__name__}({', '.join(f'{k}={show(getattr(spec, k))}' for k in fields)})"
    return repr(spec)


def _ranked(shape: Sequence[int]) -> str:
    return f"rank {len(shape)} (and shape {tuple(shape)})"


# ------------------------------------------------------------- axis specifications


def not_callable(fun: Any) -> TypeError:
    return TypeError(f"xmap expects a callable as its first argument, but got {fun!r} of type {type(fun).__name__}")


def _below(where: str, path: str) -> str:
    """Which specification it is, if there are several."""
    return f" (it is {path})" if path != where else ""


def bad_spec(where: str, spec: Any, path: str) -> TypeError:
    return TypeError(
        f"Value mapping specification in xmap {where} pytree can be either:\n"
        "- lists of axis names (possibly ending with the ellipsis object: ...)\n"
        "- dictionaries that map positional axes (integers) to axis names (e.g. {2: 'name'})\n"
        f"but got: {show(spec)}{_below(where, path)}"
    )


def misplaced_ellipsis(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"An ellipsis can only end a list of axis names, but xmap {where} has the specification {show(spec)}"
        f"{_below(where, path)}. Use a dictionary to name dimensions that are not leading, e.g. {{0: 'i', 2: 'j'}}"
    )


def bad_axis_name(where: str, name: Any, path: str, spec: Any) -> TypeError:
    reason = "it must be hashable, and neither None nor an ellipsis"
    if isinstance(name, tuple):
        reason = "JAX reads a tuple as several names"
    if isinstance(name, (bool, np.bool_)):
        reason = "JAX reads a truth value as the position 0 or 1"
    read = f", in the specification {show(spec)}{_below(where, path)}" if spec is not None else ""
    return TypeError(
        f"{show(name)} cannot be used as an axis name in xmap {where}{read}: {reason}. Use a string instead"
    )


def partition_spec(where: str, name: Any, path: str, spec: Any) -> TypeError:
    return TypeError(
        f"xmap {where} has the PartitionSpec {name!r} in {show(spec)}{_below(where, path)}, which means something "
        "in jit and shard_map only. Name the dimensions of an array with a list, e.g. ['i', ...]"
    )


def negative_axis(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"xmap doesn't support negative axes in {where}, but got the specification {show(spec)}{_below(where, path)}. "
        "Count from the first dimension"
    )


def repeated_name(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"Named axes should be unique within each {where} argument specification, but one them is: {show(spec)}"
        f"{_below(where, path)}"
    )


def no_results() -> ValueError:
    return ValueError("xmapped functions cannot have no return values")


def not_a_prefix(
    where: str, specs: Any, tree: Any, parting: tuple[str, str, str] | None, argument: str = ""
) -> ValueError:
    """``parting``: where the two trees part, what the specification has there, and what the value has.

    ``argument``: the one argument of ``global_array`` that the specification is for, if it is not one of xmap's.
    """
    place, asked, found = parting or ("", "", "")
    parted = f" They part at {place}: there the specification has {asked}, and the value {found}." if parting else ""
    advice = " Write {} for what is not mapped." if asked == "None" else ""
    hint = (
        " Note that xmap in_axes that are non-trivial pytrees should always be wrapped in a tuple representing "
        "the argument list."
        if where == "in_axes" and not argument
        else ""
    )
    asking = f"The {where} of global_array" if argument else f"xmap {where} specification"
    return ValueError(
        f"{asking} must be a tree prefix of {argument or 'the corresponding value'}, got specification "
        f"{show(specs)} for value tree {tree}.{hint}{parted}{advice}"
    )


def no_source(function: str, reasons: Iterable[str]) -> NotImplementedError:
    listed = "".join(f"\n- {reason}" for reason in dict.fromkeys(reasons))
    return NotImplementedError(f"The program of {function} cannot be written as source:{listed}")


def keyword_arguments(names: Iterable[str]) -> TypeError:
    listed = ", ".join(names)
    return TypeError(
        f"xmapped functions take positional arguments only, but got the keyword arguments: {listed}. "
        "Pass them by position, or bind them with functools.partial before xmap"
    )


def no_array_argument(path: str, value: Any) -> TypeError:
    found = (
        f"an array of dtype {value.dtype}" if hasattr(value, "dtype") else f"{value!r} of type {type(value).__name__}"
    )
    return TypeError(
        f"The arguments of xmapped functions are arrays, scalars, or pytrees of them, but {path} is {found}. What is "
        "static is not an argument of the xmapped function: bind it with functools.partial before xmap"
    )


def argument_rank_too_small(spec: Any, needed: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"One of xmap arguments has an in_axes specification of {show(spec)}, which implies that it has at least "
        f"{needed} dimensions, but the argument has rank {len(shape)} (it is {path} with shape {tuple(shape)}). "
        "Name fewer dimensions, or pass an array that has them"
    )


def scalar_argument_mapped(spec: Any, needed: int, path: str) -> TypeError:
    return TypeError(
        f"One of xmap arguments has an in_axes specification of {show(spec)}, which implies that it has at least "
        f"{needed} dimensions, but {path} is a Python scalar. Pass an array with a dimension for each name"
    )


def argument_rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"xmap argument has an in_axes specification of {show(spec)}, which asserts that it should be of rank {rank}, "
        f"but the argument has {_ranked(shape)} (it is {path}). End the specification with ... to allow more dimensions"
    )


def output_rank_too_small(spec: Any, needed: int, path: str, ndim: int) -> ValueError:
    return ValueError(
        f"One of xmap outputs has an out_axes specification of {show(spec)}, which requires the result of the xmapped "
        f"function to have at least {needed} positional dimensions, but it only has {ndim} (it is {path}). Put the "
        "named axes at lower positions"
    )


def output_rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"xmap output has an out_axes specification of {show(spec)}, which asserts that it should be of rank {rank}, "
        f"but the output has {_ranked(shape)} (it is {path}). End the specification with ... to allow more dimensions"
    )


def names_missing_from_inputs(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        "All axis names appearing in out_axes must also appear in in_axes or axis_sizes, but the following are "
        f"missing: {_set(names)}"
    )


# ------------------------------------------------------------------------ sizes


def size_conflict(
    name: Hashable, known: int, origin: str, shape: Sequence[int], spec: Any, dim: int, path: str
) -> ValueError:
    return ValueError(
        f"The size of axis {name} was previously inferred to be {known}, but found an argument of shape "
        f"{tuple(shape)} with in_axes specification {show(spec)}. Shape mismatch occurs in dimension {dim}: "
        f"{shape[dim]} != {known} (the argument is {path}, and {known} is the size in {origin}). "
        "If these are different axes, give them different names"
    )


def size_not_inferred(names: Iterable[Hashable]) -> ValueError:
    listed = ", ".join(map(str, names))
    return ValueError(
        f"Failed to infer size of axes: {listed}. You've probably passed in empty containers in place of arguments "
        "that had those axes in their in_axes. Provide the sizes of missing axes explicitly via axis_sizes to fix "
        "this error."
    )


def bad_size(name: Any, size: Any) -> TypeError:
    return TypeError(f"axis_sizes should map axis names to integers, but the size of axis {name} is {size!r}")


def negative_size(name: Any, size: Any) -> ValueError:
    return ValueError(f"axis_sizes should not be negative, but the size of axis {name} is {size!r}")


def not_divisible(name: Hashable, size: int, resources: Sequence[Any], total: int) -> ValueError:
    return ValueError(
        f"Size of axis {name} ({size}) is not divisible by the total number of resources assigned to this axis "
        f"({tuple(resources)}, {total} in total). Pad the axis to a multiple of {total}, or give it other resources"
    )


def sharded_axis_note(name: Hashable, mesh_axes: Any) -> str:
    """A note for an error of JAX."""
    return (
        f"The type of an argument says that it is sharded over {mesh_axes!r} along the named axis `{name}`, which has "
        f"no mesh axes in axis_resources. Give it {mesh_axes!r} there, or jax.sharding.reshard the argument"
    )


def committed_elsewhere_note() -> str:
    """A note for an error of JAX."""
    return (
        "An array that is committed to one device is moved to the mesh only where an xmapped function is called with "
        "it directly. Under jax.grad, jax.jit and the like, and if it is spread over another mesh, move it first: "
        "jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
    )


def note_once(error: BaseException, note: str) -> None:
    """Add a note to an error of JAX or of the user, which may pass several functions that would add it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def no_mesh_of_devices(value: Any) -> TypeError:
    return TypeError(
        f"The mesh of global_array should be a Mesh (of xmap_compat or of jax.sharding) of devices, but got {value!r}"
    )


def process_without_devices(process: int, mesh: Any) -> ValueError:
    return ValueError(
        f"Process {process} has no device on the mesh ({', '.join(f'{n}: {k}' for n, k in mesh.shape.items())}), so it "
        "has no part of a global array on it. Make the mesh of devices of all processes, or call global_array and "
        "the functions on that mesh only in processes that have some of its devices"
    )


# --------------------------------------------------------------------- resources


def bad_axis_resources(value: Any) -> TypeError:
    return TypeError(f"axis_resources should be a dictionary from axis names to resources, but got {value!r}")


def bad_axis_sizes(value: Any) -> TypeError:
    return TypeError(f"axis_sizes should be a dictionary from axis names to integers, but got {value!r}")


def bad_resource(name: Hashable, resource: Any) -> TypeError:
    return TypeError(
        "The resources of an axis should be names of mesh axes or of serial loops, or SerialLoop(length), but axis "
        f"{name} is assigned {resource!r}. Write a tuple of several resources, and () for none"
    )


def repeated_resource(name: Hashable, resources: Any) -> ValueError:
    return ValueError(
        f"Resource assignment of a single axis must be a tuple of distinct resources, but specified {resources!r} "
        f"for axis {name}"
    )


def missing_resources(missing: Iterable[Any], axes: Iterable[Hashable], available: Iterable[Any]) -> ValueError:
    return ValueError(
        "In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        f"{_set(missing)} (assigned to {_names(axes)}). Resources in scope: {_set(available)}. Enter a mesh with "
        "`with mesh(devices, names):` or a loop with `with serial_loop(name, length):` around the call"
    )


def unused_resources_text(names: Iterable[Hashable]) -> str:
    return (
        "All axes that were assigned resources have to appear in in_axes or axis_sizes, but the following are "
        f"missing: {_set(names)}. Their axis_resources are ignored"
    )


def loop_before_mesh(name: Hashable, resources: Any) -> ValueError:
    return ValueError(
        f"Loop resources should come after mesh axes in the resource assignment of an axis, but specified "
        f"{resources!r} for axis {name}"
    )


def bad_loop_length(length: Any) -> ValueError:
    return ValueError(f"The length of a serial loop should be a positive integer, but got {length!r}")


def bad_loop_name(name: Any) -> TypeError:
    return TypeError(f"The name of a serial loop should be a string (or hashable, and not None), but got {name!r}")


def loop_name_taken(name: Hashable) -> ValueError:
    return ValueError(
        f"Cannot extend the resource environment with loop axis `{name}`: the name is already in use. Give the loop "
        "another name"
    )


def mesh_shadows_loops(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        "Cannot update the mesh of the current resource environment. The new mesh shadows already defined axes "
        f"{_names(names)}. Give the serial loop or the mesh axis another name"
    )


def bad_mesh(shape: Sequence[int], names: Sequence[Any]) -> ValueError:
    return ValueError(
        f"mesh needs one axis name for each dimension of its device array, but got devices of shape {tuple(shape)} and "
        f"the names {names!r}"
    )


def bad_mesh_names(names: Any) -> TypeError:
    return TypeError(
        f"The axis names of a mesh should be strings (or hashable, and not None) in a tuple, but got {names!r}"
    )


def repeated_mesh_name(names: Sequence[Any]) -> ValueError:
    return ValueError(
        f"mesh needs one axis name for each dimension of its device array, all different, but got the names {names!r}"
    )


def bad_mesh_devices(found: Any) -> TypeError:
    return TypeError(
        "mesh expects a rectangular array (or a list) of JAX devices, such as np.array(jax.devices()).reshape(4, 2), "
        f"but it contains {found!r} of type {type(found).__name__}"
    )


def repeated_mesh_device(device: Any) -> ValueError:
    return ValueError(f"A mesh should have each device once, but {device!r} appears more than once in it")


def empty_mesh(names: Sequence[Any]) -> ValueError:
    return ValueError(f"mesh needs at least one device, but got none for the axis names {names!r}")


def loop_collective(name: Hashable, where: str) -> RuntimeError:
    return RuntimeError(
        "Named axes with loop resources assigned to them cannot be referenced inside the xmapped computation "
        f"(e.g. in collectives), but `{name}` violates that rule at {where}. Remove the loop from its axis_resources, "
        "or the collective from the function"
    )


def integer_in_collective(primitive: str, axis: int, where: str) -> NameError:
    return NameError(
        f"{primitive} at {where} got {axis} for an axis name. Collectives read an integer as a position (dimension), "
        f"never as a name, and {primitive} takes names only: name the axis by a string"
    )


def note_on_integer_names(error: Exception, names: Sequence[Hashable]) -> None:
    """Say why a collective does not find an axis whose name is an integer."""
    listed = ", ".join(str(name) for name in names)
    error.add_note(
        f"This xmap has axes that are named by integers ({listed}). Collectives read an integer as a position "
        "(dimension), never as a name: name an axis by a string if the function has a collective over it"
    )


def mesh_changed() -> RuntimeError:
    return RuntimeError(
        "Changing the physical mesh is not allowed inside xmap. Enter the mesh around the outermost xmapped call"
    )


def bad_donation(donate_argnums: Any) -> TypeError:
    return TypeError(
        f"donate_argnums should be the position of an argument, or a tuple of positions, but got {donate_argnums!r}"
    )


def bad_backend(backend: Any) -> TypeError:
    return TypeError(f"backend should be None or the name of a platform, such as 'cpu', but got {backend!r}")


def unknown_backend(backend: str, known: Iterable[str]) -> RuntimeError:
    return RuntimeError(f"xmap backend {backend!r} is not available. Available backends: {', '.join(known)}")


def mesh_of_other_backend(backend: str, platform: str) -> ValueError:
    return ValueError(
        f"xmap was asked for the backend {backend!r}, but the devices of the mesh in scope are of the "
        f"platform {platform!r}"
    )


# ------------------------------------------------------------------ named shapes


def undeclared_output(path: str, spec: Any, extra: Iterable[Hashable]) -> TypeError:
    return TypeError(
        f"One of xmap results has an out_axes specification of {show(spec)}, but is actually mapped along more axes "
        f"defined by this xmap call: {', '.join(map(str, extra))} (it is {path}). Add them to its out_axes, or reduce "
        "over them in the function"
    )


def undeclared_output_text(path: str, extra: Iterable[Hashable], where: str) -> str:
    names = ", ".join(map(str, extra))
    return (
        f"{path} of the xmapped function at {where} varies over {names}, which its out_axes leave out. As in legacy, "
        "reading it gives the element of index 0, and each device keeps its own for the next xmap over the same mesh. "
        f"from xmap_compat import xmap refuses this: add {names} to its out_axes, or reduce over them in the function"
    )


def gradient_of_undeclared(path: str) -> NotImplementedError:
    return NotImplementedError(
        f"{path} of an xmapped function varies over an axis that its out_axes leave out. It has no gradient from "
        "outside: add the axis to its out_axes, or reduce over it in the function"
    )


def _resource_conflict(message: str) -> Any:
    """The type that these errors had, without the link to a page of JAX's that does not speak of them."""
    error = JAXTypeError(message)
    error.args = (message,)
    return error


def names_meet(first: Hashable, second: Hashable, resource: Any, place: str) -> JAXTypeError:
    first, second = sorted((first, second), key=str)
    resource = getattr(resource, "mesh_axis", resource)  # of a nested xmap
    return _resource_conflict(
        f"Axes `{first}` and `{second}` are both mapped to the resource `{resource}`, but they coincide in the "
        f"named_shape of {place}. Map one of them to another resource, or reduce over one before they meet"
    )


def output_broadcast_meets(fun: str, path: str, name: Hashable, resource: Any, present: Hashable) -> JAXTypeError:
    return _resource_conflict(
        f"One of xmapped function ({fun}) outputs is broadcast along axis `{name}` which is assigned to resources "
        f"`{resource}`, but the output is already partitioned along `{resource}`, because its named shape contains "
        f"`{present}`. It is {path}. Map one of them to another resource, or reduce over `{present}` in the function"
    )


def shadowed_names(names: Iterable[Hashable], where: str) -> TypeError:
    return TypeError(
        f"Detected disallowed xmap axis name shadowing at {where} (shadowed axes: {_names(sorted(names, key=str))}). "
        "Rename the axes of the inner xmap"
    )


def unbound_name(original: str, names: Mapping[Hashable, int]) -> NameError:
    scope = ", ".join(f"{name}: {size}" for name, size in names.items()) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    unbound = original.partition("unbound axis name:")[2].partition(" To fix this")[0].strip().rstrip(".")
    return NameError(
        f"Found an unbound axis name: {unbound}. Named axes in scope: {scope}. Name one of them, or add the axis to "
        "in_axes or axis_sizes"
    )


def tangent_varies_more(extra: Iterable[Hashable], where: str) -> TypeError:
    return TypeError(
        f"The custom_jvp rule used at {where} returns a tangent that varies over {_names(extra)} for an output that "
        "does not. Reduce the tangent over these axes in the rule (e.g. with lax.psum)"
    )


def unsupported_primitive(primitive: str, names: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"xmap_compat does not know how to partition the operation `{primitive}` that uses the named axes "
        f"{_names(names)} at {where}. Write it with the collectives of jax.lax (psum, all_gather, ppermute, ...), "
        "apply it outside of the xmapped function, or, if it has a batching rule for these axes, leave them without "
        "mesh resources"
    )


def repeated_permutation_index(kind: str, index: int, where: str) -> ValueError:
    return ValueError(
        f"The permutation of ppermute at {where} has the {kind} index {index} more than once. Each element can be sent "
        "once and received once"
    )


def permutation_index_out_of_range(index: int, size: int, where: str) -> ValueError:
    return ValueError(
        f"The permutation of ppermute at {where} has the index {index}, but the axis has the indices 0 to {size - 1}"
    )


def permutation_of_other_things(perm: Any, where: str) -> ValueError:
    return ValueError(
        f"The permutation of ppermute at {where} must be pairs of integers, (source, destination), but it is {perm!r}"
    )


def source_out_of_range(source: int, size: int, where: str) -> ValueError:
    return ValueError(
        f"The source of pbroadcast at {where} is the index {source}, but the axis has the indices 0 to {size - 1}"
    )


def groups_do_not_cover(primitive: str, groups: Any, size: int, where: str) -> ValueError:
    return ValueError(
        f"axis_index_groups of `{primitive}` at {where} must cover all indices exactly once, 0 to {size - 1}, but they "
        f"are {groups}. Put the indices that are left into groups of their own"
    )


def repeated_collective_axis(primitive: str, names: Sequence[Hashable], where: str) -> ValueError:
    return ValueError(
        f"The collective {primitive} at {where} names an axis more than once: {_names(names)}. Name each axis once"
    )


def unsupported_groups(primitive: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"axis_index_groups of `{primitive}` at {where} must all have the same size, and the collective must be over a "
        "single named axis. Pad the groups, or split the named axis in two"
    )


def foreign_reference() -> NotImplementedError:
    return NotImplementedError(
        "An xmapped function cannot read or write a reference (jax.new_ref) that was made outside of it: each element "
        "of its named axes would write there. Pass the value as an argument and return the new one, or make the "
        "reference inside"
    )


def shard_map_inside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The shard_map at {where} cannot be evaluated inside an xmapped function whose axes have mesh resources, "
        "or if it uses named axes of the xmap: all mesh axes are taken. Give the axes of the shard_map to "
        "axis_resources instead"
    )


# ---------------------------------------------------------------------------- einsum


def einsum_spec_type(spec: Any) -> TypeError:
    return TypeError(
        f"The first argument of a named einsum should be a string like 'n{{b,k}},{{k}}->n{{b}}', not {spec!r}"
    )


def malformed_einsum(spec: str, position: int, reason: str) -> ValueError:
    position = min(position, len(spec))
    return ValueError(f"Malformed einsum specification: {reason}\n  {spec}\n  {' ' * position}^")


def einsum_operand_count(spec: str, expected: int, given: int) -> ValueError:
    return ValueError(f"The einsum specification {spec!r} describes {expected} operands, but {given} were given")


def einsum_rank(spec: str, index: int, text: str, letters: int, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"Operand {index} of the einsum {spec!r} is described by {text!r}, which has {letters} positional dimensions, "
        f"but its positional shape is {tuple(shape)}. Named axes belong in braces"
    )


def einsum_size(spec: str, letter: Any, known: int, size: int, index: int) -> ValueError:
    which = "a dimension under the ellipsis" if isinstance(letter, int) else f"the dimension {letter}"
    return ValueError(f"In the einsum {spec!r}, {which} has size {known} in one place and {size} in operand {index}")


def einsum_path(optimize: Any, count: int) -> ValueError:
    return ValueError(
        f"optimize={optimize!r} is not a path for {count} operands. A path is a list of steps, each of them a tuple of "
        "positions among the operands that are left; what it gives comes last, and one operand is left in the end"
    )


def einsum_strategy(optimize: Any) -> ValueError:
    return ValueError(
        f"optimize={optimize!r} is none of the strategies of opt_einsum.contract_path. Use 'auto', 'greedy' or "
        "'optimal'"
    )


def einsum_unbound(spec: str, name: str, scope: Iterable[Any]) -> NameError:
    listed = ", ".join(str(axis) for axis in scope if not hasattr(axis, "mesh_axis")) or "none"
    return NameError(
        f"Found an unbound axis name: {name} in the einsum {spec!r}. Named axes in scope: {listed}. Name one of them, "
        "or add the axis to in_axes or axis_sizes"
    )


def einsum_skipped_axis(spec: str, axis: Hashable, by: str, operand: str, where: str = "") -> TypeError:
    where = where and f" at {where}"
    return TypeError(
        f"The einsum {spec!r}{where} mentions the named axis `{axis}` in {by} and skips it in {operand}, "
        "which varies over it too. Name the axis in both operands, or reduce it in this one first"
    )


# -------------------------------------------------------------------- named functions


def lost_axis(fun: str, axis: Hashable, size: int, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{fun} was applied along the named axis `{axis}` of size {size} with keep=True, but returned an array of "
        f"shape {tuple(shape)}: its first dimension should be that axis. Use keep=False if it reduces the axis"
    )


def mixed_axes(fun: str, axis: Any) -> TypeError:
    return TypeError(f"{fun} takes one named axis, or one positional axis, but got axis={axis!r}")


def axis_name_type(fun: str, name: Any) -> TypeError:
    return TypeError(f"{fun} expects axis names (hashable, and not None), but got {name!r}. Use a string")


def dimension_out_of_range(fun: str, dim: Any, what: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{fun} was given the positional dimension {dim} of {what}, which has rank {len(shape)} (shape "
        f"{tuple(shape)}; named axes are not part of it)"
    )


def repeated_axis(fun: str, axes: Sequence[Any]) -> ValueError:
    return ValueError(f"{fun} names an axis more than once: {', '.join(map(repr, axes))}. Name each axis once")


def integer_indices(fun: str, dtype: Any) -> TypeError:
    return TypeError(f"{fun} expects indices of an integer type, but got {dtype}")


def bad_shift(shift: Any) -> TypeError:
    return TypeError(
        f"roll along a named axis expects an integer that is known when the program is traced, but got {shift!r}"
    )


def shifts_for_axes(shifts: Sequence[Any], axes: Sequence[Any]) -> ValueError:
    return ValueError(f"roll expects one shift, or one for each axis, but got {len(shifts)} shifts for axis={axes!r}")


def bad_dot_dimensions(option: str, value: Any) -> TypeError:
    return TypeError(
        f"{option} of pdot should be a pair of sequences of as many dimensions of x as of y, e.g. ((0,), (1,)), but "
        f"got {value!r}"
    )


def dot_sizes(option: str, left: int, right: int, x: Sequence[int], y: Sequence[int]) -> TypeError:
    return TypeError(
        f"{option} of pdot pairs dimension {left} of x (shape {tuple(x)}) with dimension {right} of y (shape "
        f"{tuple(y)}), but they have different sizes"
    )


def dot_overlap(operand: str, dim: int) -> TypeError:
    return TypeError(
        f"pdot was given dimension {dim} of {operand} more than once in pos_contract and pos_batch. Name each once"
    )


def bad_precision(precision: Any) -> ValueError:
    return ValueError(
        f"{precision!r} is not a precision. Use None, 'default', 'high', 'highest', or what jax.lax.dot_general takes"
    )


def not_an_array(fun: str, x: Any) -> TypeError:
    return TypeError(f"{fun} expects an array or a scalar, but got a value of type {type(x).__name__}")


def bad_array_type(key: Any) -> TypeError:
    return TypeError(
        "An array type is written like f32[(5,)], or f32[(5,), {'batch': 20}] with a named shape, but got the "
        f"brackets [{key!r}]"
    )


def named_shape_unknown(reason: str) -> ValueError:
    return ValueError(
        f"named_shape cannot tell which named axes this value varies over: {reason}. Ask outside of that function, for "
        "the value that is passed to it"
    )


def named_shape_of_type(aval: Any) -> TypeError:
    return TypeError(
        f"x.aval.named_shape is not known inside an xmapped function: the type {aval.str_short()} does not tell which "
        "named axes a value varies over. Write x.named_shape, or xmap_compat.named_shape(x)"
    )


def type_of_no_array(what: str, expected: Any, x: Any) -> TypeError:
    return TypeError(f"{what} should have the type {expected}, but is a {type(x).__name__}, not an array")


def type_mismatch(what: str, expected: Any, found: Any) -> TypeError:
    return TypeError(f"{what} should have the type {expected}, but has the type {found}")


def outer_names(names: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"The function uses the axes {_names(names)} of a transformation around the xmap (such as vmap with an "
        "axis_name), which cannot be reached while its own axes have mesh resources. Make them axes of the xmap"
    )


def wrong_named_size(name: str, size: int, actual: int) -> ValueError:
    return ValueError(f"The shape of axis {name} was specified as {size}, but it really is {actual}")


def no_fan(shape: Any) -> ValueError:
    return ValueError(
        f"Can't compute input and output sizes of a {shape.rank}-dimensional weights tensor. Must be at least 2D, "
        f"named dimensions included, but the shape is {shape}"
    )


def initializer_of_named_shape(dtype: Any) -> TypeError:
    return TypeError(
        f"variance_scaling of a NamedShape makes real floating point numbers, but the dtype is {dtype}. Initialize the "
        "real and the imaginary part by themselves"
    )


def named_struct(named_shape: Any) -> TypeError:
    return TypeError(
        f"ShapeDtypeStruct(named_shape={named_shape!r}): the types of today have no named axes. Leave named_shape out: "
        "xmap reads the names from in_axes"
    )


def removed_name(name: str, now: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is no longer in JAX, and nothing of the same meaning takes its place: under xmap_compat.install() it "
        f"can be imported, but not used. Today, write {now}."
    )


def bad_resource_env(value: Any) -> TypeError:
    return TypeError(
        f"thread_resources.env should be assigned a ResourceEnv, but got {value!r}. Write "
        "`thread_resources.env = ResourceEnv(mesh)`, or `with mesh:`"
    )


def assigned_loops(loops: Sequence[Any]) -> ValueError:
    return ValueError(
        f"A ResourceEnv that is assigned to thread_resources.env can set the mesh only, but it has the loops "
        f"{tuple(loops)!r}. Use `with serial_loop(name, length):` around the calls"
    )
