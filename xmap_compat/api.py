"""``xmap`` itself: the user's call, checked and handed to the stages, wrapped by ``jax.jit``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, Self, SupportsIndex, TypeVar, overload

import jax

from xmap_compat import _jax, errors, vocabulary
from xmap_compat.core import call as calls
from xmap_compat.core import errors as core_errors
from xmap_compat.core import execute
from xmap_compat.core.mesh import SerialLoop, check_mesh, entered
from xmap_compat.core.named_shape import is_array
from xmap_compat.core.placement import current_scope, known_axes, parse_axis_resources
from xmap_compat.core.processes import comparison
from xmap_compat.core.restored import restored
from xmap_compat.core.specs import AxisName, argument_path, is_spec, parse_axis_sizes, parse_specs, spec_names

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


vocabulary.complete(restored)

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)


class Xmapped(Protocol[P, R]):
    """What :func:`xmap` returns, for annotations: the parameters and the result of the function, as in ``jax.vmap``.

    At run time it is an object that ``jax.jit`` made, with an attribute ``plan``.  Its parameters are positional only.

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
    def __get__(self: Xmapped[Concatenate[Any, Q], R], instance: object, owner: Any = None, /) -> Callable[Q, R]: ...

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...

    def clear_cache(self) -> None: ...


class _NotGiven:
    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = _NotGiven()


