"""The messages of the core: one function for each.  Legacy's wording is kept where legacy had the message.

Most functions return an exception for the caller to raise, so that the traceback ends where the mistake was found;
a ``..._text`` is the text of a warning, and a ``..._note`` is a note on an error of JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import JAXTypeError


def quoted(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def as_set(names: Iterable[Any]) -> str:
    return "{" + ", ".join(sorted(repr(name) for name in names)) + "}"


def axes_text(sizes: Mapping[Any, int]) -> str:
    """``x: 4, y: 2``"""
    return ", ".join(f"{name}: {size}" for name, size in sizes.items())


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
    """A sentence for names that differ from known ones only in case or a letter; often empty."""
    spelled = {str(name).lower(): name for name in known}
    close = (difflib.get_close_matches(str(name).lower(), spelled, n=1) for name in names)
    meant = list(dict.fromkeys(spelled[match[0]] for match in close if match))
    return f". Did you mean {quoted(meant)}?" if meant else ""


# Legacy's sentence follows ours where legacy had one: people search for it.
LEGACY = "\nLegacy's words: "
OF_IN_AXES = (
    " Note that xmap in_axes that are non-trivial pytrees should always be wrapped in a tuple representing the "
    "argument list."
)
_FEWER = "Name fewer dimensions, or pass an array that has them"


def _dimensions(count: int) -> str:
    return "one dimension" if count == 1 else f"{count} dimensions"


def _exactly(spec: Any, rank: int, found: int) -> str:
    """Say what a list without an ellipsis requires, and what to do."""
    other = "the other" if found == rank + 1 else "the others"
    advice = f"Write {show([*spec, ...])} or name {other}" if found > rank else _FEWER
    return f"{show(spec)} names exactly {_dimensions(rank)}. {advice}"


def _result(path: str) -> str:
    return "The result" if path == "result" else path


def should_be(what: str, wanted: str, got: Any, error: type[Exception] = TypeError, advice: str = "") -> Exception:
    """The error for an argument of the wrong kind."""
    return error(
        f"{what} should be {wanted}, but got {repr(got) if got is ... else show(got)}{advice and '. '}{advice}"
    )


# ------------------------------------------------------------- axis specifications


def bad_spec(where: str, spec: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is {show(spec)}, which is not an axis specification{_spec_meant(spec)}"
        f"{LEGACY}Value mapping specification in xmap {where} pytree can be either:\n"
        "- lists of axis names (possibly ending with the ellipsis object: ...)\n"
        "- dictionaries that map positional axes (integers) to axis names (e.g. {2: 'name'})\n"
        f"but got: {show(spec)}"
    )


def _spec_meant(spec: Any) -> str:
    """What to write instead of an invalid specification, if that can be guessed."""
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


def misplaced_ellipsis(spec: Any, path: str) -> ValueError:
    return ValueError(
        f"{path} is {show(spec)}, but an ellipsis can only end a list of axis names. Use a dictionary to name "
        "dimensions that are not leading, e.g. {0: 'i', 2: 'j'}"
    )


def bad_axis_name(where: str, name: Any, path: str, spec: Any) -> TypeError:
    reason, remedy = "it must be hashable, and neither None nor an ellipsis", "Use a string instead"
    if isinstance(name, str):
        reason, remedy = f"`{name!r}` is a string", "Write `...`"
    if isinstance(name, tuple):
        reason = "JAX reads a tuple as several names"
    if isinstance(name, (bool, np.bool_)):
        reason = "JAX reads a truth value as the position 0 or 1"
    if isinstance(name, (list, dict)) and isinstance(spec, tuple) and spec[-1] is ...:
        remedy = "A tuple that ends in ... is one specification: for an argument without names write [...] or {}"
    seen = f"{path} is {show(spec)}, but" if spec is not None else f"In {where},"
    return TypeError(f"{seen} {show(name)} cannot be used as an axis name: {reason}. {remedy}")


def partition_spec(where: str, name: Any, path: str, spec: Any) -> TypeError:
    seen = f"{path} is {show(spec)}" if spec is not None else f"{where} has the name {name!r}"
    return TypeError(
        f"{seen}, but a PartitionSpec has a meaning in jit and shard_map only. Name the dimensions of an array with a "
        "list, e.g. ['i', ...]"
    )


def negative_axis(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"{path} is {show(spec)}, but a position cannot be negative. Count from the first dimension"
        f"{LEGACY}xmap doesn't support negative axes in {where}"
    )


def repeated_name(where: str, spec: Any, path: str) -> ValueError:
    diagonal = ". For a diagonal, call jnp.diagonal first" if where == "in_axes" else ""
    return ValueError(
        f"{path} is {show(spec)}, which repeats a name. Give each dimension its own name{diagonal}"
        f"{LEGACY}Named axes should be unique within each {where} argument specification, but one them is: {show(spec)}"
    )


def no_results() -> ValueError:
    return ValueError(
        "The xmapped function has no results. Return at least one array, and name its dimensions in out_axes"
        f"{LEGACY}xmapped functions cannot have no return values"
    )


def not_a_prefix(
    where: str, specs: Any, tree: Any, parting: tuple[str, str, str] | None, argument: str = ""
) -> ValueError:
    """``parting``: where the two trees differ first, what the specification has there, and what the value has.

    ``argument``: the one argument of ``global_array`` that the specification is for, if it is not one of xmap's.
    """
    place, asked, found = parting or (argument or "The value", show(specs), str(tree))
    advice = " Write {} for what is not mapped." if asked == "None" else ""
    if where == "in_axes" and place == "args" and asked.startswith(found[: found.rfind(" ")]):
        advice = " Call it with as many arguments as in_axes has entries."
    ours = f"{_result(place)} is {found}, but {where} has {asked} for it.{advice}"
    if argument:
        return ValueError(f"{ours} (The {where} of global_array is {show(specs)}.)")
    return ValueError(
        f"{ours}{LEGACY}xmap {where} specification must be a tree prefix of the corresponding value, got specification "
        f"{show(specs)} for value tree {tree}.{OF_IN_AXES if where == 'in_axes' else ''}"
    )


def argument_rank_too_small(spec: Any, needed: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{path} has shape {tuple(shape)}, but {show(spec)} needs at least {_dimensions(needed)}. {_FEWER}"
        f"{LEGACY}One of xmap arguments has an in_axes specification of {show(spec)}, which implies that it has at "
        f"least {needed} dimensions, but the argument has rank {len(shape)}"
    )


def scalar_argument_mapped(spec: Any, needed: int, path: str) -> TypeError:
    return TypeError(
        f"{path} is a Python scalar, but {show(spec)} needs at least {_dimensions(needed)}. Pass an array with a "
        f"dimension for each name{' (a list of numbers is a pytree of scalars)' if path.count('[') > 1 else ''}"
    )


def argument_rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{path} has shape {tuple(shape)}, but {_exactly(spec, rank, len(shape))}"
        f"{LEGACY}xmap argument has an in_axes specification of {show(spec)}, which asserts that it should be of rank "
        f"{rank}, but the argument has rank {len(shape)} (and shape {tuple(shape)})"
    )


def output_rank_too_small(spec: Any, needed: int, path: str, ndim: int) -> ValueError:
    return ValueError(
        f"{_result(path)} has {_dimensions(ndim)} without its named axes, but its out_axes {show(spec)} need at least "
        f"{needed}. Put the named axes at lower positions"
        f"{LEGACY}One of xmap outputs has an out_axes specification of {show(spec)}, which requires the result of the "
        f"xmapped function to have at least {needed} positional dimensions, but it only has {ndim}"
    )


def output_rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{_result(path)} has shape {tuple(shape)}, named axes included, but {_exactly(spec, rank, len(shape))}"
        f"{LEGACY}xmap output has an out_axes specification of {show(spec)}, which asserts that it should be of rank "
        f"{rank}, but the output has rank {len(shape)} (and shape {tuple(shape)})"
    )


# ------------------------------------------------------------------------ sizes


def size_conflict(
    name: Hashable, known: int, origin: str, shape: Sequence[int], spec: Any, dim: int, path: str, is_for_all: bool
) -> ValueError:
    advice = "If these are different axes, give them different names"
    if is_for_all:
        advice = "One in_axes is for all arguments. To tell them apart, write a tuple, with {} for what is not mapped"
    return ValueError(
        f"Axis `{name}` has size {known} in {origin}, but size {shape[dim]} in {path}. {advice}"
        f"{LEGACY}The size of axis {name} was previously inferred to be {known}, but found an argument of shape "
        f"{tuple(shape)} with in_axes specification {show(spec)}. Shape mismatch occurs in dimension {dim}: "
        f"{shape[dim]} != {known}"
    )


def size_not_inferred(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"Failed to infer size of axes: {', '.join(map(str, names))}. You've probably passed in empty containers in "
        "place of arguments that had those axes in their in_axes. Provide the sizes of missing axes explicitly via "
        "axis_sizes to fix this error."
    )


def no_arguments(fun: str, names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"Failed to infer size of axes: {', '.join(map(str, names))}. There are no arguments. Call {fun} with its "
        "arguments; its plan also takes jax.ShapeDtypeStruct(shape, dtype)"
    )


def not_divisible(name: Hashable, size: int, resources: Sequence[Any], total: int) -> ValueError:
    return ValueError(
        f"Size of axis {name} ({size}) is not divisible by the total number of resources assigned to this axis "
        f"({tuple(resources)}, {total} in total). Pad the axis to a multiple of {total}, or give it other resources"
    )


def sharded_axis_note(name: Hashable, mesh_axes: Any) -> str:
    return (
        f"The type of an argument shards the named axis `{name}` over {mesh_axes!r}, but axis_resources assign no mesh "
        f"axis to `{name}`. Assign {mesh_axes!r} to it, or jax.sharding.reshard the argument"
    )


def committed_elsewhere_note() -> str:
    return (
        "xmap moves an array that is committed to one device to the mesh only in a direct call. Under jax.grad, "
        "jax.jit and the like, or if the array lies on another mesh, move it first: "
        "jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
    )


def note_once(error: BaseException, note: str) -> None:
    """Add a note once to an error of JAX or of the user, which may pass several functions that would add it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# --------------------------------------------------------------------- resources


