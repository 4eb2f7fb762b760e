"""What is put in place of names, rules and options of JAX for a while."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src.numpy import reductions
from jax.extend.core import primitives
from jax.interpreters import ad, batching

from xmap_compat._jax.jaxprs import pbroadcast_p, reduce_scatter_p
from xmap_compat._jax.positions import warn_user
from xmap_compat._jax.primitives import bind
from xmap_compat._jax.version import VERSION


class Restoration:
    """Names and rules that modern JAX lacks, present while any thread needs them.

    The first user installs them, and the last one restores exactly what was there.  In other
    threads they do nothing, except for attributes that JAX does not have.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()
        self._plan: list[Callable[[], Callable[[], None]]] = []

    def attribute(self, module: Any, name: str, value: Any) -> None:
        assert not self._users, "what is in place already stays as it is"
        self._place(
            vars(module),
            name,
            value,
            functools.partial(setattr, module),
            functools.partial(delattr, module),
        )

    def entry(self, table: dict, key: Any, value: Any) -> None:
        self._place(table, key, value, table.__setitem__, lambda key: table.pop(key, None))

    def _place(self, held, key, value, put, remove):
        def install():
            missing = object()
            before = held.get(key, missing)
            put(key, value)
            return lambda: remove(key) if before is missing else put(key, before)

        self._plan.append(install)

    def enter(self) -> None:
        with self._lock:
            if self._users == 0:
                self._install()
            self._users += 1

    def _install(self) -> None:
        """All of the plan, or nothing."""
        with contextlib.ExitStack() as undo:
            for install in self._plan:
                undo.callback(install())
            self._undo = undo.pop_all()

    def exit(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()

    def hold(self, other: Restoration) -> None:
        """Keep what another restoration installs for as long as this one is."""

        def install():
            other.enter()
            return other.exit

        self._plan.append(install)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.exit()


def restore_named_reductions(restoration: Restoration, is_name: Callable[[Any], bool]) -> None:
    """Let ``axis='out_features'`` name one axis; JAX reads a string letter by letter.

    All named reductions of ``jax.numpy``, also as methods and inside ``jax.nn``, parse their
    ``axis`` argument in this one place.
    """
    original = reductions._ensure_optional_axes

    def ensure_optional_axes(axis):
        if isinstance(axis, (tuple, list)):
            return tuple(axis) if any(map(is_name, axis)) else original(axis)
        return (axis,) if is_name(axis) else original(axis)

    restoration.attribute(reductions, "_ensure_optional_axes", ensure_optional_axes)


def restore_collective_transposes(restoration: Restoration) -> None:
    """Mend two transposes that JAX (to 0.12) gets wrong, for gradients taken inside bodies.

    An untiled ``all_to_all`` with ``split_axis != concat_axis`` (the primitive itself is always
    tiled; ``lax.all_to_all`` adds and removes a dimension of one element), and ``pbroadcast`` of
    non-scalars.
    """

    def all_to_all(ct, axis_name, split_axis, concat_axis, axis_index_groups, tiled):
        swapped = {
            "split_axis": concat_axis,
            "concat_axis": split_axis,
            "axis_index_groups": axis_index_groups,
        }
        return jax.lax.all_to_all(ct, axis_name, tiled=True, **swapped)

    def pbroadcast(ct, axis_name, source):
        total = jax.lax.psum(ct, axis_name)
        return jax.lax.select(
            jax.lax.full(total.shape, jax.lax.axis_index(axis_name) == source),
            total,
            jax.lax.full_like(total, 0),
        )

    for primitive, rule in ((primitives.all_to_all_p, all_to_all), (pbroadcast_p, pbroadcast)):
        restoration.entry(ad.primitive_transposes, primitive, _linear_transpose(rule))
    restoration.entry(ad.primitive_transposes, primitives.psum_p, _sum_then_broadcast)


_transpose_psum = ad.primitive_transposes[primitives.psum_p]


def _sum_then_broadcast(ct, *operands, axes, axis_index_groups):
    """JAX broadcasts a cotangent along the positional axes of a psum before it sums over the named
    ones.
    """
    names = tuple(a for a in axes if not isinstance(a, int))
    sums = _transpose_psum(ct, *operands, axes=names, axis_index_groups=axis_index_groups)
    return [
        ad.Zero(x.aval)
        if type(total) is ad.Zero
        else jax.lax.broadcast_in_dim(
            total, x.aval.shape, [d for d in range(x.aval.ndim) if d not in axes]
        )
        for total, x in zip(sums, operands)
    ]


def _linear_transpose(rule):
    def transpose(ct, x, **params):
        return [ad.Zero(x.aval) if type(ct) is ad.Zero else rule(ct, **params)]

    return transpose


def mend_collective_batching(
    restoration: Restoration, refused: Callable[[str, Any], Exception]
) -> None:
    """Mend or refuse what the batching rules of JAX (to 0.12) get wrong, for a vmap inside a body.

    Mended: over axes bound outside of the vmap, an untiled ``psum_scatter`` misplaces a mapped
    dimension that follows the scattered one.  Refused: ``all_to_all`` in groups fails; over the
    vmap's own axis, ``pbroadcast`` fails; over that axis and others, ``ppermute`` forgets it, and
    ``all_gather`` and ``psum_scatter`` fail.

    Args:
      refused: ``(name of the primitive, its axes) -> error``.
    """
    exchanges = primitives.all_gather_p, primitives.all_to_all_p, primitives.ppermute_p
    for primitive in (*exchanges, reduce_scatter_p, pbroadcast_p):
        original = batching.fancy_primitive_batchers[primitive]
        batch = functools.partial(_batch, primitive, original, refused)
        restoration.entry(batching.fancy_primitive_batchers, primitive, batch)


def _batch(primitive, original, refused, axis_data, operands, dims, **params):
    axes = (
        params["axis_name"]
        if isinstance(params["axis_name"], (tuple, list))
        else (params["axis_name"],)
    )
    (x,), (d,) = operands, dims
    is_mapped = axis_data.name in axes
    if primitive is primitives.all_to_all_p:
        is_wrong = params["axis_index_groups"] is not None
    else:
        is_wrong = is_mapped and (len(axes) > 1 or primitive is pbroadcast_p)
    if is_wrong:
        raise refused(primitive.name, axes)
    if primitive is reduce_scatter_p and not is_mapped and d is not None:
        return _batch_scatter(x, d, **params)
    return original(axis_data, operands, dims, **params)


def _batch_scatter(x, d, *, scatter_dimension, tiled, **params):
    follows = d > scatter_dimension
    out = reduce_scatter_p.bind(
        x, scatter_dimension=scatter_dimension + (not follows), tiled=tiled, **params
    )
    return out, d - (follows and not tiled)


def restore_extremum_gradients(
    restoration: Restoration, rule: Callable[..., Any], in_body: Callable[[], bool]
) -> None:
    """Give ``pmax`` and ``pmin`` a derivative inside bodies; JAX has none.

    ``rule(x, tangent, out, axes=, axis_index_groups=)`` gives the tangent of the extremum ``out``.
    """
    for primitive in (primitives.pmax_p, primitives.pmin_p):
        restoration.entry(ad.primitive_jvps, primitive, _extremum_jvp(primitive, rule, in_body))


def _extremum_jvp(primitive, rule, in_body):
    def jvp(primals, tangents, **params):
        if not in_body():
            raise NotImplementedError(f"Differentiation rule for '{primitive}' not implemented")
        (x,), (t,) = primals, tangents
        (out,) = bind(primitive, [x], params)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval()) if type(t) is ad.Zero else rule(
            x, t, out, **params
        )

    return jvp


