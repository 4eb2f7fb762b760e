"""What ``xmap`` returns: a function of ``jax.jit`` with a plan, and a second try where jit refuses
a call.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax

from xmap_compat import _jax
from xmap_compat.core import call as calls
from xmap_compat.core import execute, watch
from xmap_compat.core.arguments import Declaration, bind_arguments
from xmap_compat.core.errors import described, no_devices, show
from xmap_compat.core.mesh import SerialLoop, check_mesh, devices_of, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope
from xmap_compat.core.same_calls import ComparedCalls
from xmap_compat.core.specs import AxisName, argument_path

if TYPE_CHECKING:
    from xmap_compat.tools.plan import Plan

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)


class SharedCall:
    """What equal declarations of one function share: one function of ``jax.jit``.

    It refers to the declaration weakly: what is kept for a Python function is freed with it.

    Attributes:
      jitted: the function of ``jax.jit``, which calls this object when it traces.
      donated: the positions of arguments whose buffers may be reused.
      compared: which of its calls the processes of a mesh have agreed on.
      uses_mesh: whether some traced call runs on the devices of a mesh.
    """

    def __init__(self, declared: Declaration, donated: tuple[int, ...]):
        self.donated = donated
        self.compared = ComparedCalls()
        self.uses_mesh = False
        self._declared = weakref.ref(declared)
        _take_names(self, declared.fun)
        backend = declared.backend
        if _has_mesh_axes(declared):
            backend = None
        self.jitted = _jax.jit(
            self,
            backend,
            donate_argnums=donated,
            # jit drops unused arguments without freeing them, which donation promises.
            keep_unused=bool(donated),
        )

    def of(self, declared: Declaration) -> Declaration:
        """The living declaration of this call, which is this one if there is no other."""
        living = self._declared()
        if living is not None:
            return living
        self._declared = weakref.ref(declared)
        return declared

    @property
    def declared(self) -> Declaration:
        declared = self._declared()
        assert declared is not None  # xmapped functions hold it
        return declared

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.declared.fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise _keyword_arguments(kwargs)
        declared = self.declared
        arguments = bind_arguments(declared, args)
        placed = calls.place_bound_call(declared, arguments)
        self.uses_mesh |= placed.uses_mesh or placed.first_device_of is not None
        watch.report_traced(declared, placed, args)
        self.compared.traced(declared, placed, args)
        try:
            return execute.run(placed, arguments.leaves)
        # Under jax_debug_nans, jit calls this function to find where NaNs come from.
        except FloatingPointError as error:
            # JAX's message names a primitive or nothing.
            kind = "inf" if "(inf)" in str(error) else "nan"
            where = f"xmap({declared.name})"
            error.args = (f"invalid value ({kind}) encountered in {where}: {error}",)
            raise


# For each Python function what its xmapped functions share, by what distinguishes them.
_shared: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, SharedCall]] = (
    weakref.WeakKeyDictionary()
)


def _share(declared: Declaration, donated: tuple[int, ...]) -> SharedCall:
    """What equal declarations of one function share, so that a new xmap hits jit's cache."""
    if not isinstance(declared.fun, types.FunctionType):
        return SharedCall(declared, donated)
    key = (declared.key(), donated)
    known = _shared.setdefault(declared.fun, {})
    if key not in known:
        known[key] = SharedCall(declared, donated)
    return known[key]


def _has_mesh_axes(declared: Declaration) -> bool:
    """Whether calls run on the devices of a mesh, and check these against the backend."""
    entries = itertools.chain.from_iterable(declared.resources.values())
    return not all(isinstance(entry, SerialLoop) for entry in entries)


def _take_names(thing: Any, fun: Callable[..., Any]) -> None:
    """Give an object the name, the module and the docstring of a function."""
    thing.__name__ = "xmapped"  # of what has no name, such as a partial
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(fun, name):
            setattr(thing, name, getattr(fun, name))


