"""The messages of the core: one function for each.  Legacy's wording is kept where legacy had the message.

Most functions return an exception for the caller to raise, so that the traceback ends where the mistake was found;
a ``..._text`` is the text of a warning, and a ``..._note`` is a note on an error of JAX.
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
_PARTITION_SPEC = "a PartitionSpec has a meaning in jit and shard_map only"
_FEWER = "Name fewer dimensions, or pass an array that has them"


def _dimensions(count: int) -> str:
    return "one dimension" if count == 1 else f"{count} dimensions"


def _exactly(spec: Any, rank: int, found: int) -> str:
    """Say what a list without an ellipsis requires, and what to do."""
    other = "the other" if found == rank + 1 else "the others"
    advice = f"Write {show([*spec, ...])} or name {other}" if found > rank else _FEWER
    return f"{_dimensions(rank)}. {advice}"


def subject(path: str) -> str:
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
        f"{LEGACY}Value mapping specification in xmap {where} pytree can be either"
    )


def _spec_meant(spec: Any) -> str:
    """What to write instead of an invalid specification, if that can be guessed."""
    if spec is ... or (isinstance(spec, str) and spec == "..."):
        return ". Write [...] where no dimension is named"
    if isinstance(spec, str):
        return f". Write [{spec!r}, ...] for the leading dimension"
    if isinstance(spec, jax.sharding.PartitionSpec):
        return f": {_PARTITION_SPEC}. Write a list of names, e.g. ['i', ...]"
    if isinstance(spec, (set, frozenset)):
        return ". A set has no order: write a list, or {position: name}"
    if isinstance(spec, (int, np.integer)):
        leading = "['name', ...] or " if spec == 0 else ""
        return f". Write {leading}{{{spec}: 'name'}}, with the name of that dimension"
    if isinstance(spec, dict) and all(isinstance(value, (int, np.integer)) for value in spec.values()):
        return f". Write it the other way round: {show({value: key for key, value in spec.items()})}"
    return ". Write a list of names, or {position: name} with integers for positions"


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
    if isinstance(name, jax.sharding.PartitionSpec):
        reason, remedy = _PARTITION_SPEC, "Name the dimensions of an array with a list, e.g. ['i', ...]"
    if isinstance(name, (bool, np.bool_)):
        reason = "JAX reads a truth value as the position 0 or 1"
    if isinstance(name, (list, dict)) and isinstance(spec, tuple) and spec[-1] is ...:
        remedy = "A tuple that ends in ... is one specification: for an argument without names write [...] or {}"
    seen = f"{path} is {show(spec)}, but" if spec is not None else f"In {where},"
    return TypeError(f"{seen} {show(name)} cannot be used as an axis name: {reason}. {remedy}")


def negative_axis(where: str, spec: Any, path: str) -> ValueError:
    return ValueError(
        f"{path} is {show(spec)}, but a position cannot be negative. Count from the first dimension"
        f"{LEGACY}xmap doesn't support negative axes in {where}"
    )


def repeated_name(where: str, spec: Any, path: str) -> ValueError:
    diagonal = ". For a diagonal, call jnp.diagonal before" if where == "in_axes" else ""
    return ValueError(
        f"{path} is {show(spec)}, which repeats a name. Give each dimension its own name{diagonal}"
        f"{LEGACY}Named axes should be unique within each {where} argument specification"
    )


def no_results() -> ValueError:
    return ValueError(
        "The xmapped function has no results. Return at least one array, and name its dimensions in out_axes"
        f"{LEGACY}xmapped functions cannot have no return values"
    )


def not_a_prefix(
    where: str, specs: Any, parting: tuple[str, str, str, Sequence[Any]], is_of_xmap: bool = True
) -> ValueError:
    """``parting``: where the trees differ first, what spec and value have there, and keys that the spec lacks."""
    place, asked, found, missing = parting
    same = "keys" if asked[:6] == found[:6] == "a dict" else "structure, or one specification for all of it"
    advice = f". Give both the same {same}"
    ours = f"{subject(place)} is {found}, but {where} has {asked} for it"
    if missing:
        keys = ", ".join(f"{key!r}: [...] or {{}}" for key in missing)
        path = where + place.removeprefix("args").removeprefix("result").removeprefix("local")
        ours, advice = f"{path} lacks {', '.join(map(repr, missing))}, which {place} has", f": add {keys}"
    elif (found, place) == ("None", "result"):
        ours, advice = "The function returned None", " (is a `return` missing?), but out_axes have names"
    elif asked == "None":
        advice = ". Write {} for what is not mapped"
    elif where == "in_axes" and place == "args":
        is_tuple = asked.startswith(found[: found.rfind(" ")])
        advice = ". Write in_axes as a tuple, with an entry for each argument"
        advice = ". Call it with as many arguments as in_axes has entries" if is_tuple else advice
    legacy = f"{LEGACY}xmap {where} specification must be a tree prefix of the corresponding value"
    return ValueError(f"{ours}{advice}. The {where} here: {show(specs)}{legacy if is_of_xmap else ''}")


def argument_rank_too_small(spec: Any, needed: int, path: str, shape: Sequence[int]) -> ValueError:
    return ValueError(
        f"{path} has shape {tuple(shape)}, but {show(spec)} needs at least {_dimensions(needed)}. {_FEWER}"
        f"{LEGACY}One of xmap arguments has an in_axes specification of {show(spec)}, which implies that it has at "
        f"least {needed} dimensions"
    )


def scalar_argument_mapped(spec: Any, needed: int, path: str) -> TypeError:
    return TypeError(
        f"{path} is a Python scalar, but {show(spec)} needs at least {_dimensions(needed)}. Pass an array with a "
        f"dimension for each name{' (a list of numbers is a pytree of scalars)' if path.count('[') > 1 else ''}"
    )


def output_rank_too_small(spec: Any, needed: int, path: str, ndim: int) -> ValueError:
    return ValueError(
        f"{subject(path)} has {_dimensions(ndim)} without its named axes, but its out_axes {show(spec)} need at least "
        f"{needed}. Put the named axes at lower positions"
        f"{LEGACY}One of xmap outputs has an out_axes specification of {show(spec)}, which requires the result"
    )


def rank_differs(spec: Any, rank: int, path: str, shape: Sequence[int], where: str) -> ValueError:
    of, included = ("argument", "") if where == "in_axes" else ("output", ", named axes included")
    return ValueError(
        f"{subject(path)} has shape {tuple(shape)}{included}, but {show(spec)} names exactly "
        f"{_exactly(spec, rank, len(shape))}"
        f"{LEGACY}xmap {of} has an {where} specification of {show(spec)}, which asserts that it"
    )


# ------------------------------------------------------------------------ sizes


def size_conflict(
    name: Hashable, known: int, origin: str, shape: Sequence[int], spec: Any, dim: int, path: str, is_for_all: bool
) -> ValueError:
    advice = "If these are different axes, give them different names. If they are one, pass arrays of one length"
    if is_for_all:
        advice = "One in_axes is for all arguments. To tell them apart, write a tuple, with {} for what is not mapped"
    return ValueError(
        f"Axis `{name}` has size {known} in {origin}, but size {shape[dim]} in {path}, dimension {dim} of its shape "
        f"{tuple(shape)}. {advice}"
        f"{LEGACY}The size of axis {name} was previously inferred to be {known}, but found an argument of shape "
        f"{tuple(shape)} with in_axes specification {show(spec)}. Shape mismatch occurs in dimension {dim}: "
        f"{shape[dim]} != {known}"
    )


def not_divisible(name: Hashable, size: int, resources: Sequence[Any], total: int, origin: str) -> ValueError:
    return ValueError(
        f"{origin} has {size} elements along `{name}`, but the resources {tuple(resources)} need a multiple of {total}"
        f". Pad the axis to {-(-size // total) * total}, or give it other resources"
        f"{LEGACY}Size of axis {name} ({size}) is not divisible by the total number of resources assigned to this axis"
    )


def note_once(error: BaseException, note: str) -> None:
    """Add a note once to an error of JAX or of the user, which may pass several functions that would add it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# --------------------------------------------------------------------- resources


