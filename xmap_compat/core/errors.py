"""Messages that several modules raise, and what all messages are made of; the others stand below
what raises them.

Each function returns an exception for the caller to raise, so that the traceback ends where the
mistake was found. Legacy's sentence is kept where legacy had the message.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

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
        inside = ", ".join(map(show, spec)) + (
            "," if type(spec) is tuple and len(spec) == 1 else ""
        )
        return f"[{inside}]" if type(spec) is list else f"({inside})"
    if type(spec) is dict:
        return "{" + ", ".join(f"{key!r}: {show(value)}" for key, value in spec.items()) + "}"
    fields = getattr(type(spec), "__match_args__", ())
    if fields and (isinstance(spec, tuple) or dataclasses.is_dataclass(spec)):
        return (
            f"{type(spec).__name__}({', '.join(f'{k}={show(getattr(spec, k))}' for k in fields)})"
        )
    return repr(spec)


def did_you_mean(names: Iterable[Any], known: Iterable[Any]) -> str:
    """A sentence for names that differ from known ones only in case or a letter; often empty."""
    spelled = {str(name).lower(): name for name in known}
    close = (difflib.get_close_matches(str(name).lower(), spelled, n=1) for name in names)
    meant = list(dict.fromkeys(spelled[match[0]] for match in close if match))
    return f". Did you mean {quoted(meant)}?" if meant else ""


# Legacy's sentence follows ours where legacy had one: people search for it.
LEGACY = "\nLegacy's words: "


def subject(path: str) -> str:
    return "The result" if path == "result" else path


def should_be(
    what: str, wanted: str, got: Any, error: type[Exception] = TypeError, advice: str = ""
) -> Exception:
    """The error for an argument of the wrong kind."""
    return error(
        f"{what} should be {wanted}, but got {repr(got) if got is ... else show(got)}{advice and '. '}{advice}"
    )


# ------------------------------------------------------------- axis specifications


def no_results() -> ValueError:
    return ValueError(
        "The xmapped function has no results. Return at least one array, and name its dimensions in out_axes"
        f"{LEGACY}xmapped functions cannot have no return values"
    )


# ------------------------------------------------------------------------ sizes


def not_divisible(
    name: Hashable, size: int, resources: Sequence[Any], total: int, origin: str
) -> ValueError:
    return ValueError(
        f"{origin} has {size} elements along `{name}`, but the resources {tuple(resources)} need a multiple of {total}"
        f". Pad the axis to {-(-size // total) * total}, or give it other resources"
        f"{LEGACY}Size of axis {name} ({size}) is not divisible by the total number of resources assigned to this axis"
        f" ({tuple(resources)}, {total} in total)"
    )


def note_once(error: BaseException, note: str) -> None:
    """Add a note once to an error of JAX or of the user, which may pass several functions that
    would add it.
    """
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
    return (
        f". To compute an axis in {resource} chunks write SerialLoop({resource})"
        if type(resource) is int
        else ""
    )


def loop_name_taken(name: Hashable) -> ValueError:
    return ValueError(
        f"serial_loop cannot have the name {name!r}, which a mesh axis or a loop in scope has. Give it another name"
        f"{LEGACY}Cannot extend the resource environment with loop named `{name}`. An axis of this name is already "
        "defined!"
    )


def mesh_shadows_loops(names: Iterable[Hashable]) -> ValueError:
    return ValueError(
        f"The mesh has axes {quoted(names)}, as have serial loops in scope. Give the loop or the mesh axis another name"
        f"{LEGACY}Cannot update the mesh of the current resource environment. The new mesh shadows already defined "
        f"axes {quoted(names)}"
    )


def check_from_outside(fun: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The check at {where} is in the xmapped function {fun}. Apply checkify inside, and map its error like any "
        "result: xmap(checkify.checkify(fun), in_axes, (['i', ...], out_axes))"
    )


def token(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} is a token, but effects in an xmapped function have no order. Leave it out"
    )


# ------------------------------------------------------------------ named shapes


def resource_conflict(message: str) -> Any:
    """The type that these errors had, without its link to a page of JAX that does not mention
    them.
    """
    error = JAXTypeError(message)
    error.args = (message,)
    return error


def unbound_name(
    original: str,
    names: Mapping[Hashable, int],
    mesh_axes: Iterable[Any] = (),
    where: str = "",
    advice: str = "",
) -> NameError:
    scope = ", ".join(f"{name}: {size}" for name, size in names.items()) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    unbound = original.partition("unbound axis name:")[2].partition(". To fix this")[0].strip()
    meant = did_you_mean([unbound], names)
    if unbound in map(str, mesh_axes):
        meant = (
            f". `{unbound}` is an axis of the mesh: name the axis that axis_resources assign to it"
        )
    if not advice and names:
        advice = "Name one of them, or add the axis to in_axes or axis_sizes"
    advice = advice or "Call it in a function for xmap"
    return NameError(
        f"Found an unbound axis name: {unbound}{where}. Named axes in scope: {scope}. {advice}{meant}"
    )


def outer_names(names: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"The function uses the axes {quoted(names)} of a transformation around the xmap (such as vmap with an "
        "axis_name), which cannot be reached while its own axes have mesh resources. Make them axes of the xmap"
    )


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


def einsum_skipped_axis(
    spec: str, axis: Hashable, by: str, operand: str, where: str = ""
) -> TypeError:
    where = where and f" at {where}"
    return TypeError(
        f"The einsum {spec!r}{where} mentions the named axis `{axis}` in {by} and skips it in {operand}, "
        "which varies over it too. Name the axis in both operands, or reduce it in this one first"
    )