_Config: Any = type(jax.config)
_update, _read, _values = _Config.update, _Config.read, _Config.values

# The values of the removed options while they are accepted, and warnings for when they are set.
_remembered: dict[str, Any] = {}
_warnings: dict[str, str] = {}


def _update_or_remember(config, name, val):
    if name not in _remembered:
        return _update(config, name, val)
    _remembered[name] = val
    if val and name in _warnings:
        warn_user(_warnings[name])


def _read_or_remembered(config, name):
    return _remembered[name] if name in _remembered else _read(config, name)


_accepting = Restoration()
_accepting.attribute(_Config, "update", _update_or_remember)
_accepting.attribute(_Config, "read", _read_or_remembered)
_accepting.attribute(
    _Config, "values", property(lambda config: {**_values.fget(config), **_remembered})
)


def accept_options(
    restoration: Restoration, defaults: Mapping[str, Any], warnings: Mapping[str, str] = {}
) -> None:
    """Options of ``jax.config`` that this JAX lacks can be set, some with a warning, and read, and
    change nothing.
    """
    for name, default in defaults.items():
        if name in jax.config.values:
            continue
        if name in warnings:
            restoration.entry(_warnings, name, warnings[name])
        restoration.entry(_remembered, name, default)
        restoration.attribute(
            _Config, name, property(functools.partial(_read_or_remembered, name=name))
        )
    restoration.hold(_accepting)


def set_for_all_threads(context: Any, value: Any) -> None:
    """The value of a ``jax.make_user_context`` where no context is entered; before 0.10.1 in this
    thread only.
    """
    if VERSION >= (0, 10, 1):
        context.set_global(value)
    else:
        context(value).__enter__()