@overload
def xmap(
    fun: Callable[P, R],
    in_axes: Any,
    out_axes: Any,
    *,
    axis_sizes: Mapping[AxisName, int] | None = None,
    axis_resources: Mapping[AxisName, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
) -> Xmapped[P, R]: ...
@overload
def xmap(
    *,
    in_axes: Any,
    out_axes: Any,
    axis_sizes: Mapping[AxisName, int] | None = None,
    axis_resources: Mapping[AxisName, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
) -> Callable[[Callable[P, R]], Xmapped[P, R]]: ...
@_jax.api_boundary
def xmap(
    fun: Any = NOT_GIVEN,
    in_axes: Any = NOT_GIVEN,
    out_axes: Any = NOT_GIVEN,
    *,
    axis_sizes: Mapping[AxisName, int] | None = None,
    axis_resources: Mapping[AxisName, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Vectorize a function over named axes of its arguments, or distribute it over a mesh, or both.

    Inside ``fun`` the dimensions that ``in_axes`` names are gone from ``x.shape``: they are named axes,
    over which every operation is vectorized, and which collectives (``lax.psum(x, 'i')``) and reductions
    (``jnp.sum(x, axis='i')``) address by name.  ``out_axes`` says where they appear in the results.
    ``axis_resources`` says how each axis is executed, and never what is computed.

    Args:
      fun: a function of positional arguments: arrays, scalars, or pytrees of them.  Without it, ``xmap(...)`` is a
        decorator: ``@xmap(in_axes=..., out_axes=...)``.
      in_axes: for each argument, which dimensions are named: a dictionary ``{position: name}``, or a list of names for
        the leading dimensions ending in ``...`` (without it, the list also asserts the rank; None leaves a dimension
        positional).  A pytree prefix of the arguments, or one such specification for all of them.
      out_axes: the same for the results.  A result that does not vary over a name is broadcast along it.
      axis_sizes: sizes of axes that appear in no argument; sizes of other axes are checked.
      axis_resources: for each axis, mesh axes of the mesh in scope at the call and then loops
        (:class:`SerialLoop`, or a name from :func:`serial_loop`).  Axes without resources are vectorized.
      donate_argnums: arguments whose buffers may be reused for the results.
      backend: where to run without a mesh: ``'cpu'``, ``'gpu'`` or ``'tpu'``.

    Returns:
      A jitted function of positional arrays, with ``jax.jit``'s attributes (``.lower``, ``.trace``, ...), and
      ``.plan(*args)``, which says how a call would be executed: see :mod:`xmap_compat.tools.plan`.

    Raises:
      TypeError, ValueError: malformed arguments, here or at the call; see the migration guide.

    Example:

      >>> import jax
      >>> from xmap_compat import Mesh, xmap
      >>> @xmap(in_axes=["batch", ...], out_axes=["batch", ...])
      ... def centred(x):
      ...     return x - jax.lax.pmean(x, "batch")
      >>> centred(jax.numpy.array([[1.0, 5.0], [3.0, 5.0]]))  # the mean over the rows is subtracted
      Array([[-1.,  0.],
             [ 1.,  0.]], dtype=float32)

      A product of matrices: rows over the mesh axis ``'x'``, and the sum over ``'k'`` vectorized.

      >>> product = xmap(
      ...     lambda a, b: jax.lax.psum(a * b, "k"),
      ...     in_axes=(["i", "k"], ["k", "j"]),
      ...     out_axes=["i", "j"],
      ...     axis_resources={"i": "x"},
      ... )
      >>> with Mesh(jax.devices()[:1], "x"):
      ...     product(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 2)))
      Array([[3., 3.],
             [3., 3.]], dtype=float32)

    Source: ``jax.experimental.maps.xmap`` (until jax 0.4.30).
    """
    if unknown:
        raise errors.unknown_keywords(unknown)
    missing = [name for name, spec in (("in_axes", in_axes), ("out_axes", out_axes)) if spec is NOT_GIVEN]
    if missing and (fun is NOT_GIVEN or callable(fun)):
        raise errors.missing_specs(missing)
    if missing:
        raise errors.not_callable(fun)

    options = (in_axes, out_axes, axis_sizes, axis_resources, donate_argnums, backend)
    return _jax.api_boundary(lambda fun: make(fun, *options)) if fun is NOT_GIVEN else make(fun, *options)


def make(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    axis_sizes: Mapping[AxisName, int] | None = None,
    axis_resources: Mapping[AxisName, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str | None = None,
    undeclared: bool = False,
) -> Any:
    """Implements :func:`xmap`; ``undeclared`` is for unmodified programs: see :mod:`xmap_compat.core.undeclared`."""
    if not callable(fun):
        raise errors.not_callable(fun)
    check_backend(backend)
    declared = declare(fun, in_axes, out_axes, axis_sizes, axis_resources, backend, undeclared)
    return _jit(declared, _positions(donate_argnums))


def with_resources(declared: calls.Declaration, axis_resources: Mapping[AxisName, Any]) -> Any:
    """The xmapped function of a declaration, with other resources."""
    sources = declared.fun, declared.in_source, declared.out_source, declared.sizes
    return make(*sources, axis_resources, (), declared.backend, declared.undeclared)


def _positions(donate_argnums):
    single = isinstance(donate_argnums, SupportsIndex)
    try:
        return tuple(map(operator.index, (donate_argnums,) if single else donate_argnums))
    except TypeError:
        raise core_errors.should_be(
            "donate_argnums", "the position of an argument, or a tuple of positions", donate_argnums
        ) from None


def check_backend(backend: str | None) -> None:
    """Raise a clear error for a backend that this JAX does not have."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise core_errors.should_be("backend", "None or the name of a platform, such as 'cpu'", backend)
    try:
        jax.devices(backend)
    except RuntimeError:
        known = sorted({d.platform for d in jax.devices()} | {"cpu"})
        raise errors.unknown_backend(backend, known) from None


def _jit(declared: calls.Declaration, donated: tuple[int, ...]) -> Any:
    """The jitted function.  Equal declarations of one function share it, so that a new xmap hits jit's cache."""
    key = (declared.key(), donated)
    made = _made_for(declared.fun)
    if key not in made:
        made[key] = _new_jit(declared, donated)
    return made[key]


def _made_for(fun: Callable[..., Any]) -> dict[Any, Any]:
    """The xmapped functions of a Python function, which are kept on the function itself and freed with it.

    The owner is kept beside them, because ``functools.wraps`` copies attributes to other functions.
    """
    if not isinstance(fun, types.FunctionType):
        return {}
    owner, made = fun.__dict__.get("_xmap_compat_made", (None, {}))
    if owner is not fun:
        made = {}
        fun.__dict__["_xmap_compat_made"] = (fun, made)
    return made


# Functions that are called for every call when it is traced, in any thread.
Observer = Callable[[calls.Declaration, calls.PlacedCall, tuple[Any, ...]], None]
_observers: dict[object, Observer] = {}


def observe(observer: Observer) -> Callable[[], object]:
    """Have a function called whenever an xmapped call is traced, in any thread; returns a function that ends this."""
    key = object()
    _observers[key] = observer
    return lambda: _observers.pop(key, None)


class _XmappedCall:
    """What jit traces for a declaration, and what helps where jit refuses a call.

    Attributes:
      uses_mesh: whether some call that was traced runs on the devices of a mesh.
    """

    def __init__(self, declared: calls.Declaration, donated: tuple[int, ...]):
        self.declared, self.donated = declared, donated
        self.compared = comparison.ComparedCalls()
        self.uses_mesh = False

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise errors.keyword_arguments(kwargs)
        arguments = calls.bind_arguments(self.declared, args)
        made = calls.place_arguments(self.declared, arguments)
        self.uses_mesh |= made.uses_mesh or made.first_device_of is not None
        for observer in list(_observers.values()):  # at once, as other threads may end theirs
            observer(self.declared, made, args)
        self.compared.traced(self.declared, made, args)
        try:
            return execute.run(made, arguments.leaves)
        # Under jax_debug_nans, jit calls this function to find where NaNs come from.
        except FloatingPointError as error:
            errors.name_function(error, self.declared.name)
            raise

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """If jit refuses arguments, raise our own message, or move arrays that are committed to one device."""
        importlib.import_module("xmap_compat.core.notes").add_note_on_captured(error, self.declared, args)
        if isinstance(error, TypeError) and kwargs:
            raise errors.keyword_arguments(kwargs) from None
        _check_values(args, error, self.donated)
        if not self.uses_mesh or not isinstance(error, ValueError) or _jax.user_frames_of(error)[0]:
            return None
        if isinstance(mesh := current_scope().mesh, jax.sharding.AbstractMesh):
            try:
                jax.eval_shape(self.trace, *args)
            except Exception:
                return None  # the call itself is wrong
            raise errors.no_devices(f"The xmapped function {self.declared.name}", mesh) from None
        return calls.moved_to_mesh(self.declared, args, error)


def _new_jit(declared: calls.Declaration, donated: tuple[int, ...]) -> Any:
    call = _XmappedCall(declared, donated)

    @_jax.api_boundary  # for f.lower, f.trace, f.eval_shape
    @functools.partial(functools.update_wrapper, wrapped=declared.fun, updated=())
    def xmapped(*args, **kwargs):
        return call.trace(*args, **kwargs)

    # With a mesh, the call runs on its devices, and checks them against the backend.
    on_mesh = any(not isinstance(r, SerialLoop) for resources in declared.resources.values() for r in resources)
    # jit drops unused arguments without freeing them, which donation promises.
    jitted = _jax.jit(xmapped, None if on_mesh else declared.backend, donate_argnums=donated, keep_unused=bool(donated))
    jitted = _jax.recovering(jitted, call.recover, call.compared.calling, core_errors.check_from_outside)
    jitted.__wrapped__ = declared.fun
    jitted.plan = Planner(declared)
    return jitted


def _check_values(args: tuple[Any, ...], error: Any = None, donated: tuple[int, ...] = ()) -> None:
    """Raise for arguments that are no arrays, or are deleted, because jit's messages would not help."""
    for path, value in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(error, (TypeError, type(None))) and not is_array(value):
            raise errors.no_array_argument(argument_path(path, "args"), value) from None
        is_array_itself = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        if isinstance(error, RuntimeError) and is_array_itself and value.is_deleted():
            raise errors.donated_argument(argument_path(path, "args"), donated) from None


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
    def __call__(self, *args: Any, mesh: _jax.AnyMesh | None = None, **kwargs: Any) -> CallPlan:
        """The plan of one call, which is traced but neither compiled nor executed.

        Args:
          args: the arguments of the call, or types in the place of arrays (``jax.ShapeDtypeStruct``).
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
            raise errors.keyword_arguments(kwargs)
        describe = importlib.import_module("xmap_compat.tools.plan").describe_made
        with entered(check_mesh(f"{self.declared.name}.plan", mesh)):
            try:
                return describe(self.declared, None, args)
            except TypeError:
                _check_values(args)
                raise


_Jitted: Any = type(jax.jit(lambda: None))
_plain_repr = _Jitted.__repr__


def _repr(function: Any) -> str:
    """``<xmap(centred, in_axes=['batch'], ...)>``; JAX's own for other jitted functions, ``jax.jit`` of it too."""
    declared = declaration_of(function)
    if declared is None or function.__wrapped__ is not declared.fun:
        return _plain_repr(function)
    resources = {name: entries[0] if len(entries) == 1 else entries for name, entries in declared.resources.items()}
    specs = {"in_axes": declared.in_source, "out_axes": declared.out_source}
    options = specs | {"axis_sizes": declared.sizes or None, "axis_resources": resources or None}
    shown = [f"{name}={core_errors.show(value)}" for name, value in options.items() if value is not None]
    return f"<xmap({', '.join([declared.name, *shown])})>"


_Jitted.__repr__ = _repr  # the type has no subclasses, and prints ``__wrapped__``, which is the user's function


def declaration_of(xmapped: Any) -> calls.Declaration | None:
    """The arguments that the user gave to xmap to make a function; None for any other object."""
    planner = getattr(xmapped, "plan", None)
    return planner.declared if isinstance(planner, Planner) else None


def name_of(fun: Callable[..., Any]) -> str:
    """A name for messages: that of the function, or of the function that a partial wraps."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def declare(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    axis_sizes: Mapping[AxisName, int] | None = None,
    axis_resources: Mapping[AxisName, Any] | None = None,
    backend: str | None = None,
    undeclared: bool = False,
) -> calls.Declaration:
    """The arguments that the user gave to :func:`xmap`, parsed; raises the same errors."""
    if isinstance(in_axes, list) and not is_spec(in_axes):
        in_axes = tuple(in_axes)
    if isinstance(out_axes, tuple) and not out_axes:
        raise core_errors.no_results()
    in_specs = parse_specs("in_axes", in_axes)
    out_specs = parse_specs("out_axes", out_axes)
    sizes = parse_axis_sizes(axis_sizes)
    names = list(dict.fromkeys([*spec_names(in_specs), *sizes]))
    missing = [n for n in spec_names(out_specs) if n not in names]
    if missing:
        raise errors.names_missing_from_inputs(missing, names)
    resources = known_axes(parse_axis_resources(axis_resources), names, undeclared)
    name = name_of(fun)
    return calls.Declaration(
        fun, name, in_specs, out_specs, in_axes, out_axes, sizes, resources, tuple(names), backend, undeclared
    )
