"""What the core refuses: one function for each message.  Legacy's wording is kept where legacy had the message.

Most functions return an exception for the caller to raise, so that the traceback ends where the mistake was found;
a ``..._text`` is of a warning, and a ``..._note`` goes below an error of JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import JAXTypeError


def quoted(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def as_set(names: Iterable[Any]) -> str:
    return "{" + ", ".join(sorted(repr(name) for name in names)) + "}"


def show(spec: Any) -> str:
    """A specification as the user wrote it: ``['i', ...]``, not ``['i', Ellipsis]``."""
    if spec is ...:
        return "..."
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return f"an array of shape {tuple(spec.shape)}"
    if type(spec) in (list, tuple):
        inside = ", ".join(map(show, spec)) + ("," if type(spec) is tuple and len(spec) == 1 else "")
        return f"[{inside}]" if type(spec) is list else f"({inside})"
    if type(spec) is dict:
        return "{" + ", ".join(f"{key!r}: {show(value)}" for key, value in spec.items()) + "}"
    fields = getattr(type(spec), "__match_args__", ())
    if fields and (isinstance(spec, tuple) or dataclasses.is_dataclass(spec)):
        return f"{type(spec).__name__}({', '.join(f'{k}={show(getattr(spec, k))}' for k in fields)})"
    return repr(spec)


def did_you_mean(names: Iterable[Any], known: Iterable[Any]) -> str:
    """A sentence for names that are almost written as known ones, but for case or a letter; often empty."""
    spelled = {str(name).lower(): name for name in known}
    close = (difflib.get_close_matches(str(name).lower(), spelled, n=1) for name in names)
    meant = list(dict.fromkeys(spelled[match[0]] for match in close if match))
    return f". Did you mean {quoted(meant)}?" if meant else ""


def _ranked(shape: Sequence[int]) -> str:
    return f"rank {len(shape)} (and shape {tuple(shape)})"


def should_be(what: str, wanted: str, got: Any, error: type[Exception] = TypeError, advice: str = "") -> Exception:
    """The error for an argument of the wrong kind."""
    return error(
        f"{what} should be {wanted}, but got {repr(got) if got is ... else show(got)}{advice and '. '}{advice}"
    )


def described(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return f"an array of dtype {dtype}" if dtype is not None else f"{value!r} of type {type(value).__name__}"


# ------------------------------------------------------------- axis specifications


def _below(where: str, path: str) -> str:
    """Which specification it is, if there are several."""
    return f" (it is {path})" if path != where else ""


def bad_spec(where: str, spec: Any, path: str) -> TypeError:
    return TypeError(
        f"Value mapping specification in xmap {where} pytree can be either:\n"
        "- lists of axis names (possibly ending with the ellipsis object: ...)\n"
        "- dictionaries that map positional axes (integers) to axis names (e.g. {2: 'name'})\n"
        f"but got: {show(spec)}{_below(where, path)}{_spec_meant(spec)}"
    )


def _spec_meant(spec: Any) -> str:
    """What to write for a specification that is none, where that can be guessed."""
    if spec is ... or (isinstance(spec, str) and spec == "..."):
        return ". Write [...] where no dimension is named"
    if isinstance(spec, str):
        return f". Write [{spec!r}, ...] for the leading dimension"
    if isinstance(spec, (set, frozenset)):
        return ". A set has no order: write a list, or {position: name}"
    if isinstance(spec, (int, np.integer)):
        leading = "['name', ...] or " if spec == 0 else ""
        return f". Write {leading}{{{spec}: 'name'}}, with the name of that dimension"
    if isinstance(spec, dict) and all(isinstance(value, (int, np.integer)) for value in spec.values()):
        return f". Write it the other way round: {show({value: key for key, value in spec.items()})}"
    return ""


def misplaced_ellipsis(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"An ellipsis can only end a list of axis names, but xmap {where} has the specification {show(spec)}"
        f"{_below(where, path)}. Use a dictionary to name dimensions that are not leading, e.g. {{0: 'i', 2: 'j'}}"
    )


def bad_axis_name(where: str, name: Any, path: str, spec: Any) -> TypeError:
    reason, remedy = "it must be hashable, and neither None nor an ellipsis", "Use a string instead"
    if isinstance(name, str):
        reason, remedy = f"`{name!r}` is a string", "Write `...`"
    if isinstance(name, tuple):
        reason = "JAX reads a tuple as several names"
    if isinstance(name, (bool, np.bool_)):
        reason = "JAX reads a truth value as the position 0 or 1"
    read = f", in the specification {show(spec)}{_below(where, path)}" if spec is not None else ""
    if isinstance(name, (list, dict)) and isinstance(spec, tuple) and spec[-1] is ...:
        remedy = "A tuple that ends in ... is one specification: for an argument without names write [...] or {}"
    return TypeError(f"{show(name)} cannot be used as an axis name in xmap {where}{read}: {reason}. {remedy}")


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
    diagonal = "; xmap takes no diagonal, jnp.diagonal does" if where == "in_axes" else ""
    return ValueError(
        f"Named axes should be unique within each {where} argument specification, but one them is: {show(spec)}"
        f"{_below(where, path)}. Give each dimension its own name{diagonal}"
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
    if where == "in_axes" and place == "args" and asked.startswith(found[: found.rfind(" ")]):
        advice = " Call it with as many arguments as in_axes has entries."
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
        f"{' (a list of numbers is a pytree of scalars)' if path.count('[') > 1 else ''}"
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


# ------------------------------------------------------------------------ sizes


def size_conflict(
    name: Hashable, known: int, origin: str, shape: Sequence[int], spec: Any, dim: int, path: str, is_for_all: bool
) -> ValueError:
    advice = "If these are different axes, give them different names"
    if is_for_all:
        advice = (
            "The specification is for all arguments; if these differ, write a tuple of one for each, with {} for what "
            "is not mapped"
        )
    return ValueError(
        f"The size of axis {name} was previously inferred to be {known}, but found an argument of shape "
        f"{tuple(shape)} with in_axes specification {show(spec)}. Shape mismatch occurs in dimension {dim}: "
        f"{shape[dim]} != {known} (the argument is {path}, and {known} is the size in {origin}). "
        f"{advice}"
    )


def size_not_inferred(names: Iterable[Hashable]) -> ValueError:
    listed = ", ".join(map(str, names))
    return ValueError(
        f"Failed to infer size of axes: {listed}. You've probably passed in empty containers in place of arguments "
        "that had those axes in their in_axes. Provide the sizes of missing axes explicitly via axis_sizes to fix "
        "this error."
    )


def no_arguments(fun: str, names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"Failed to infer size of axes: {', '.join(map(str, names))}. There are no arguments. Call {fun} with its "
        "arguments, and its plan with them too, or with types of arrays: jax.ShapeDtypeStruct(shape, dtype)"
    )


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


# --------------------------------------------------------------------- resources


def bad_resource(name: Hashable, resource: Any) -> Exception:
    wanted = "names of mesh axes or of serial loops, or SerialLoop(length)"
    advice = "Write a tuple of several resources, and () for none"
    return should_be(f"The resources of axis {name}", wanted, resource, advice=advice)


def device_as_resource(name: Hashable, given: Any) -> TypeError:
    kind = "device mesh" if isinstance(given, jax.sharding.Mesh) else "device"
    return TypeError(
        f"The resources of axis {name} should be names of mesh axes, but contain a {kind}: {given!r}. Enter "
        f"`with mesh(devices, ('x',)):` around the call, and assign the name: axis_resources={{{name!r}: 'x'}}"
    )


def repeated_resource(name: Hashable, resources: Any) -> ValueError:
    return ValueError(
        f"Resource assignment of a single axis must be a tuple of distinct resources, but specified {resources!r} "
        f"for axis {name}"
    )


def missing_resources(
    missing: Sequence[Any], axes: Iterable[Hashable], available: Sequence[Any], has_mesh: bool
) -> ValueError:
    remedy = "Enter a mesh with `with mesh(devices, names):` or a loop"
    if has_mesh:
        remedy = "Assign one of these, give the mesh an axis of that name, or enter a loop"
    return ValueError(
        "In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        f"{as_set(missing)} (assigned to {quoted(axes)}). Resources in scope: {as_set(available)}. {remedy} with "
        "`with serial_loop(name, length):` around the call"
        f"{did_you_mean(missing, available)}{''.join(map(_loop_meant, missing))}"
    )


def _loop_meant(resource: Any) -> str:
    return f". To compute an axis in {resource} chunks write SerialLoop({resource})" if type(resource) is int else ""


def unused_resources_text(unused: Mapping[Hashable, Sequence[Any]], known: Sequence[Hashable]) -> str:
    """``unused``: axes that the call does not have, and the resources that they are given."""
    turned = {r: name for name, entries in unused.items() for r in entries if r in known}
    meant = f". Is it the other way round, {turned}?" if turned else did_you_mean(unused, known)
    return (
        "All axes that were assigned resources have to appear in in_axes or axis_sizes, but the following are "
        f"missing: {as_set(unused)}. Their axis_resources are ignored{meant}"
    )


def loop_before_mesh(name: Hashable, resources: Any) -> ValueError:
    return ValueError(
        f"Loop resources should come after mesh axes in the resource assignment of an axis, but specified "
        f"{resources!r} for axis {name}"
    )


def loop_name_taken(name: Hashable) -> ValueError:
    return ValueError(
        f"Cannot extend the resource environment with loop axis `{name}`: the name is already in use. Give the loop "
        "another name"
    )


def mesh_shadows_loops(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        "Cannot update the mesh of the current resource environment. The new mesh shadows already defined axes "
        f"{quoted(names)}. Give the serial loop or the mesh axis another name"
    )


def bad_mesh(shape: Sequence[int], names: Sequence[Any]) -> ValueError:
    return ValueError(
        f"mesh needs one axis name for each dimension of its device array, but got devices of shape {tuple(shape)} and "
        f"the names {names!r}. Write the names in one tuple, ('x', 'y'), or reshape the devices"
    )


def bad_mesh_names(names: Any) -> Exception:
    return should_be("The axis names of a mesh", "strings (or hashable, and not None) in a tuple", names)


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


def unknown_compiler_axes(names: Iterable[Hashable], mesh_axes: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"compiler_axes leaves mesh axes {as_set(names)} to the compiler, but the mesh in scope at the call has the "
        f"axes {as_set(mesh_axes)}. Name some of these, and enter compiler_axes around calls under that mesh only"
    )


def resource_of_compiler(name: Hashable, mesh_axis: Hashable) -> ValueError:
    return ValueError(
        f"Axis {name} has mesh axis {mesh_axis!r} in its axis_resources, but compiler_axes leaves {mesh_axis!r} to the "
        f"compiler at this call. An axis of the mesh is for one of the two: take it out of axis_resources, or call the "
        "xmapped function outside of compiler_axes"
    )


def compiler_axes_changed(outer: Iterable[Hashable], inner: Iterable[Hashable]) -> RuntimeError:
    return RuntimeError(
        "Changing compiler_axes is not allowed inside xmap: around the xmapped function whose body this is they are "
        f"{as_set(outer)}, and here {as_set(inner)}. Enter compiler_axes around the outermost xmapped call"
    )


def axis_given_away(name: Hashable, mesh_axis: Hashable) -> ValueError:
    return ValueError(
        f"Axis {name} of an xmap inside of a custom derivative rule is assigned mesh axis {mesh_axis!r}, which the "
        "option experimental_xmap_spmd_lowering has left to the compiler, as the function itself does not use it. Use "
        "xmap_compat.compiler_axes in the place of the option, with the other axes of the mesh"
    )


def callback_beside_compiler(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} (at {where}) cannot run in an xmapped function while mesh axes {as_set(axes)} are left to the "
        "compiler: JAX allows callbacks there that return nothing only. Call it outside of compiler_axes (or without "
        "the option experimental_xmap_spmd_lowering), or use jax.debug.callback"
    )


def ordered_callback(axes: Iterable[Hashable], where: str) -> ValueError:
    return ValueError(
        f"Cannot `vmap` ordered IO callback: what io_callback(..., ordered=True) (at {where}) is given varies over "
        f"{as_set(axes)}, and the elements of a named axis have no order. Leave ordered=True out"
    )


def debugging_without_operands(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} without a value (at {where}) cannot run in an xmapped function while mesh axes {as_set(axes)} "
        "are left to the compiler: XLA does not know on which devices. Give it a value of the body, as in "
        "jax.debug.print('here {}', v), or call the function outside of compiler_axes"
    )


def explicit_compiler_axes_note(axes: Iterable[Hashable]) -> str:
    """A note for an error of JAX."""
    return (
        f"Mesh axes {as_set(axes)} are left to the compiler and have the type Explicit, so that JAX must know from "
        "types how each value lies over them. Where it cannot, give the operation in the body its "
        "out_sharding=jax.sharding.NamedSharding(mesh, spec), jax.sharding.reshard its operands, or make the axes "
        "Auto: axis_types=jax.sharding.AxisType.Auto for each when the mesh is made"
    )


def spmd_vmap_over_compiler_axis(axes: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"A vmap with spmd_axis_name={as_set(axes)} is around an xmapped function, but compiler_axes leaves "
        f"{as_set(axes)} to the compiler. Leave spmd_axis_name out: the compiler shards the mapped dimension itself"
    )


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
        f"Detected disallowed xmap axis name shadowing at {where} (shadowed axes: {quoted(sorted(names, key=str))}). "
        "Rename the axes of the inner xmap"
    )


def unbound_name(original: str, names: Mapping[Hashable, int], mesh_axes: Iterable[Any] = ()) -> NameError:
    scope = ", ".join(f"{name}: {size}" for name, size in names.items()) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    unbound = original.partition("unbound axis name:")[2].partition(". To fix this")[0].strip()
    meant = did_you_mean([unbound], names)
    if unbound in map(str, mesh_axes):
        meant = f". `{unbound}` is an axis of the mesh: name the axis that axis_resources assign to it"
    advice = "Name one of them, or add the axis to in_axes or axis_sizes" if names else "Call it in a function for xmap"
    return NameError(f"Found an unbound axis name: {unbound}. Named axes in scope: {scope}. {advice}{meant}")


def tangent_varies_more(extra: Iterable[Hashable], where: str) -> TypeError:
    return TypeError(
        f"The custom_jvp rule used at {where} returns a tangent that varies over {quoted(extra)} for an output that "
        "does not. Reduce the tangent over these axes in the rule (e.g. with lax.psum), or name them in out_axes of "
        "every result"
    )


def unsupported_primitive(primitive: str, names: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"xmap_compat does not know how to partition the operation `{primitive}` that uses the named axes "
        f"{quoted(names)} at {where}. Write it with the collectives of jax.lax (psum, all_gather, ppermute, ...), "
        "apply it outside of the xmapped function, or, if it has a batching rule for these axes, leave them without "
        "mesh resources"
    )


def index_out_of_range(what: str, index: int, size: int, where: str) -> ValueError:
    return ValueError(f"{what} at {where} has the index {index}, but the axis has the indices 0 to {size - 1}")


def repeated_permutation_index(kind: str, index: int, where: str) -> ValueError:
    return ValueError(
        f"The permutation of ppermute at {where} has the {kind} index {index} more than once. Each element can be sent "
        "once and received once"
    )


def groups_do_not_cover(primitive: str, groups: Any, size: int, where: str) -> ValueError:
    return ValueError(
        f"axis_index_groups of `{primitive}` at {where} must cover all indices exactly once, 0 to {size - 1}, but they "
        f"are {groups}. Put the indices that are left into groups of their own"
    )


def repeated_collective_axis(primitive: str, names: Sequence[Hashable], where: str) -> ValueError:
    return ValueError(
        f"The collective {primitive} at {where} names an axis more than once: {quoted(names)}. Name each axis once"
    )


def unsupported_groups(primitive: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"axis_index_groups of `{primitive}` at {where} must all have the same size, and the collective must be over a "
        "single named axis. Pad the groups, or split the named axis in two"
    )


def foreign_reference(argument: str = "") -> NotImplementedError:
    return NotImplementedError(
        "An xmapped function cannot read or write a reference (jax.new_ref) that was made outside of it: each element "
        "of its named axes would write there. Pass the value as an argument and return the new one, or make the "
        f"reference inside{argument and f' ({argument} is a reference: pass its value, ref[...])'}"
    )


def ordered_effect(fun: str, devices: int) -> NotImplementedError:
    return NotImplementedError(
        f"The xmapped function {fun} has a callback or print with ordered=True, which JAX runs on one device, but its "
        f"axis_resources compute it on {devices}. Write ordered=False, or call it without resources of a mesh"
    )


def shard_map_inside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The shard_map at {where} cannot be evaluated inside an xmapped function whose axes have mesh resources, "
        "or if it uses named axes of the xmap: all mesh axes are taken. Give the axes of the shard_map to "
        "axis_resources instead"
    )


def einsum_skipped_axis(spec: str, axis: Hashable, by: str, operand: str, where: str = "") -> TypeError:
    where = where and f" at {where}"
    return TypeError(
        f"The einsum {spec!r}{where} mentions the named axis `{axis}` in {by} and skips it in {operand}, "
        "which varies over it too. Name the axis in both operands, or reduce it in this one first"
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


def outer_names(names: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"The function uses the axes {quoted(names)} of a transformation around the xmap (such as vmap with an "
        "axis_name), which cannot be reached while its own axes have mesh resources. Make them axes of the xmap"
    )
