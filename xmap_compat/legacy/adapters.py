"""Functions with their old signatures, which call the functions of today; and names that are
refused at use.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.linear_util
import jax.numpy as jnp
import numpy as np

from xmap_compat.core import placement
from xmap_compat.legacy import removed

P = jax.sharding.PartitionSpec
UNSET: Any = object()

# ------------------------------------------------------------------------------ partitioning


FROM_GDA = object()  # as the argument lies


def _specs(resources: Any, of_none: Any = P()) -> Any:
    """Shardings of today: None meant "whole on every device" of a mesh in scope, and now means "as
    it comes".
    """

    def spec(x):
        if x is FROM_GDA:
            return None
        return of_none if x is None else x

    return jax.tree.map(spec, resources, is_leaf=_is_none)


def _is_none(x):
    return x is None


def pjit(
    fun,
    in_axis_resources=UNSET,
    out_axis_resources=UNSET,
    static_argnums=None,
    donate_argnums=None,
    **options,
):
    """``jax.experimental.pjit.pjit`` with ``in_axis_resources`` and ``out_axis_resources`` (or,
    later, shardings).
    """
    options.update(static_argnums=static_argnums, donate_argnums=donate_argnums)
    given = {}
    for keyword, by_old_name in (
        ("in_shardings", in_axis_resources),
        ("out_shardings", out_axis_resources),
    ):
        resources = options.pop(keyword, by_old_name)
        if resources is not UNSET:
            given[keyword] = resources
    on_mesh = {keyword: _specs(resources) for keyword, resources in given.items()}
    without = {keyword: _specs(resources, None) for keyword, resources in given.items()}
    jitted = jax.jit(fun, **options, **on_mesh)
    if on_mesh == without:
        return jitted
    return _WithOrWithoutMesh(jitted, jax.jit(fun, **options, **without))


class _WithOrWithoutMesh:
    """A jitted function for which None has one meaning on a mesh, and another without."""

    def __init__(self, on_mesh: Any, without: Any):
        functools.update_wrapper(self, on_mesh)
        self._on_mesh = on_mesh
        self._without = without

    def _jitted(self) -> Any:
        if placement.current_scope().mesh is None:
            return self._without
        return self._on_mesh

    def __call__(self, *args, **kwargs):
        return self._jitted()(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._jitted(), name)


def with_sharding_constraint(x: Any, axis_resources: Any = UNSET, *, shardings: Any = UNSET) -> Any:
    """The function of ``jax.experimental.pjit``, with ``axis_resources``."""
    if shardings is UNSET:
        shardings = _specs(axis_resources)
    return jax.lax.with_sharding_constraint(x, shardings)


class _JaxArrays(type):
    def __instancecheck__(cls, x):
        return isinstance(x, jax.Array)

    def __getattr__(cls, name):
        raise _removed_name(f"{cls.__name__}.{name}", removed.GLOBAL_ARRAY)


class GlobalDeviceArray(metaclass=_JaxArrays):
    """``jax.Array`` under its earlier name, made as it was made then."""

    def __new__(cls, global_shape, global_mesh, mesh_axes, device_buffers):
        sharding = jax.sharding.NamedSharding(global_mesh, P(*mesh_axes))
        shape = tuple(global_shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(device_buffers))

    @staticmethod
    def from_callback(global_shape, global_mesh, mesh_axes, data_callback):
        sharding = jax.sharding.NamedSharding(global_mesh, P(*mesh_axes))
        return jax.make_array_from_callback(tuple(global_shape), sharding, data_callback)

    @classmethod
    def from_batched_callback(cls, global_shape, global_mesh, mesh_axes, data_callback):
        sharding = jax.sharding.NamedSharding(global_mesh, P(*mesh_axes))
        indices = sharding.addressable_devices_indices_map(tuple(global_shape))
        buffers = map(jax.device_put, data_callback(tuple(indices.values())), indices)
        return cls(global_shape, global_mesh, mesh_axes, buffers)


def device_put_replicated(x: Any, devices: Sequence[jax.Device]) -> Any:
    """Put each leaf once on each device, in a new leading dimension."""
    return device_put_sharded([x] * len(devices), devices)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """Put one shard on each device, in a new leading dimension."""
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    one_each = jax.sharding.NamedSharding(mesh, P("devices"))

    def put(*leaves):
        stacked = jnp.stack([jnp.asarray(leaf) for leaf in leaves])
        return jax.device_put(stacked, one_each)

    return jax.tree.map(put, *shards)


# -------------------------------------------------------------------------------- callbacks


def _pure_callback_or(pure_callback: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.pure_callback`` that takes ``vectorized``, and calls the function for each element by
    default.
    """

    @functools.wraps(pure_callback)
    def pure_callback_for_each_element(*args, **kwargs):
        if "vectorized" in kwargs and "vmap_method" in kwargs:
            raise _vectorized_and_vmap_method(kwargs["vectorized"], kwargs["vmap_method"])
        if kwargs.pop("vectorized", False):
            kwargs["vmap_method"] = "legacy_vectorized"
        kwargs.setdefault("vmap_method", "sequential")
        return pure_callback(*args, **kwargs)

    return pure_callback_for_each_element