def bad_resource(name: Hashable, resource: Any) -> Exception:
    wanted = "names of mesh axes or of serial loops, or SerialLoop(length)"
    advice = "Write a tuple of several resources, and () for none"
    if isinstance(resource, (jax.Device, jax.sharding.Mesh)):
        advice = f"Enter `with mesh(devices, ('x',)):` around the call, and write axis_resources={{{name!r}: 'x'}}"
    return should_be(f"The resources of axis {name}", wanted, resource, advice=advice)


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


def unknown_axes(unknown: Mapping[Hashable, Sequence[Any]], known: Sequence[Hashable]) -> ValueError:
    """``unknown``: axes that the call does not have, and the resources that they are given."""
    turned = {r: name for name, entries in unknown.items() for r in entries if r in known}
    meant = f". Did you mean the other way round, {turned}?" if turned else did_you_mean(unknown, known)
    return ValueError(
        f"axis_resources has entries for {quoted(unknown)}, which neither in_axes nor axis_sizes name: the axes of "
        f"this xmap are {quoted(known) or 'none'}{meant or '. Name one of these, or leave the entry out'}"
        f"{LEGACY}All axes that were assigned resources have to appear in in_axes or axis_sizes, but the following are "
        f"missing: {as_set(unknown)}"
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
        f"The function refers to `{name}` at {where}, but axis_resources assign a serial loop to `{name}`. Remove the "
        f"loop, or the collective{LEGACY}Named axes with loop resources assigned to them cannot be referenced inside "
        f"the xmapped computation (e.g. in collectives), but `{name}` violates that rule"
    )