def missing_resources(
    missing: Sequence[Any], axes: Iterable[Hashable], available: Sequence[Any], has_mesh: bool
) -> ValueError:
    ours = (
        f"No mesh is in scope, but axis_resources assign {as_set(missing)} to {quoted(axes)}. Enter one around the "
        "call, `with mesh(devices, names):`, or a loop, `with serial_loop(name, length):`"
    )
    if has_mesh or available:
        ours = (
            f"axis_resources assign {as_set(missing)} to {quoted(axes)}, but the resources in scope are "
            f"{as_set(available)}. Assign one of these, or enter a mesh or a loop of that name around the call"
        )
    return ValueError(
        f"{ours}{did_you_mean(missing, available)}{''.join(map(_loop_meant, missing))}"
        f"{LEGACY}In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        f"{as_set(missing)}"
    )


def _loop_meant(resource: Any) -> str:
    return f". To compute an axis in {resource} chunks write SerialLoop({resource})" if type(resource) is int else ""


def loop_name_taken(name: Hashable) -> ValueError:
    return ValueError(
        f"serial_loop cannot have the name {name!r}, which a mesh axis or a loop in scope has. Give it another name"
        f"{LEGACY}Cannot extend the resource environment with loop axis `{name}`"
    )


def mesh_shadows_loops(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"The mesh has axes {quoted(names)}, as have serial loops in scope. Give the loop or the mesh axis another name"
        f"{LEGACY}Cannot update the mesh of the current resource environment"
    )