# ------------------------------------------------------------------- numbers, trees and types


def renamed(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a function old names for keywords; each stands for the one of
    today.
    """

    def extend(function):
        @functools.wraps(function)
        def by_old_names(*args, **kwargs):
            options = {names.get(name, name): value for name, value in kwargs.items()}
            return function(*args, **options)

        return by_old_names

    return extend


def _clip_or(clip: Callable[..., Any]) -> Callable[..., Any]:
    """``jnp.clip`` that takes ``a``, ``a_min`` and ``a_max`` as well."""
    by_old_names = renamed(a_min="min", a_max="max")(clip)

    @functools.wraps(clip)
    def clip_with_a(*args, **kwargs):
        if "a" in kwargs:
            args = (kwargs.pop("a"), *args)
        return by_old_names(*args, **kwargs)

    return clip_with_a


def _array_or(array: Callable[..., Any]) -> Callable[..., Any]:
    """``jnp.array`` and ``asarray`` for which ``None`` is NaN."""

    @functools.wraps(array)
    def array_of_none(object, *args, **kwargs):
        try:
            return array(object, *args, **kwargs)
        except ValueError:
            leaves, tree = jax.tree.flatten(object, is_leaf=_is_none)
            if not any(map(_is_none, leaves)):
                raise
        numbers = [np.nan if leaf is None else leaf for leaf in leaves]
        return array(jax.tree.unflatten(tree, numbers), *args, **kwargs)

    return array_of_none


def raise_to_shaped(aval: Any, weak_type: bool | None = None) -> Any:
    """A type without the value that types could have."""
    if weak_type is None:
        return aval
    return aval.update(weak_type=weak_type)


def wrap_init(fun: Callable[..., Any], params: dict[str, Any] | None = None) -> Any:
    """The function of ``jax.linear_util``, without debugging information."""
    api_util: Any = jax.api_util
    nothing_known = api_util.debug_info("wrap_init", fun, (), {})
    return jax.extend.linear_util.wrap_init(fun, params, debug_info=nothing_known)


def _update(operation):
    def update(x, index, y, indices_are_sorted=False, unique_indices=False, **options):
        at: Any = jnp.asarray(x).at[index]
        options.update(indices_are_sorted=indices_are_sorted, unique_indices=unique_indices)
        return getattr(at, operation)(y, **options)

    return update


def without_names(constructor: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The constructor of a type, which takes ``named_shape`` by keyword or at a position, and does
    not keep it.

    What a value varies over is known from its operands, whatever a program says of it.
    """

    @functools.wraps(constructor)
    def construct(made, *args, named_shape=None, **kwargs):
        return constructor(made, *args[:position], *args[position + 1 :], **kwargs)

    return construct


def trace_state_clean() -> bool:
    """Whether nothing is traced or transformed now."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return False
    return True


def safe_zip(*lists: Any) -> list[Any]:
    return list(zip(*map(list, lists), strict=True))


def safe_map(f: Callable[..., Any], *lists: Any) -> list[Any]:
    return [f(*items) for items in safe_zip(*lists)]


def unzip2(pairs: Any) -> tuple[Any, ...]:
    return tuple(zip(*pairs)) or ((), ())


def split_list(args: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Pieces of these lengths, and the rest."""
    ends = [0, *itertools.accumulate(lengths), len(args)]
    return [list(args[begin:end]) for begin, end in itertools.pairwise(ends)]


def enable_x64(new_val: bool = True) -> Any:
    return jax.enable_x64(new_val)


def disable_x64() -> Any:
    return jax.enable_x64(False)


def shuffle(key: Any, x: Any, axis: int = 0) -> Any:
    return jax.random.permutation(key, x, axis, independent=True)


def in1d(ar1: Any, ar2: Any, *args: Any, **kwargs: Any) -> Any:
    return jnp.isin(jnp.ravel(ar1), ar2, *args, **kwargs)


# By the names under which programs find them.
ADAPTERS: dict[str, Any] = {
    "jax.core.trace_state_clean": trace_state_clean,
    "jax.util.safe_map": safe_map,
    "jax.util.safe_zip": safe_zip,
    "jax.util.unzip2": unzip2,
    "jax.util.split_list": split_list,
    "jax.util.wraps": functools.wraps,
    "jax.experimental.pjit.with_sharding_constraint": with_sharding_constraint,
    "jax.experimental.pjit.FROM_GDA": FROM_GDA,
    "jax.experimental.global_device_array.GlobalDeviceArray": GlobalDeviceArray,
    "jax.device_put_replicated": device_put_replicated,
    "jax.device_put_sharded": device_put_sharded,
    "jax.core.raise_to_shaped": raise_to_shaped,
    "jax.abstract_arrays.raise_to_shaped": raise_to_shaped,
    "jax.linear_util.wrap_init": wrap_init,
    "jax.experimental.enable_x64": enable_x64,
    "jax.experimental.disable_x64": disable_x64,
    "jax.experimental.x64_context.enable_x64": enable_x64,
    "jax.experimental.x64_context.disable_x64": disable_x64,
    "jax.ops.index": np.s_,
    "jax.ops.index_update": _update("set"),
    "jax.ops.index_mul": _update("multiply"),
    "jax.ops.index_add": _update("add"),
    "jax.ops.index_min": _update("min"),
    "jax.ops.index_max": _update("max"),
    "jax.lax.tie_in": lambda x, y: y,
    "jax.random.shuffle": shuffle,
    "jax.numpy.in1d": in1d,
    "jax.numpy.msort": lambda a: jnp.sort(a, axis=0),
    "jax.numpy.NINF": -jnp.inf,
    "jax.numpy.PZERO": 0.0,
    "jax.numpy.NZERO": -0.0,
}

# Functions of JAX that lack something that they had: module, name, and replacement.
EXTENDED: list[tuple[str, str, Callable[[Any], Any]]] = [
    # Those of JAX warn of a name that the program has not written.
    ("jax", "host_id", lambda host_id: jax.process_index),
    ("jax", "host_count", lambda host_count: jax.process_count),
    ("jax", "host_ids", lambda host_ids: jax.process_indices),
    ("jax", "pure_callback", _pure_callback_or),
    ("jax.numpy", "clip", _clip_or),
    ("jax.numpy", "reshape", renamed(newshape="shape")),
    *(("jax.numpy", name, renamed(interpolation="method")) for name in removed.QUANTILES),
    ("jax.numpy", "array", _array_or),
    ("jax.numpy", "asarray", _array_or),
]

# -------------------------------------------------------------------------- refused at use


class _Refused(type):
    """The type of a name that can be imported, compared and asked about by ``isinstance``, and
    raises at use.
    """

    now: str

    def __call__(cls, *args, **kwargs):
        raise _removed_name(f"{cls.__module__}.{cls.__name__}", cls.now)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise _removed_name(f"{cls.__module__}.{cls.__name__}.{name}", cls.now)


@functools.cache
def refused(name: str, now: str) -> Any:
    """The object at an old name whose meaning is gone."""
    module, _, attribute = name.rpartition(".")
    doc = f"Removed from JAX: write {now}."
    return _Refused(attribute, (), {"__module__": module, "__doc__": doc, "now": now})


# ----------------------------------------------------------------------------- messages


def _vectorized_and_vmap_method(vectorized: Any, vmap_method: Any) -> ValueError:
    return ValueError(
        f"jax.pure_callback got vectorized={vectorized!r} and vmap_method={vmap_method!r}, but "
        "both say how the callback is mapped. Give one of them: vmap_method, or in an old program "
        "vectorized"
    )


def _removed_name(name: str, now: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is no longer in JAX, and nothing with the same meaning takes its place. Under "
        f"xmap_compat.install() it can be imported, but not used. Today, write {now}."
    )