def integer_in_collective(primitive: str, axis: int, where: str) -> NameError:
    return NameError(
        f"{primitive} at {where} got {axis} for an axis name. Collectives read an integer as a position (dimension), "
        f"and {primitive} takes names only. Name the axis by a string"
    )


def mesh_changed() -> RuntimeError:
    return RuntimeError(
        "Changing the physical mesh is not allowed inside xmap. Enter the mesh around the outermost xmapped call"
    )


def lowered_for_others(axes: Sequence[Any], sizes: Sequence[int], devices: int) -> ValueError:
    return ValueError(
        f"An xmap over the abstract mesh ({axes_text(dict(zip(axes, sizes)))}) of {math.prod(sizes)} devices is "
        f"lowered for {devices}. Give the arguments shardings over that mesh, on arrays or types: jax.ShapeDtypeStruct("
        "shape, dtype, sharding=NamedSharding(mesh, spec)), and call trace(*args).lower(lowering_platforms=('cuda',)). "
        "To run it, enter a Mesh of devices"
    )


def unknown_compiler_axes(names: Iterable[Hashable], mesh_axes: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"compiler_axes leaves {as_set(names)} to the compiler, but the mesh in scope at the call has the axes "
        f"{as_set(mesh_axes)}. Name some of these, and enter compiler_axes around calls under that mesh only"
    )


