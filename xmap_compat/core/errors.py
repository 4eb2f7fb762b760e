"""One function per message.  Legacy's wording is kept where legacy had the message.

Every function returns an exception for the caller to raise, so that the
traceback ends where the mistake was found.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
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


def _did_you_mean(names: Iterable[Any], known: Iterable[Any]) -> str:
    """A sentence for names that are almost written as known ones, but for case or a letter; often empty."""
    spelled = {str(name).lower(): name for name in known}
    close = (difflib.get_close_matches(str(name).lower(), spelled, n=1) for name in names)
    meant = list(dict.fromkeys(spelled[match[0]] for match in close if match))
    return f". Did you mean {_names(meant)}?" if meant else ""


def _ranked(shape: Sequence[int]) -> str:
    return f"rank {len(shape)} (and shape {tuple(shape)})"


# ------------------------------------------------------------- axis specifications


def not_callable(fun: Any) -> TypeError:
    advice = ". As a decorator, write @xmap(in_axes=..., out_axes=...)" if isinstance(fun, (list, tuple, dict)) else ""
    return TypeError(
        f"xmap expects a callable as its first argument, but got {show(fun)} of type {type(fun).__name__}{advice}"
    )


def missing_specs(names: Sequence[str]) -> TypeError:
    return TypeError(
        f"xmap() is missing {' and '.join(names)}. They name the dimensions of the arguments and of the results: "
        "write xmap(fun, ['batch', ...], ['batch', ...]), or, as a decorator, "
        "@xmap(in_axes=['batch', ...], out_axes=['batch', ...])"
    )


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
    return TypeError(
        f"The arguments of xmapped functions are arrays, scalars, or pytrees of them, but {path} is {_found(value)}. "
        "What is static is not an argument of the xmapped function: bind it with functools.partial before xmap"
    )


def _found(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return f"an array of dtype {dtype}" if dtype is not None else f"{value!r} of type {type(value).__name__}"


def no_array_for_step(path: str, value: Any) -> TypeError:
    return TypeError(
        f"The arguments of a step are arrays, their types, scalars, or pytrees of them, but {path} is {_found(value)}. "
        "Bind what is static with functools.partial"
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


def names_missing_from_inputs(names: Sequence[Hashable], known: Iterable[Hashable]) -> ValueError:
    return ValueError(
        "All axis names appearing in out_axes must also appear in in_axes or axis_sizes, but the following are "
        f"missing: {_set(names)}"
        f"{_did_you_mean(names, known) or '. Give an axis that no argument has its size in axis_sizes'}"
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


def bad_size(name: Any, size: Any) -> TypeError:
    return TypeError(f"axis_sizes should map axis names to integers, but the size of axis {name} is {size!r}")


def negative_size(name: Any, size: Any) -> ValueError:
    return ValueError(f"axis_sizes should not be negative, but the size of axis {name} is {size!r}")


def not_divisible(name: Hashable, size: int, resources: Sequence[Any], total: int) -> ValueError:
    return ValueError(
        f"Size of axis {name} ({size}) is not divisible by the total number of resources assigned to this axis "
        f"({tuple(resources)}, {total} in total). Pad the axis to a multiple of {total}, or give it other resources"
    )


def name_function(error: FloatingPointError, fun: str) -> None:
    """Legacy's sentence before that of JAX, which names a primitive or nothing."""
    kind = "inf" if "(inf)" in str(error) else "nan"
    error.args = (f"invalid value ({kind}) encountered in xmap({fun}): {error}",)


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
    return TypeError(
        "axis_resources should be a dictionary from axis names to resources, such as {'batch': 'x'}, but got "
        f"{value!r}"
    )


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


