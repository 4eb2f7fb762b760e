"""What takes the place of names, rules and options of JAX for a while: the one mechanism for it,
and the patches that need JAX's private names.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from jax._src.numpy import reductions
from jax.extend.core import primitives
from jax.interpreters import ad, batching

from xmap_compat._jax.jaxprs import pbroadcast_p, reduce_scatter_p
from xmap_compat._jax.positions import warn_user
from xmap_compat._jax.primitives import bind
from xmap_compat._jax.version import VERSION

# Puts something in place, and returns the function that takes it away again.
Patch: TypeAlias = Callable[[], Callable[[], None]]

_MISSING = object()


def replaced(holder: Any, name: Any, value: Any) -> Patch:
    """The patch of one attribute of a module or class, or of one entry of a dictionary."""

    def put():
        held = holder if isinstance(holder, dict) else vars(holder)
        before = held.get(name, _MISSING)
        _set(holder, name, value)
        return functools.partial(_set, holder, name, before)

    return put


def _set(holder, name, value):
    if isinstance(holder, dict):
        if value is _MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is _MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


class SharedPatches:
    """Patches that are in place while any thread needs them.

    The first ``enter`` puts them in place, the last ``exit`` puts back exactly what was there.
    ``enter`` is a ``Patch`` itself.
    """

    def __init__(self, *patches: Patch):
        self._patches = list(patches)
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()

    def add(self, *patches: Patch) -> None:
        assert not self._users, "what is in place already stays as it is"
        self._patches.extend(patches)

    def enter(self) -> Callable[[], None]:
        with self._lock:
            if self._users == 0:
                self._put_in_place()
            self._users += 1
        return self.exit

    def _put_in_place(self) -> None:
        """Put all patches in place, or none if one of them fails."""
        with contextlib.ExitStack() as undo:
            for patch in self._patches:
                undo.callback(patch())
            self._undo = undo.pop_all()

    def exit(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.exit()


def named_reductions(is_name: Callable[[Any], bool]) -> Patch:
    """Let ``axis='out_features'`` name one axis; JAX reads a string letter by letter.

    All named reductions of ``jax.numpy``, also as methods and inside ``jax.nn``, parse their
    ``axis`` argument in this one place.
    """
    original = reductions._ensure_optional_axes

    def ensure_optional_axes(axis):
        axes = axis if isinstance(axis, (tuple, list)) else (axis,)
        if any(map(is_name, axes)):
            return tuple(axes)
        return original(axis)

    return replaced(reductions, "_ensure_optional_axes", ensure_optional_axes)


def collective_transposes() -> list[Patch]:
    """Mend transposes that JAX (to 0.12) gets wrong, for gradients taken inside bodies.

    They are those of ``psum`` over named and positional axes; of an untiled ``all_to_all`` with
    ``split_axis != concat_axis`` (the primitive itself is always tiled; ``lax.all_to_all`` adds and
    removes a dimension of one element); and of ``pbroadcast`` of non-scalars.
    """
    transposes = {
        primitives.all_to_all_p: _linear_transpose(_exchange_back),
        pbroadcast_p: _linear_transpose(_sum_at_source),
        primitives.psum_p: _sum_then_broadcast,
    }
    return [replaced(ad.primitive_transposes, *entry) for entry in transposes.items()]


def _exchange_back(ct, axis_name, split_axis, concat_axis, axis_index_groups, tiled):
    return jax.lax.all_to_all(
        ct,
        axis_name,
        split_axis=concat_axis,
        concat_axis=split_axis,
        axis_index_groups=axis_index_groups,
        tiled=True,
    )


def _sum_at_source(ct, axis_name, source):
    total = jax.lax.psum(ct, axis_name)
    is_source = jax.lax.full(total.shape, jax.lax.axis_index(axis_name) == source)
    return jax.lax.select(is_source, total, jax.lax.full_like(total, 0))


_transpose_psum = ad.primitive_transposes[primitives.psum_p]


def _sum_then_broadcast(ct, *operands, axes, axis_index_groups):
    """JAX broadcasts a cotangent along the positional axes of a psum before it sums over the named
    ones.
    """
    names = tuple(a for a in axes if not isinstance(a, int))
    sums = _transpose_psum(ct, *operands, axes=names, axis_index_groups=axis_index_groups)
    cotangents = []
    for total, x in zip(sums, operands):
        if type(total) is ad.Zero:
            total = ad.Zero(x.aval)
        else:
            kept = [d for d in range(x.aval.ndim) if d not in axes]
            total = jax.lax.broadcast_in_dim(total, x.aval.shape, kept)
        cotangents.append(total)
    return cotangents


def _linear_transpose(rule):
    def transpose(ct, x, **params):
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval)]
        return [rule(ct, **params)]

    return transpose


def collective_batching(refused: Callable[[str, Any], Exception]) -> list[Patch]:
    """Mend or refuse what the batching rules of JAX (to 0.12) get wrong, for a vmap inside a body.

    Mended: over axes bound outside of the vmap, ``psum_scatter`` misplaces a mapped dimension that
    follows the scattered one.  Refused: ``all_to_all`` in groups fails; over the axis that the
    vmap binds, ``pbroadcast`` fails; over that axis and others, ``ppermute`` forgets it, and
    ``all_gather`` and ``psum_scatter`` fail.

    Args:
      refused: ``(name of the primitive, its axes) -> error``.
    """
    exchanges = primitives.all_gather_p, primitives.all_to_all_p, primitives.ppermute_p
    rules = batching.fancy_primitive_batchers
    patches = []
    for primitive in (*exchanges, reduce_scatter_p, pbroadcast_p):
        batch = functools.partial(_batch, primitive, rules[primitive], refused)
        patches.append(replaced(rules, primitive, batch))
    return patches


def _batch(primitive, original, refused, axis_data, operands, dims, **params):
    axes = params["axis_name"]
    if not isinstance(axes, (tuple, list)):
        axes = (axes,)
    binds_one = axis_data.name in axes
    if primitive is primitives.all_to_all_p:
        is_wrong = params["axis_index_groups"] is not None
    else:
        is_wrong = binds_one and (len(axes) > 1 or primitive is pbroadcast_p)
    if is_wrong:
        raise refused(primitive.name, axes)
    if primitive is reduce_scatter_p and not binds_one and dims[0] is not None:
        operands = [jax.numpy.moveaxis(operands[0], dims[0], 0)]
        dims = [0]
    return original(axis_data, operands, dims, **params)


def extremum_gradients(rule: Callable[..., Any], in_body: Callable[[], bool]) -> list[Patch]:
    """Give ``pmax`` and ``pmin`` a derivative inside bodies; JAX has none.

    ``rule(x, tangent, out, axes=, axis_index_groups=)`` gives the tangent of the extremum ``out``.
    """
    patches = []
    for primitive in (primitives.pmax_p, primitives.pmin_p):
        jvp = functools.partial(_extremum_jvp, primitive, rule, in_body)
        patches.append(replaced(ad.primitive_jvps, primitive, jvp))
    return patches


def _extremum_jvp(primitive, rule, in_body, primals, tangents, **params):
    if not in_body():
        raise NotImplementedError(f"Differentiation rule for '{primitive}' not implemented")
    [x] = primals
    [tangent] = tangents
    [out] = bind(primitive, [x], params)
    return out, rule(x, tangent, out, **params)


_Config: Any = type(jax.config)
_update = _Config.update
_read = _Config.read
_values = _Config.values

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
    if name in _remembered:
        return _remembered[name]
    return _read(config, name)


def _values_and_remembered(config):
    return {**_values.fget(config), **_remembered}


def accepted_options(
    defaults: Mapping[str, Any], warnings: Mapping[str, str] = {}
) -> Iterator[Patch]:
    """Options of ``jax.config`` that this JAX lacks can be set, some with a warning, and read, and
    change nothing.
    """
    yield replaced(_Config, "update", _update_or_remember)
    yield replaced(_Config, "read", _read_or_remembered)
    yield replaced(_Config, "values", property(_values_and_remembered))
    for name, text in warnings.items():
        yield replaced(_warnings, name, text)
    for name, default in defaults.items():
        if name not in jax.config.values:
            yield replaced(_remembered, name, default)
            option = property(functools.partial(_read_or_remembered, name=name))
            yield replaced(_Config, name, option)


def set_for_all_threads(context: Any, value: Any) -> None:
    """The value of a ``jax.make_user_context`` where no context is entered; before 0.10.1 in this
    thread only.
    """
    if VERSION >= (0, 10, 1):
        context.set_global(value)
    else:
        context(value).__enter__()
