"""Messages that several modules raise, and what all messages are made of; the others stand below
what raises them.

Each function returns an exception for the caller to raise, so that the traceback ends where the
mistake was found. Legacy's sentence is kept where legacy had the message.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.errors import JAXTypeError


def quoted(names: Iterable[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def as_set(names: Iterable[Any]) -> str:
    return "{" + ", ".join(sorted(map(repr, names))) + "}"


def axes_text(sizes: Mapping[Any, int]) -> str:
    """``x: 4, y: 2``"""
    return ", ".join(f"{name}: {size}" for name, size in sizes.items())


def show(spec: Any) -> str:
    """A specification as the user wrote it: ``['i', ...]``, not ``['i', Ellipsis]``."""
    if hasattr(spec, "shape") and hasattr(spec, "dtype"):
        return f"an array of shape {tuple(spec.shape)}"
    return repr(spec).replace("Ellipsis", "...")


def did_you_mean(names: Iterable[Any], known: Iterable[Any]) -> str:
    """A sentence for names that differ from known ones only in case or a letter; often empty."""
    spelled = {str(name).lower(): name for name in known}
    meant: dict[Any, None] = {}
    for name in names:
        for match in difflib.get_close_matches(str(name).lower(), spelled, n=1):
            meant[spelled[match]] = None
    return f". Did you mean {quoted(meant)}?" if meant else ""


def name_of(fun: Callable[..., Any]) -> str:
    """A name for messages: that of the function, or of the function that a partial wraps."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def described(value: Any) -> str:
    if hasattr(value, "dtype") and not isinstance(value, type):
        return f"an array of dtype {value.dtype}"
    return f"{value!r} of type {type(value).__name__}"


# Legacy's sentence follows ours where legacy had one: people search for it.
LEGACY = "\nLegacy's words: "


def subject(path: str) -> str:
    if path == "result":
        return "The result"
    return path


def should_be(
    what: str, wanted: str, got: Any, error: type[Exception] = TypeError, advice: str = ""
) -> Exception:
    """The error for an argument of the wrong kind."""
    if advice:
        advice = f". {advice}"
    shown = repr(got) if got is ... else show(got)
    return error(f"{what} should be {wanted}, but got {shown}{advice}")


# ------------------------------------------------------------- axis specifications


def no_results() -> ValueError:
    ours = (
        "The xmapped function has no results. Return at least one array, and name its dimensions "
        "in out_axes"
    )
    return ValueError(f"{ours}{LEGACY}xmapped functions cannot have no return values")


# ------------------------------------------------------------------------ sizes


def not_divisible(
    name: Hashable, size: int, resources: Sequence[Any], total: int, origin: str
) -> ValueError:
    multiple = -(-size // total) * total
    ours = (
        f"{origin} has {size} elements along `{name}`, but the resources {tuple(resources)} need a "
        f"multiple of {total}. Pad the axis to {multiple}, or give it other resources"
    )
    legacy = (
        f"Size of axis {name} ({size}) is not divisible by the total number of resources assigned "
        f"to this axis ({tuple(resources)}, {total} in total)"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


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
    assigned = as_set(missing)
    ours = (
        f"No mesh is in scope, but axis_resources assign {assigned} to {quoted(axes)}. Enter one "
        "around the call, `with mesh(devices, names):`, or a loop, `with serial_loop(name, "
        "length):`"
    )
    if has_mesh or available:
        ours = (
            f"axis_resources assign {assigned} to {quoted(axes)}, but the resources in scope are "
            f"{as_set(available)}. Assign one of these, or enter a mesh or a loop of that name "
            "around the call"
        )
    meant = did_you_mean(missing, available)
    for resource in missing:
        if type(resource) is int:
            meant += f". To compute an axis in {resource} chunks write SerialLoop({resource})"
    legacy = (
        "In-scope resources are insufficient to execute the xmapped function. The missing "
        f"resources are: {assigned}"
    )
    return ValueError(f"{ours}{meant}{LEGACY}{legacy}")


def loop_name_taken(name: Hashable) -> ValueError:
    ours = (
        f"serial_loop cannot have the name {name!r}, which a mesh axis or a loop in scope has. "
        "Give it another name"
    )
    legacy = (
        f"Cannot extend the resource environment with loop named `{name}`. An axis of this name is "
        "already defined!"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def mesh_shadows_loops(names: Iterable[Hashable]) -> ValueError:
    ours = (
        f"The mesh has axes {quoted(names)}, as have serial loops in scope. "
        "Give the loop or the mesh axis another name"
    )
    legacy = (
        "Cannot update the mesh of the current resource environment. The new mesh shadows already "
        f"defined axes {quoted(names)}"
    )
    return ValueError(f"{ours}{LEGACY}{legacy}")


def check_from_outside(fun: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The check at {where} is in the xmapped function {fun}. Apply checkify inside, and map "
        "its error like any result: xmap(checkify.checkify(fun), in_axes, (['i', ...], out_axes))"
    )


def token(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} is a token, but effects in an xmapped function have no order. Leave it out"
    )


def no_devices(caller: str, mesh: Any) -> ValueError:
    return ValueError(
        f"{caller} is to run on the mesh ({axes_text(mesh.shape)}), which is abstract: it has no "
        "devices. Run it inside `with Mesh(devices, names):`. Without devices you can plan, "
        "search, trace, eval_shape and lower"
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
    scope = axes_text(names) or "none"
    # JAX goes on to advise jax.shard_map, which is no help here.
    _, _, unbound = original.partition("unbound axis name:")
    unbound = unbound.partition(". To fix this")[0].strip()
    meant = did_you_mean([unbound], names)
    if unbound in map(str, mesh_axes):
        meant = (
            f". `{unbound}` is an axis of the mesh: name the axis that axis_resources assign to it"
        )
    if not advice:
        advice = "Call it in a function for xmap"
        if names:
            advice = "Name one of them, or add the axis to in_axes or axis_sizes"
    return NameError(
        f"Found an unbound axis name: {unbound}{where}. Named axes in scope: {scope}. "
        f"{advice}{meant}"
    )


def outer_names(names: Iterable[Hashable]) -> NotImplementedError:
    return NotImplementedError(
        f"The function uses the axes {quoted(names)} of a transformation around the xmap (such as "
        "vmap with an axis_name), which cannot be reached while its own axes have mesh resources. "
        "Make them axes of the xmap"
    )


def repeated_axis(user: str, names: Sequence[Any]) -> ValueError:
    return ValueError(f"{user} names an axis more than once: {quoted(names)}. Name each axis once")


def reference(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"An xmapped function cannot make, read or write a reference (jax.new_ref): {what}. "
        "Pass its value as an argument, and return the new one"
    )


def shard_map_inside(where: str) -> NotImplementedError:
    return NotImplementedError(
        f"The shard_map at {where} cannot be evaluated inside an xmapped function, which uses the "
        "mesh. Name the axes of the shard_map in xmap, and assign their mesh axes in axis_resources"
    )


def einsum_skipped_axis(
    spec: str, axis: Hashable, by: str, operand: str, where: str = ""
) -> TypeError:
    if where:
        where = f" at {where}"
    return TypeError(
        f"The einsum {spec!r}{where} mentions the named axis `{axis}` in {by} and skips it in "
        f"{operand}, which varies over it too. Name the axis in both operands, or reduce it in "
        "this one first"
    )
