"""``xmap`` itself: the user's call, checked and handed to the stages, wrapped by ``jax.jit``."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, Protocol, SupportsIndex, TypeAlias, TypeVar, overload

import jax

from xmap_compat import _jax, vocabulary
from xmap_compat.core import watch
from xmap_compat.core.arguments import Declaration
from xmap_compat.core.errors import (
    LEGACY,
    as_set,
    did_you_mean,
    name_of,
    no_results,
    quoted,
    should_be,
)
from xmap_compat.core.placement import parse_axis_resources, resources_of_known_axes
from xmap_compat.core.specs import AxisName, is_spec, parse_axis_sizes, parse_specs, spec_names
from xmap_compat.xmapped import Xmapped

vocabulary.complete()

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Dataclass(Protocol):
    """A pytree whose fields are specifications."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# What in_axes and out_axes may be: a specification of one array (a list of names, or a dictionary
# from positions to names), or a pytree of them.
AxisSpec: TypeAlias = (
    list[Any]
    | Mapping[int, AxisName]
    | tuple["AxisSpec", ...]
    | Mapping[str, "AxisSpec"]
    | _Dataclass
    | None
)

Sizes: TypeAlias = Mapping[AxisName, int] | None
Resources: TypeAlias = Mapping[AxisName, Any] | None
Positions: TypeAlias = int | Sequence[int]


NOT_GIVEN: Any = object()


@overload
def xmap(
    fun: Callable[P, R],
    in_axes: AxisSpec,
    out_axes: AxisSpec,
    *,
    axis_sizes: Sizes = None,
    axis_resources: Resources = None,
    donate_argnums: Positions = (),
    backend: str | None = None,
) -> Xmapped[P, R]: ...
@overload
def xmap(
    *,
    in_axes: AxisSpec,
    out_axes: AxisSpec,
    axis_sizes: Sizes = None,
    axis_resources: Resources = None,
    donate_argnums: Positions = (),
    backend: str | None = None,
) -> Callable[[Callable[P, R]], Xmapped[P, R]]: ...
@_jax.api_boundary
def xmap(
    fun: Any = NOT_GIVEN,
    in_axes: Any = NOT_GIVEN,
    out_axes: Any = NOT_GIVEN,
    *,
    axis_sizes: Sizes = None,
    axis_resources: Resources = None,
    donate_argnums: Positions = (),
    backend: str | None = None,
    **unknown: Any,
) -> Any:
    """Vectorize a function over named axes of its arguments, or distribute it over a mesh, or both.

    Inside ``fun`` the dimensions that ``in_axes`` names are gone from ``x.shape``: they are named
    axes, over which every operation is vectorized, and which collectives (``lax.psum(x, 'i')``) and
    reductions (``jnp.sum(x, axis='i')``) address by name.  ``out_axes`` says where they appear in
    the results. ``axis_resources`` says how each axis is executed, and never what is computed.

    Args:
      fun: a function of positional arguments: arrays, scalars, or pytrees of them.  Without it,
        ``xmap(...)`` is a
        decorator: ``@xmap(in_axes=..., out_axes=...)``.
      in_axes: for each argument, which dimensions are named: a dictionary ``{position: name}``, or
        a list of names for the leading dimensions ending in ``...`` (without it, the list also
        asserts the rank; None leaves a dimension positional).  A pytree prefix of the arguments, or
        one such specification for all of them.
      out_axes: the same for the results.  A result that does not vary over a name is broadcast
        along it.
      axis_sizes: sizes of axes that appear in no argument; sizes of other axes are checked.
      axis_resources: for each axis, mesh axes of the mesh in scope at the call and then loops
        (``SerialLoop(n)``, or a name from ``serial_loop``).  Axes without resources are
        vectorized.
      donate_argnums: arguments whose buffers may be reused for the results.
      backend: where to run without a mesh: ``'cpu'``, ``'gpu'`` or ``'tpu'``.

    Returns:
      A jitted function of positional arrays, with ``jax.jit``'s methods (``.lower``, ``.trace``,
      ...), and ``.plan(*args)``, which says how a call would be executed: see ``Xmapped``.

    Raises:
      TypeError, ValueError: malformed arguments, here or at the call. Each message says what to
        write; docs/errors.md explains them.

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
        raise _unknown_keywords(unknown)
    specs = {"in_axes": in_axes, "out_axes": out_axes}
    missing = [name for name, spec in specs.items() if spec is NOT_GIVEN]
    if missing and fun is not NOT_GIVEN and not callable(fun):
        raise _not_callable(fun)
    if missing:
        raise _missing_specs(missing)

    def decorator(fun):
        return make(fun, in_axes, out_axes, axis_sizes, axis_resources, donate_argnums, backend)

    if fun is NOT_GIVEN:
        return _jax.api_boundary(decorator)
    return decorator(fun)


def _shown_signature(function: Callable[..., Any]) -> inspect.Signature:
    """What ``help`` shows: the parameters as users give them."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            default = parameter.default
            if default is NOT_GIVEN:
                default = parameter.empty
            shown.append(parameter.replace(default=default, annotation=parameter.empty))
    return inspect.Signature(shown)