def resource_of_compiler(name: Hashable, mesh_axis: Hashable) -> ValueError:
    return ValueError(
        f"Axis {name} has mesh axis {mesh_axis!r} in its axis_resources, but compiler_axes leaves {mesh_axis!r} to the "
        "compiler at this call. Take it out of axis_resources, or call the xmapped function outside of compiler_axes"
    )


def compiler_axes_changed(outer: Iterable[Hashable], inner: Iterable[Hashable]) -> RuntimeError:
    return RuntimeError(
        f"Changing compiler_axes is not allowed inside xmap: they are {as_set(outer)} around the outer xmapped "
        f"function, and {as_set(inner)} in its body. Enter compiler_axes around the outermost xmapped call"
    )


def axis_given_away(name: Hashable, mesh_axis: Hashable) -> ValueError:
    return ValueError(
        f"Axis {name} of an xmap inside a custom derivative rule is assigned mesh axis {mesh_axis!r}, which the option "
        "experimental_xmap_spmd_lowering has left to the compiler, because the function itself does not use it. Use "
        "xmap_compat.compiler_axes instead of the option, with the other axes of the mesh"
    )


def callback_beside_compiler(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} (at {where}) cannot run in an xmapped function while mesh axes {as_set(axes)} are left to the "
        "compiler: JAX then supports only callbacks that return nothing. Call it outside of compiler_axes (or without "
        "the option experimental_xmap_spmd_lowering), or use jax.debug.callback"
    )


def ordered_callback(axes: Iterable[Hashable], where: str) -> ValueError:
    return ValueError(
        f"An argument of io_callback(..., ordered=True) at {where} varies over {as_set(axes)}, but the elements of a "
        f"named axis have no order. Leave out ordered=True{LEGACY}Cannot `vmap` ordered IO callback"
    )


def callback_not_reached(axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"Not all elements of {as_set(axes)} reach the io_callback at {where}: they take different branches, or leave "
        "a loop earlier. Call it outside of these, and give it the predicate as an argument"
    )


def check_from_outside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The check at {where} is in an xmapped function. Apply checkify inside, and map its error like any result: "
        "xmap(checkify.checkify(fun), in_axes, (['i', ...], out_axes))"
    )