def missing_resources(
    missing: Sequence[Any], axes: Iterable[Hashable], available: Sequence[Any], has_mesh: bool
) -> ValueError:
    remedy = "Enter a mesh with `with mesh(devices, names):` or a loop"
    if has_mesh:
        remedy = "Assign one of these, give the mesh an axis of that name, or enter a loop"
    return ValueError(
        "In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        f"{_set(missing)} (assigned to {_names(axes)}). Resources in scope: {_set(available)}. {remedy} with "
        "`with serial_loop(name, length):` around the call"
        f"{_did_you_mean(missing, available)}{''.join(map(_loop_meant, missing))}"
    )


def _loop_meant(resource: Any) -> str:
    return f". To compute an axis in {resource} chunks write SerialLoop({resource})" if type(resource) is int else ""


def unused_resources_text(unused: Mapping[Hashable, Sequence[Any]], known: Sequence[Hashable]) -> str:
    """``unused``: axes that the call does not have, and the resources that they are given."""
    turned = {r: name for name, entries in unused.items() for r in entries if r in known}
    meant = f". Is it the other way round, {turned}?" if turned else _did_you_mean(unused, known)
    return (
        "All axes that were assigned resources have to appear in in_axes or axis_sizes, but the following are "
        f"missing: {_set(unused)}. Their axis_resources are ignored{meant}"
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
        f"the names {names!r}. Write the names in one tuple, ('x', 'y'), or reshape the devices"
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


def _in_words(axes: Iterable[Any], sizes: Iterable[int]) -> str:
    return ", ".join(f"{n}: {k}" for n, k in zip(axes, sizes))


def no_devices(caller: str, mesh: Any) -> ValueError:
    return ValueError(
        f"{caller} is to run on the mesh ({_in_words(mesh.axis_names, mesh.axis_sizes)}), which is abstract: it has no "
        "devices. Only plan, search, trace, eval_shape and lower go without. Run it inside `with Mesh(devices, names):`"
    )


def lowered_for_others(axes: Sequence[Any], sizes: Sequence[int], devices: int) -> ValueError:
    return ValueError(
        f"An xmap over the abstract mesh ({_in_words(axes, sizes)}) of {math.prod(sizes)} devices is lowered for "
        f"{devices}. Give the arguments shardings over that mesh, on arrays or types: jax.ShapeDtypeStruct(shape, "
        "dtype, sharding=NamedSharding(mesh, spec)); and call trace(*args).lower(lowering_platforms=('cuda',)). To run "
        "it, enter a Mesh of devices"
    )


def bad_compiler_axis(name: Any) -> TypeError:
    return TypeError(
        f"compiler_axes takes the names of mesh axes, each as an argument: compiler_axes('y', 'z'), but got {name!r}"
    )


def unknown_compiler_axes(names: Iterable[Hashable], mesh_axes: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"compiler_axes leaves mesh axes {_set(names)} to the compiler, but the mesh in scope at the call has the axes "
        f"{_set(mesh_axes)}. Name some of these, and enter compiler_axes around calls under that mesh only"
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
        f"{_set(outer)}, and here {_set(inner)}. Enter compiler_axes around the outermost xmapped call"
    )


def axis_given_away(name: Hashable, mesh_axis: Hashable) -> ValueError:
    return ValueError(
        f"Axis {name} of an xmap inside of a custom derivative rule is assigned mesh axis {mesh_axis!r}, which the "
        "option experimental_xmap_spmd_lowering has left to the compiler, as the function itself does not use it. Use "
        "xmap_compat.compiler_axes in the place of the option, with the other axes of the mesh"
    )


def callback_beside_compiler(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} (at {where}) cannot run in an xmapped function while mesh axes {_set(axes)} are left to the "
        "compiler: JAX allows callbacks there that return nothing only. Call it outside of compiler_axes (or without "
        "the option experimental_xmap_spmd_lowering), or use jax.debug.callback"
    )


def ordered_callback(axes: Iterable[Hashable], where: str) -> ValueError:
    return ValueError(
        f"Cannot `vmap` ordered IO callback: what io_callback(..., ordered=True) (at {where}) is given varies over "
        f"{_set(axes)}, and the elements of a named axis have no order. Leave ordered=True out"
    )