class Xmapped(Generic[P, R]):
    """What :func:`xmap` returns: a function of positional arrays, as ``jax.jit`` makes one.

    As an annotation it has the parameters and the result of the function, as in ``jax.vmap``.

    Attributes:
      declared: the arguments that the user gave to xmap.
      __wrapped__: the function that the user gave to xmap.

    >>> import jax
    >>> from xmap_compat import Xmapped, xmap
    >>> def centred(x: jax.Array) -> jax.Array:
    ...     return x - jax.lax.pmean(x, "i")
    >>> f: Xmapped[[jax.Array], jax.Array] = xmap(centred, ["i"], ["i"])
    >>> f
    <xmap(centred, in_axes=['i'], out_axes=['i'])>
    >>> f.lower(jax.ShapeDtypeStruct((3,), "float32")).as_text()[:6]
    'module'
    """

    # Functions that wrap this one copy its ``__dict__``, which has only its names.
    __slots__ = ("__dict__", "__weakref__", "_run", "_shared", "declared")

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, declared: Declaration, donated: tuple[int, ...]):
        self._shared = _share(declared, donated)
        self.declared = self._shared.of(declared)
        self._run = self._first_call
        _take_names(self, declared.fun)
        self.__wrapped__ = declared.fun

    @_jax.boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return self._run(*args, **kwargs)
            except Exception as error:
                return self._mended(error, args, kwargs)
        except Exception as error:
            _jax.end_at_user(error)
            raise

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls until JAX has run, and says whether there are other processes."""
        if _jax.process_store() is not None:
            self._run = self._compared_call
            return self._run(*args, **kwargs)
        results = self._shared.jitted(*args, **kwargs)
        if not _has_tracers(results):
            self._run = self._shared.jitted
        return results

    def _compared_call(self, *args: Any, **kwargs: Any) -> Any:
        with self._shared.compared.calling(args):
            return self._shared.jitted(*args, **kwargs)

    def _mended(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a second try, with arguments moved to the mesh; or a better error."""
        moved = _recover_call(self.declared, self._shared, error, args, kwargs)
        if moved is None:
            raise error
        return self._run(*moved)

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> Self: ...
    @overload
    def __get__(
        self: Xmapped[Concatenate[Any, Q], R], instance: object, owner: Any = None, /
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if instance is None:
            return self
        return types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return Xmapped, (self.declared, self._shared.donated)

    def __repr__(self) -> str:
        """``<xmap(centred, in_axes=['batch'], ...)>``"""
        declared = self.declared
        shown = [
            declared.name,
            f"in_axes={show(declared.in_source)}",
            f"out_axes={show(declared.out_source)}",
        ]
        if declared.sizes:
            shown.append(f"axis_sizes={show(declared.sizes)}")
        if declared.resources:
            shown.append(f"axis_resources={show(_shown_resources(declared))}")
        return f"<xmap({', '.join(shown)})>"

    @_jax.api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The call as JAX traces it, as ``jax.jit(f).trace(*args)``."""
        return self._shared.jitted.trace(*args, **kwargs)

    @_jax.api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The call as JAX lowers it, as ``jax.jit(f).lower(*args)``."""
        return self._shared.jitted.lower(*args, **kwargs)

    @_jax.api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, as ``jax.eval_shape(f, *args)``."""
        return self._shared.jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget what was traced and compiled for this function."""
        self._shared.jitted.clear_cache()

    @_jax.api_boundary
    def plan(self, *args: Any, mesh: _jax.AnyMesh | None = None, **kwargs: Any) -> Plan:
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
        from xmap_compat.tools.plan import plan_of_call

        if kwargs:
            raise _keyword_arguments(kwargs)
        with entered(check_mesh(f"{self.declared.name}.plan", mesh)):
            try:
                return plan_of_call(self.declared, args)
            except TypeError:
                _check_values(args)
                raise


def _has_tracers(values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(values))


def _shown_resources(declared: Declaration) -> dict[AxisName, Any]:
    """The resources as users write them: one entry is in no tuple."""
    shown: dict[AxisName, Any] = {}
    for name, entries in declared.resources.items():
        shown[name] = entries
        if len(entries) == 1:
            shown[name] = entries[0]
    return shown


def declaration_of(xmapped: Any) -> Declaration | None:
    """The arguments that the user gave to xmap to make a function; None for any other object."""
    if isinstance(xmapped, Xmapped):
        return xmapped.declared
    return None


def _recover_call(
    declared: Declaration,
    shared: SharedCall,
    error: Exception,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """Raise a better error, or return arguments that are moved to the mesh; None if the error
    stands.
    """
    if isinstance(error, TypeError) and kwargs:
        raise _keyword_arguments(kwargs) from None
    _check_values(args, error, shared.donated)
    if not shared.uses_mesh or not isinstance(error, ValueError):
        return None
    if _jax.user_frames_of(error)[0]:
        return None
    if isinstance(mesh := current_scope().mesh, jax.sharding.AbstractMesh):
        try:
            shared.jitted.eval_shape(*args)
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
        f"{path} is {described(value)}, but the arguments of xmapped functions are arrays, "
        "scalars, or pytrees of them. Bind a static value with functools.partial before xmap"
    )


def _donated_argument(path: str, donated: Sequence[int]) -> RuntimeError:
    return RuntimeError(
        f"{path} was donated by an earlier call (donate_argnums={tuple(donated)}), which has "
        "deleted it. Pass the result of that call, or leave donate_argnums out"
    )


def _moved_to_mesh(
    declared: Declaration, args: tuple[Any, ...], error: Exception
) -> tuple[Any, ...] | None:
    """The arguments of a call at top level, with those on one device moved to the mesh in scope.

    None if there are no such arguments, or if others are committed to other devices; the error then
    says so.
    """
    scope = current_scope()
    devices = set(devices_of(scope.mesh))
    if not devices or _has_tracers(args):
        return None
    arguments = bind_arguments(declared, args)
    homes = [_home(x) for x in arguments.leaves]
    if any(len(home) > 1 and home != devices for home in homes):
        error.add_note(
            "xmap moves an array that is committed to one device to the mesh only in a direct "
            "call. Otherwise move it: jax.device_put(x, jax.sharding.NamedSharding(mesh, "
            "jax.sharding.PartitionSpec()))"
        )
        return None
    if not any(len(home) == 1 for home in homes):
        return None
    placements = calls.checked_placements(declared, arguments)
    moved = []
    for x, spec, home in zip(arguments.leaves, arguments.specs, homes):
        if len(home) == 1:
            by_mesh = calls.partition_spec(spec, placements)
            x = jax.device_put(x, jax.sharding.NamedSharding(scope.mesh, by_mesh))
        moved.append(x)
    return jax.tree.unflatten(arguments.tree, moved)


def _home(x: Any) -> set[jax.Device]:
    """The devices that an array is committed to."""
    if isinstance(x, jax.Array) and x.committed:
        return x.sharding.device_set
    return set()


# ----------------------------------------------------------------------------- messages


def _keyword_arguments(names: Iterable[str]) -> TypeError:
    return TypeError(
        "xmapped functions take positional arguments only, but got the keyword arguments: "
        f"{', '.join(names)}. Pass them by position, or bind them with functools.partial before "
        "xmap"
    )