def check_from_outside(fun: str, where: str = "") -> NotImplementedError:
    seen = f"The check at {where} is in" if where else "The automatic checks of checkify do not see the elements of"
    return NotImplementedError(
        f"{seen} the xmapped function {fun}. Apply checkify inside, and map its error like any result: "
        "xmap(checkify.checkify(fun), in_axes, (['i', ...], out_axes))"
    )


def token(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} is a token, but effects in an xmapped function have no order. Leave it out")


def container_with_shape(where: str, path: str, kind: str, spec: Any) -> TypeError:
    of, it = ("results of", "Return") if where == "out_axes" else ("arguments of", "Pass")
    return TypeError(
        f"{path} is a {kind}, which holds a shape beside its arrays, so {where} {show(spec)} cannot name dimensions of "
        f"it. {it} its arrays (data and indices of a BCOO) as {of} their own, and make the {kind} from them"
    )


# ------------------------------------------------------------------ named shapes


def resource_conflict(message: str) -> Any:
    """The type that these errors had, without its link to a page of JAX that does not mention them."""
    error = JAXTypeError(message)
    error.args = (message,)
    return error


def unbound_name(
    original: str, names: Mapping[Hashable, int], mesh_axes: Iterable[Any] = (), where: str = ""
) -> NameError:
    scope = ", ".join(f"{name}: {size}" for name, size in names.items()) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    unbound = original.partition("unbound axis name:")[2].partition(". To fix this")[0].strip()
    meant = did_you_mean([unbound], names)
    if unbound in map(str, mesh_axes):
        meant = f". `{unbound}` is an axis of the mesh: name the axis that axis_resources assign to it"
    advice = "Name one of them, or add the axis to in_axes or axis_sizes" if names else "Call it in a function for xmap"
    return NameError(f"Found an unbound axis name: {unbound}{where}. Named axes in scope: {scope}. {advice}{meant}")


def repeated_axis(user: str, names: Sequence[Any]) -> ValueError:
    return ValueError(f"{user} names an axis more than once: {quoted(names)}. Name each axis once")


def reference_from_outside(argument: str = "") -> NotImplementedError:
    return NotImplementedError(
        "An xmapped function cannot read or write a reference (jax.new_ref) that was made outside. Pass its value "
        f"as an argument and return the new one{argument and f' ({argument} is a reference: pass its value, ref[...])'}"
    )


def shard_map_inside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The shard_map at {where} cannot be evaluated inside an xmapped function, which uses the mesh. Name the "
        "axes of the shard_map in xmap, and assign their mesh axes in axis_resources"
    )


def einsum_skipped_axis(spec: str, axis: Hashable, by: str, operand: str, where: str = "") -> TypeError:
    where = where and f" at {where}"
    return TypeError(
        f"The einsum {spec!r}{where} mentions the named axis `{axis}` in {by} and skips it in {operand}, "
        "which varies over it too. Name the axis in both operands, or reduce it in this one first"
    )