def debugging_without_operands(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} without a value (at {where}) cannot run in an xmapped function while mesh axes {_set(axes)} "
        "are left to the compiler: XLA does not know on which devices. Give it a value of the body, as in "
        "jax.debug.print('here {}', v), or call the function outside of compiler_axes"
    )


def explicit_compiler_axes_note(axes: Iterable[Hashable]) -> str:
    """A note for an error of JAX."""
    return (
        f"Mesh axes {_set(axes)} are left to the compiler and have the type Explicit, so that JAX must know from types "
        "how each value lies over them. Where it cannot, give the operation in the body its "
        "out_sharding=jax.sharding.NamedSharding(mesh, spec), jax.sharding.reshard its operands, or make the axes "
        "Auto: axis_types=jax.sharding.AxisType.Auto for each when the mesh is made"
    )


def spmd_vmap_over_compiler_axis(axes: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"A vmap with spmd_axis_name={_set(axes)} is around an xmapped function, but compiler_axes leaves "
        f"{_set(axes)} to the compiler. Leave spmd_axis_name out: the compiler shards the mapped dimension itself"
    )


def spmd_vmap_of_old_jax(axes: Iterable[Hashable], release: str) -> NotImplementedError:
    return NotImplementedError(
        f"A vmap with spmd_axis_name={_set(axes)} is around an xmapped function with mesh resources, which needs jax "
        f"0.10, but found jax {release}. Upgrade it, or leave spmd_axis_name out"
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


def unbound_name(original: str, names: Mapping[Hashable, int], mesh_axes: Iterable[Any] = ()) -> NameError:
    scope = ", ".join(f"{name}: {size}" for name, size in names.items()) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    unbound = original.partition("unbound axis name:")[2].partition(" To fix this")[0].strip().rstrip(".")
    meant = _did_you_mean([unbound], names)
    if unbound in map(str, mesh_axes):
        meant = f". `{unbound}` is an axis of the mesh: name the axis that axis_resources assign to it"
    advice = "Name one of them, or add the axis to in_axes or axis_sizes" if names else "Call it in a function for xmap"
    return NameError(f"Found an unbound axis name: {unbound}. Named axes in scope: {scope}. {advice}{meant}")


def tangent_varies_more(extra: Iterable[Hashable], where: str) -> TypeError:
    return TypeError(
        f"The custom_jvp rule used at {where} returns a tangent that varies over {_names(extra)} for an output that "
        "does not. Reduce the tangent over these axes in the rule (e.g. with lax.psum), or name them in out_axes of "
        "every result"
    )


def part_is_off_text(part: str, missing: str, error: Exception) -> str:
    return (
        f"This JAX has changed something private that xmap_compat's part `{part}` needs ({error}). The part is off: "
        f"{missing}. Results are the same. Upgrade xmap_compat, or set XMAP_COMPAT_PUBLIC=1 to turn all such parts off"
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
    names = [str(axis) for axis in scope if not hasattr(axis, "mesh_axis")]
    listed = ", ".join(names) or "none"
    return NameError(
        f"Found an unbound axis name: {name} in the einsum {spec!r}. Named axes in scope: {listed}. "
        f"Name one of them, or add the axis to in_axes or axis_sizes{_did_you_mean([name], names)}"
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


def no_function(usage: str, found: Any) -> TypeError:
    return TypeError(f"{usage} takes the function first, but got {found!r} of type {type(found).__name__}")


def bad_named_shape(sizes: Any) -> TypeError:
    return TypeError(f"A named shape has integers for sizes, as in NamedShape(2, batch=8), but got {sizes!r}")


def mixed_axes(fun: str, axis: Any) -> TypeError:
    return TypeError(f"{fun} takes one named axis, or one positional axis, but got axis={axis!r}")


def bad_weights(weights: Sequence[int], shape: Sequence[int], positions: Sequence[int]) -> ValueError:
    return ValueError(
        f"average got weights of the positional shape {tuple(weights)} for an array of the positional shape "
        f"{tuple(shape)}. Give them that shape, or {tuple(shape[p] for p in positions)}: the sizes of the positional "
        "axes to average over"
    )


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


def vectorized_and_vmap_method(vectorized: Any, vmap_method: Any) -> ValueError:
    return ValueError(
        f"jax.pure_callback got vectorized={vectorized!r} and vmap_method={vmap_method!r}, which both say how the "
        "callback is mapped. Give one of them: vmap_method, or vectorized as old programs do"
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


# ----------------------------------------------------------------------- several processes


def process_list(processes: Sequence[int]) -> str:
    """``process 3``, ``processes 0, 2``."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def verb(processes: Sequence[int], word: str) -> str:
    """``calls`` of one, ``call`` of several."""
    return word if len(processes) > 1 else f"{word}s"


_SAME_CALLS = "All processes of a mesh must make the same calls of xmapped functions, in the same order."


def processes_differ(differences: Sequence[str], me: int, fun: str, place: str) -> RuntimeError:
    return RuntimeError(
        f"The processes of this mesh call different programs: {'; '.join(differences)}. (This is process {me}, which "
        f"calls `{fun}` at {place}; each of them has this error.) {_SAME_CALLS}"
    )


def processes_missing(
    missing: Sequence[int], me: int, seconds: float, waiting_at: str, place: str, alone: Sequence[str]
) -> RuntimeError:
    late = f" This process came later, to {place}." if me in missing else ""
    instead = f" Without the mesh, {'; '.join(alone)}." if alone else ""
    return RuntimeError(
        f"{process_list(missing).capitalize()} did not arrive within {seconds:g} s: the others wait at {waiting_at}."
        f"{late}{instead} {_SAME_CALLS} If one only needs more time, allow it on every process: "
        "xmap_compat.compare_processes(timeout=600), or None for no comparison."
    )


def processes_late_text(missing: Sequence[int], waited: float, left: float, place: str) -> str:
    return (
        f"{process_list(missing).capitalize()} did not arrive within {waited:.3g} s at the call that is traced at "
        f"{place}. It is waited for {left:.3g} s more. What calls an xmapped function must be traced by all processes"
    )


def nothing_to_compare_by_text() -> str:
    return (
        "The mesh has devices of several processes, but this process has no client of jax.distributed that "
        "xmap_compat knows: what the processes call is not compared. Call jax.distributed.initialize() first; "
        "xmap_compat.compare_processes(None) turns the comparison off, and this warning"
    )


def bad_timeout(where: str, off: str, timeout: Any) -> ValueError:
    return ValueError(
        f"{where} should be a positive number of seconds, or {off} for no comparison, but got {timeout!r}"
    )


def no_part_here(path: str, process: int) -> ValueError:
    return ValueError(
        f"{path} has no part on devices of process {process}: ask for it in the processes of its mesh only"
    )


def parts_are_no_block(path: str, sharding: Any) -> ValueError:
    return ValueError(
        f"What this process has of {path} ({sharding}) is no block of rows and columns. Take the parts one by one, "
        "from array.addressable_shards, or the whole array on every process: process_array(array, whole=True)"
    )


def no_mesh_to_gather_over(path: str, sharding: Any) -> ValueError:
    return ValueError(
        f"process_array(whole=True) gathers arrays that lie on a mesh, but {path} has {sharding}. Put it on one first: "
        "jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, PartitionSpec()))(array) is whole "
        "everywhere"
    )


# ------------------------------------------------------------------------------ search


def search_without_mesh() -> ValueError:
    return ValueError(
        "search needs a mesh to assign axes to, but there is none in scope. Pass mesh=Mesh(devices, names), or search "
        "inside `with Mesh(devices, names):`"
    )


def bad_search_argument(name: str, value: Any, wanted: str, tool: str = "search") -> TypeError:
    return TypeError(f"{tool}: the argument {name} should be {wanted}, but got {value!r}")


def hosts_unknown(mesh: Any) -> ValueError:
    return ValueError(
        f"The mesh ({_in_words(mesh.axis_names, mesh.axis_sizes)}) is abstract: it does not say which devices share a "
        "host, and transfers between hosts are slower. Say how many: Hardware.of('H100', per_host=8), or "
        "Hardware(..., per_host=8); or give a link for each mesh axis: links={'x': Link(...)}"
    )


def hosts_do_not_divide(per_host: Any, mesh: Any, axis: Any = None) -> ValueError:
    wrong = f": the mesh axis {axis!r} has {mesh.shape[axis]}" if axis in mesh.shape else ""
    wrong = f": there is no mesh axis {axis!r}" if not (wrong or axis is None) else wrong
    return ValueError(
        f"per_host={per_host!r} does not divide the mesh ({_in_words(mesh.shape, mesh.shape.values())}){wrong}. Give a "
        "number of devices that the last mesh axes make up, or a divisor for each axis: per_host={'y': 8}"
    )


def unknown_hardware(name: str, published: Sequence[str], names: Iterable[str]) -> ValueError:
    return ValueError(
        f"Hardware.of knows no figures of {name!r}, only of {', '.join(published)}{_did_you_mean([name], names)}. For "
        "others write Hardware(name, Rates(...), Link(...)), or measure: Hardware.measure(mesh)"
    )


def not_a_step(step: Any) -> TypeError:
    return TypeError(
        "search: make(axis_resources) should return the step, a function of the arguments that follow, but it returned "
        f"{step!r}. Write make = lambda axis_resources: step"
    )


def made_by_search(axis_resources: Mapping[Hashable, Any]) -> str:
    """A note on whatever the user's function raises."""
    return f"search called make({dict(axis_resources)!r}): make takes axis_resources, and returns the step"


def unknown_fixed_axes(unknown: Sequence[Hashable], known: Sequence[Hashable]) -> ValueError:
    return ValueError(
        f"search: fixed has resources for axes {_set(unknown)}, but the xmapped functions of the step have the axes "
        f"{_set(known)}. Name these only{_did_you_mean(unknown, known)}"
    )


def ignored_resources(got: Mapping[Hashable, Any]) -> str:
    each = ", ".join(f"{name} the resources {axes}" for name, axes in got.items())
    return (
        f"the step that make(axis_resources) returned gave axis {each} instead. Let it pass axis_resources on to xmap, "
        "or pin the axis by fixed="
    )


def not_compiled(error: Exception) -> str:
    return f"it cannot be compiled or run: {type(error).__name__}: {error}"


def unpriced_step() -> ValueError:
    return ValueError(
        "search found no call of an xmapped function in the step, so there are no named axes to assign. Let "
        "make(axis_resources) return a function that calls xmap(..., axis_resources=axis_resources)"
    )


def too_many_candidates(count: int, limit: int, choices: Mapping[Any, int]) -> ValueError:
    each = ", ".join(f"{n} for {name}" for name, n in choices.items())
    return ValueError(
        f"There are {count} assignments to price ({each}), more than limit={limit}. Pin some axes, for example "
        f"fixed={{{next(iter(choices))!r}: ()}}, or raise the limit"
    )


def nothing_found(reasons: Sequence[str | None]) -> ValueError:
    kinds = "; ".join(dict.fromkeys(filter(None, reasons)))
    return ValueError(f"No assignment can be used. Reasons: {kinds or 'there is none to try'}")


def too_much_memory(needed: str, given: str) -> str:
    return f"it needs about {needed} on each device, more than memory, {given}"