def debugging_without_operands(primitive: str, axes: Iterable[Hashable], where: str) -> NotImplementedError:
    return NotImplementedError(
        f"A {primitive} without a value (at {where}) cannot run in an xmapped function while mesh axes {as_set(axes)} "
        "are left to the compiler: XLA cannot tell on which devices to run it. Give it a value of the body, as in "
        "jax.debug.print('here {}', v), or call the function outside of compiler_axes"
    )


def container_with_shape(where: str, path: str, kind: str, spec: Any) -> TypeError:
    of, it = ("results of", "Return") if where == "out_axes" else ("arguments of", "Pass")
    return TypeError(
        f"{path} is a {kind}, which holds a shape beside its arrays, so {where} {show(spec)} cannot name dimensions of "
        f"it. {it} its arrays (data and indices of a BCOO) as {of} their own, and make the {kind} from them"
    )


def captured_explicit_note(fun: str, captured: Sequence[str]) -> str:
    return (
        f"{fun} captures {' and '.join(captured) or 'an array'}, whose type is sharded over a mesh with Explicit axes. "
        "Pass it to the xmapped function as an argument, with {} in in_axes"
    )


def spmd_vmap(axes: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"A vmap with spmd_axis_name={as_set(axes)} is around an xmapped function with mesh resources. Leave "
        "spmd_axis_name out, or name the mapped dimension in in_axes and give it a mesh axis in axis_resources"
    )


def mesh_of_other_backend(backend: str, platform: str) -> ValueError:
    return ValueError(
        f"xmap was asked for the backend {backend!r}, but the devices of the mesh in scope are of the "
        f"platform {platform!r}. Leave backend out, or enter a mesh of {backend!r} devices"
    )


# ------------------------------------------------------------------ named shapes


def undeclared_output(path: str, spec: Any, extra: Iterable[Hashable]) -> TypeError:
    names = quoted(extra)
    return TypeError(
        f"{_result(path)} varies over {names}, but its out_axes {show(spec)} do not name "
        f"{names}. Add {names} to out_axes, or reduce over {names} in the function{LEGACY}One of xmap results has an "
        f"out_axes specification of {show(spec)}, but is actually mapped along more axes defined by this xmap call: "
        f"{', '.join(map(str, extra))}"
    )


def _resource_conflict(message: str) -> Any:
    """The type that these errors had, without its link to a page of JAX that does not mention them."""
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
        f"{_result(path)} varies over `{present}` and its out_axes add `{name}`, but both axes are mapped to the "
        f"resource `{resource}`. Map one of them to another resource, or reduce over `{present}` in the function"
        f"{LEGACY}One of xmapped function ({fun}) outputs is broadcast along axis `{name}` which is assigned to "
        f"resources `{resource}`, but the output is already partitioned along `{resource}`, because its named shape "
        f"contains `{present}`"
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
        f"are {groups}. Put the remaining indices into groups of their own"
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
        "An xmapped function cannot read or write a reference (jax.new_ref) that was made outside of it: every element "
        "of its named axes would write to it. Pass the value as an argument and return the new one, or make the "
        f"reference inside{argument and f' ({argument} is a reference: pass its value, ref[...])'}"
    )


def ordered_effect(fun: str, devices: int) -> NotImplementedError:
    return NotImplementedError(
        f"The xmapped function {fun} has a callback or print with ordered=True, which JAX runs on one device, but its "
        f"axis_resources compute it on {devices}. Write ordered=False, or call it without resources of a mesh"
    )


def shard_map_inside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The shard_map at {where} cannot be evaluated inside an xmapped function: the xmap already uses the mesh, or "
        "the shard_map uses named axes of the xmap. Name the axes of the shard_map in xmap, and assign their mesh axes "
        "in axis_resources"
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


def mesh_axis_around(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"The xmap is split over mesh axes {as_set(names)}, but a transformation around it (such as vmap with an "
        "axis_name) has axes of the same names, which JAX would take for those of the mesh. Rename one of them"
    )
