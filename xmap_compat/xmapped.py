"""What ``xmap`` returns: its type for annotations, ``f.plan``, its repr, and a second try where jit
refuses a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from xmap_compat import _jax
from xmap_compat.core import call as calls
from xmap_compat.core.errors import show
from xmap_compat.core.mesh import check_mesh, devices_of, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.specs import argument_path
from xmap_compat.errors import described, keyword_arguments, no_devices

if TYPE_CHECKING:
    from xmap_compat.tools.plan import Plan

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)


class Xmapped(Protocol[P, R]):
    """The type of what :func:`xmap` returns: the parameters and the result of the function, as in
    ``jax.vmap``.

    At run time it is an object that ``jax.jit`` made, with an attribute ``plan``.  Its parameters
    are positional only.

    >>> import jax
    >>> from xmap_compat import Xmapped, xmap
    >>> def centred(x: jax.Array) -> jax.Array:
    ...     return x - jax.lax.pmean(x, "i")
    >>> f: Xmapped[[jax.Array], jax.Array] = xmap(centred, ["i"], ["i"])
    >>> f.lower(jax.ShapeDtypeStruct((3,), "float32")).as_text()[:6]
    'module'
    """

    __name__: str

    @property
    def plan(self) -> Planner:
        """``f.plan(*args)`` says how a call would be executed."""

    @property
    def __wrapped__(self) -> Callable[P, R]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> Self: ...
    @overload
    def __get__(
        self: Xmapped[Concatenate[Any, Q], R], instance: object, owner: Any = None, /
    ) -> Callable[Q, R]: ...

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...

    def clear_cache(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Planner:
    """``f.plan`` of an xmapped function: ``f.plan(*args)`` is the plan of a call.

    Attributes:
      declared: the arguments that the user gave to xmap.
    """

    declared: calls.Declaration

    def __repr__(self) -> str:
        return f"<{self.declared.name}.plan: call it with the arguments of {self.declared.name}>"

    @_jax.api_boundary
    def __call__(self, *args: Any, mesh: _jax.AnyMesh | None = None, **kwargs: Any) -> Plan:
        """The plan of one call, which is traced but neither compiled nor executed.

        Args:
          args: the arguments of the call, or types in the place of arrays
          (``jax.ShapeDtypeStruct``).
          mesh: the mesh, which may be a ``jax.sharding.AbstractMesh``; None for the mesh in scope.

        Example:

          >>> import jax
          >>> from xmap_compat import Mesh, xmap
          >>> f = xmap(lambda x: jax.lax.psum(x, "i"), ["i", ...], {}, axis_resources={"i": "x"})
          >>> with Mesh(jax.devices()[:2], "x"):
          ...     plan = f.plan(jax.ShapeDtypeStruct((8, 3), "float32"))
          >>> plan.axes[0].name, plan.axes[0].mesh_axes, plan.axes[0].device_size
          ('i', ('x',), 4)
          >>> "all-reduce" in str(plan)  # print(plan) shows all of it
          True
        """
        if kwargs:
            raise keyword_arguments(kwargs)
        plan_of_call = importlib.import_module("xmap_compat.tools.plan").plan_of_call
        with entered(check_mesh(f"{self.declared.name}.plan", mesh)):
            try:
                return plan_of_call(self.declared, args)
            except TypeError:
                _check_values(args)
                raise


_Jitted: Any = type(jax.jit(lambda: None))
_plain_repr = _Jitted.__repr__


def _repr(function: Any) -> str:
    """``<xmap(centred, in_axes=['batch'], ...)>``; JAX's own for other jitted functions,
    ``jax.jit(f)`` too.
    """
    declared = declaration_of(function)
    if declared is None or function.__wrapped__ is not declared.fun:
        return _plain_repr(function)
    resources = {
        name: entries[0] if len(entries) == 1 else entries
        for name, entries in declared.resources.items()
    }
    specs = {"in_axes": declared.in_source, "out_axes": declared.out_source}
    options = specs | {"axis_sizes": declared.sizes or None, "axis_resources": resources or None}
    shown = [f"{name}={show(value)}" for name, value in options.items() if value is not None]
    return f"<xmap({', '.join([declared.name, *shown])})>"


# The type has no subclasses, and prints ``__wrapped__``, which is the user's function.
with contextlib.suppress(TypeError):  # a release that makes it immutable keeps its own text
    _Jitted.__repr__ = _repr


def declaration_of(xmapped: Any) -> calls.Declaration | None:
    """The arguments that the user gave to xmap to make a function; None for any other object."""
    planner = getattr(xmapped, "plan", None)
    return planner.declared if isinstance(planner, Planner) else None


def recover_call(
    declared: calls.Declaration,
    donated: tuple[int, ...],
    uses_mesh: bool,
    traced: Callable[..., Any],
    error: Exception,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """Raise a better error, or return arguments that are moved to the mesh; None if the error
    stands.
    """
    importlib.import_module("xmap_compat.core.notes").add_note_on_captured(error, declared, args)
    if isinstance(error, TypeError) and kwargs:
        raise keyword_arguments(kwargs) from None
    _check_values(args, error, donated)
    if not uses_mesh or not isinstance(error, ValueError) or _jax.user_frames_of(error)[0]:
        return None
    if isinstance(mesh := current_scope().mesh, jax.sharding.AbstractMesh):
        try:
            jax.eval_shape(traced, *args)
        except Exception:
            return None  # the call itself is wrong
        raise no_devices(f"The xmapped function {declared.name}", mesh) from None
    return _moved_to_mesh(declared, args, error)


def _check_values(args: tuple[Any, ...], error: Any = None, donated: tuple[int, ...] = ()) -> None:
    """Raise for arguments that are no arrays, or are deleted, because jit's messages do not say
    which.
    """
    for path, value in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(error, (TypeError, type(None))) and not is_array(value):
            raise _no_array_argument(argument_path(path, "args"), value) from None
        is_array_itself = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        if isinstance(error, RuntimeError) and is_array_itself and value.is_deleted():
            raise _donated_argument(argument_path(path, "args"), donated) from None


def _no_array_argument(path: str, value: Any) -> TypeError:
    return TypeError(
        f"{path} is {described(value)}, but the arguments of xmapped functions are arrays, scalars, or pytrees of "
        "them. Bind a static value with functools.partial before xmap"
    )


def _donated_argument(path: str, donated: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"{path} was donated by an earlier call (donate_argnums={tuple(donated)}), which has deleted it. Pass the "
        "result of that call, or leave donate_argnums out"
    )


def _moved_to_mesh(
    declared: calls.Declaration, args: tuple[Any, ...], error: Exception
) -> tuple[Any, ...] | None:
    """The arguments of a call at top level, with those on one device moved to the mesh in scope.

    None if there are no such arguments, or if others are committed to other devices; the error then
    says so.
    """
    scope = current_scope()
    devices = set(devices_of(scope.mesh))
    if not devices or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        return None
    arguments = calls.bind_arguments(declared, args)
    leaves = arguments.leaves
    homes = [
        x.sharding.device_set if isinstance(x, jax.Array) and x.committed else set() for x in leaves
    ]
    on_one_device = [len(home) == 1 for home in homes]
    elsewhere = [len(home) > 1 and home != devices for home in homes]
    if any(elsewhere):
        error.add_note(
            "xmap moves an array that is committed to one device to the mesh only in a direct call. Otherwise move it: "
            "jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
        )
    if any(elsewhere) or not any(on_one_device):
        return None
    placements = calls.locate(declared, arguments)
    shardings = [
        jax.sharding.NamedSharding(scope.mesh, calls.partition_spec(s, placements))
        for s in arguments.specs
    ]
    moved = [
        jax.device_put(x, s) if one else x for x, s, one in zip(leaves, shardings, on_one_device)
    ]
    return jax.tree.unflatten(arguments.tree, moved)