xmap.__signature__ = _shown_signature(xmap)  # type: ignore[attr-defined]


def _not_callable(fun):
    advice = "Write xmap(fun, in_axes, out_axes), or the decorator @xmap(in_axes=..., out_axes=...)"
    return should_be("The first argument of xmap", "a function", fun, advice=advice)


def make(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    axis_sizes: Sizes = None,
    axis_resources: Resources = None,
    donate_argnums: Positions = (),
    backend: str | None = None,
    undeclared: bool = False,
) -> Any:
    """Implements :func:`xmap`; ``undeclared`` is for unmodified programs: see
    :mod:`xmap_compat.core.undeclared`.
    """
    if not callable(fun):
        raise _not_callable(fun)
    _check_backend(backend)
    declared = declare(fun, in_axes, out_axes, axis_sizes, axis_resources, backend, undeclared)
    made: Any = Xmapped(declared, _positions(donate_argnums))
    for watcher in watch.watchers():
        made = watcher.constructed(made)
    return made


def with_resources(declared: Declaration, axis_resources: Mapping[AxisName, Any]) -> Any:
    """The xmapped function of a declaration, with other resources."""
    return make(
        declared.fun,
        declared.in_source,
        declared.out_source,
        declared.sizes,
        axis_resources,
        backend=declared.backend,
        undeclared=declared.undeclared,
    )


def _positions(donate_argnums):
    try:
        if isinstance(donate_argnums, SupportsIndex):
            return (operator.index(donate_argnums),)
        return tuple(map(operator.index, donate_argnums))
    except TypeError:
        raise should_be(
            "donate_argnums", "the position of an argument, or a tuple of positions", donate_argnums
        ) from None


def _check_backend(backend: str | None) -> None:
    """Raise a clear error for a backend that this JAX does not have."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise should_be("backend", "None or the name of a platform, such as 'cpu'", backend)
    try:
        jax.devices(backend)
    except RuntimeError:
        platforms = {device.platform for device in jax.devices()} | {"cpu"}
        raise _unknown_backend(backend, sorted(platforms)) from None


def declare(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    axis_sizes: Sizes = None,
    axis_resources: Resources = None,
    backend: str | None = None,
    undeclared: bool = False,
) -> Declaration:
    """The arguments that the user gave to :func:`xmap`, parsed; it raises the errors of
    :func:`xmap`.
    """
    if isinstance(out_axes, tuple) and not out_axes:
        raise no_results()
    in_source = in_axes
    if isinstance(in_axes, list) and not is_spec(in_axes):
        in_source = tuple(in_axes)  # a list of specs, one for each argument
    in_specs = parse_specs("in_axes", in_source)
    out_specs = parse_specs("out_axes", out_axes)
    sizes = parse_axis_sizes(axis_sizes)
    names = list(dict.fromkeys([*spec_names(in_specs), *sizes]))
    missing = [n for n in spec_names(out_specs) if n not in names]
    if missing:
        raise _names_missing_from_inputs(missing, names)
    resources = resources_of_known_axes(parse_axis_resources(axis_resources), names, undeclared)
    return Declaration(
        fun,
        name_of(fun),
        in_specs,
        out_specs,
        in_axes,
        out_axes,
        sizes,
        resources,
        tuple(names),
        backend,
        undeclared,
    )


# ----------------------------------------------------------------------------- messages


def _missing_specs(names: Sequence[str]) -> TypeError:
    return TypeError(
        f"xmap() is missing {' and '.join(names)}, which name the dimensions of arguments and "
        "results. Write xmap(fun, ['batch', ...], ['batch', ...]), or, as a decorator, "
        "@xmap(in_axes=['batch', ...], out_axes=['batch', ...])"
    )


def _unknown_keywords(names: Iterable[str]) -> TypeError:
    known = ["in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums", "backend"]
    if "mesh" in names:
        advice = ". Enter the mesh around the call: `with mesh:`"
    elif "static_arg" in "".join(names):
        advice = ". Bind static values with functools.partial before xmap"
    else:
        advice = did_you_mean(names, known) or f". It takes {', '.join(known)}"
    return TypeError(f"xmap() got an unexpected keyword argument: {quoted(names)}{advice}")


def _names_missing_from_inputs(names: Sequence[Hashable], known: Iterable[Hashable]) -> ValueError:
    advice = (
        did_you_mean(names, known) or ". Give an axis that no argument has its size in axis_sizes"
    )
    return ValueError(
        f"out_axes name {quoted(names)}, which neither in_axes nor axis_sizes do{advice}"
        f"{LEGACY}All axis names appearing in out_axes must also appear in in_axes or axis_sizes, "
        f"but the following are missing: {as_set(names)}"
    )


def _unknown_backend(backend: str, known: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"xmap backend {backend!r} is not available. Use {' or '.join(known)}, or leave it out"
    )
