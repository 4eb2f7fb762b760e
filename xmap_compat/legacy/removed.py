"""The table of what JAX has removed since the time of xmap, as plain data: ``check`` reads it without JAX.

``install()`` restores what the table says, where the JAX that runs lacks it (:mod:`xmap_compat.legacy.restore`).
The family of xmap itself is not in here: that is :mod:`xmap_compat.legacy.maps`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

ALIAS, MODULE, ADAPTER, REFUSED = "alias", "module", "adapter", "refused"


@dataclasses.dataclass(frozen=True)
class Removed:
    """A name that was in JAX.

    Attributes:
      name: where it was.
      until: the last of the releases looked at that has it.
      kind: ALIAS, the same object under its old name; MODULE, a module that moved; ADAPTER, a function of the old
        signature that calls the new one; or REFUSED, what meant something else: it can be imported, and raises at use.
      now: what to write today.
    """

    name: str
    until: str
    kind: str
    now: str


def _moved(kind: str, until: str, module: str, names: dict[str, str]) -> list[Removed]:
    return [Removed(f"{module}.{name}", until, kind, now) for name, now in names.items()]


def _each(names: str, now: str) -> dict[str, str]:
    """The same advice for several names; ``{}`` stands for the name."""
    return {name: now.replace("{}", name) for name in names.split()}


ARRAY, SPEC, SHARDING = "jax.Array", "jax.sharding.PartitionSpec", "jax.sharding.NamedSharding"
EXTEND = "jax.extend.core.{}"
INSIDE = "something else: it is an inside of JAX, without a public place"
CALLBACK = "jax.debug.callback, jax.pure_callback or jax.experimental.io_callback"
HOSTS = {"host_id": "jax.process_index", "host_count": "jax.process_count", "host_ids": "jax.process_indices"}
GLOBAL_ARRAY = "jax.Array with jax.make_array_from_callback, or xmap_compat.global_array"

# By module, and by the last release looked at (0.2.10 to 0.10.2) that has the names.
TABLE = [
    *_moved(
        ALIAS,
        "0.5.0",
        "jax",
        {
            "tree_map": "jax.tree.map",
            "tree_leaves": "jax.tree.leaves",
            "tree_flatten": "jax.tree.flatten",
            "tree_unflatten": "jax.tree.unflatten",
            "tree_structure": "jax.tree.structure",
            "tree_transpose": "jax.tree.transpose",
            "treedef_is_leaf": "jax.tree_util.treedef_is_leaf",
        },
    ),
    *_moved(ALIAS, "0.3.15", "jax", {"tree_multimap": "jax.tree.map"}),
    *_moved(ADAPTER, "0.9.0", "jax", _each("device_put_replicated device_put_sharded", "jax.device_put")),
    *_moved(REFUSED, "0.4.35", "jax", {"clear_backends": "jax.clear_caches"}),
    *_moved(REFUSED, "0.4.33", "jax", {"xla_computation": "jax.jit(f).lower(*args)"}),
    *_moved(ALIAS, "0.2.10", "jax", {"partial": "functools.partial"}),
    *_moved(
        REFUSED, "0.3.15", "jax", {**_each("mask shapecheck", "code for each shape"), "soft_pmap": "xmap_compat.xmap"}
    ),
    *_moved(REFUSED, "0.3.1", "jax", {"invertible": "a jax.custom_vjp"}),
    *_moved(
        REFUSED,
        "0.2.10",
        "jax",
        {
            "custom_transforms": "jax.custom_jvp or jax.custom_vjp",
            "defvjp": "jax.custom_vjp",
            "defjvp": "jax.custom_jvp",
        },
    ),
    *_moved(ALIAS, "0.9.2", "jax.ad_checkpoint", _each("checkpoint remat", "jax.{}")),
    *_moved(
        ALIAS,
        "0.2.20",
        "jax.api",
        {
            **_each(
                "ShapeDtypeStruct custom_jvp device_count device_get device_put devices eval_shape grad jacfwd "
                "jacobian jacrev jit jvp linear_transpose local_device_count make_jaxpr pmap vjp vmap",
                "jax.{}",
            ),
            **{f"tree_{name}": f"jax.tree.{name}" for name in ("map", "flatten")},
            "tree_multimap": "jax.tree.map",
            "FLAGS": "jax.config",
        },
    ),
    *_moved(ALIAS, "0.4.14", "jax.prng", _each("seed_with_impl threefry_2x32 threefry2x32_p", "jax.extend.random.{}")),
    *_moved(ALIAS, "0.4.14", "jax.random", _each("threefry_2x32 threefry2x32_p", "jax.extend.random.{}")),
    *_moved(ALIAS, "0.4.30", "jax.core", {"ConcretizationTypeError": "jax.errors.ConcretizationTypeError"}),
    *_moved(
        ALIAS,
        "0.4.14",
        "jax.core",
        _each("TracerArrayConversionError TracerIntegerConversionError UnexpectedTracerError", "jax.errors.{}"),
    ),
    *_moved(ALIAS, "0.3.15", "jax.tree_util", {"tree_multimap": "jax.tree.map"}),
    *_moved(ALIAS, "0.4.8", "jax.experimental", {"PartitionSpec": SPEC}),
    *_moved(
        ADAPTER,
        "0.8.0",
        "jax.experimental",
        {"enable_x64": "jax.enable_x64(True)", "disable_x64": "jax.enable_x64(False)"},
    ),
    *_moved(MODULE, "0.3.15", "jax.experimental", _each("stax optimizers", "jax.example_libraries.{}")),
    *_moved(ALIAS, "0.4.8", "jax.experimental.pjit", {"PartitionSpec": SPEC}),
    *_moved(
        ADAPTER, "0.4.20", "jax.experimental.pjit", {"with_sharding_constraint": "jax.lax.with_sharding_constraint"}
    ),
    *_moved(REFUSED, "0.3.25", "jax.experimental.pjit", {"FROM_GDA": GLOBAL_ARRAY}),
    *_moved(ALIAS, "0.4.8", "jax.interpreters.pxla", {"PartitionSpec": SPEC}),
    *_moved(ALIAS, "0.4.11", "jax.interpreters.pxla", {"ShardedDeviceArray": ARRAY}),
    *_moved(ALIAS, "0.4.2", "jax.sharding", {"MeshPspecSharding": SHARDING}),
    *_moved(ALIAS, "0.4.33", "jax.sharding", {"XLACompatibleSharding": "jax.sharding.Sharding"}),
    *_moved(REFUSED, "0.6.0", "jax.sharding", {"PositionalSharding": SHARDING}),
    *_moved(ALIAS, "0.3.15", "jax.experimental.sharding", {"MeshPspecSharding": SHARDING}),
    *_moved(REFUSED, "0.4.2", "jax.experimental.global_device_array", _each("GlobalDeviceArray Shard", GLOBAL_ARRAY)),
    *_moved(
        REFUSED,
        "0.3.15",
        "jax.interpreters.sharded_jit",
        {"sharded_jit": "jax.jit", "with_sharding_constraint": "jax.lax.with_sharding_constraint"},
    ),
    *_moved(ALIAS, "0.3.15", "jax.interpreters.sharded_jit", {"PartitionSpec": SPEC}),
    *_moved(ALIAS, "0.4.20", "jax.random", _each("KeyArray PRNGKeyArray", ARRAY)),
    *_moved(ADAPTER, "0.4.30", "jax.random", {"shuffle": "jax.random.permutation(key, x, independent=True)"}),
    *_moved(ALIAS, "0.4.11", "jax.numpy", {"DeviceArray": ARRAY}),
    *_moved(ALIAS, "0.4.20", "jax.numpy", {"trapz": "jax.numpy.trapezoid", "row_stack": "jax.numpy.vstack"}),
    *_moved(
        ALIAS,
        "0.4.14",
        "jax.numpy",
        {
            "product": "jax.numpy.prod",
            "cumproduct": "jax.numpy.cumprod",
            "alltrue": "jax.numpy.all",
            "sometrue": "jax.numpy.any",
        },
    ),
    *_moved(ALIAS, "0.4.36", "jax.numpy", {"round_": "jax.numpy.round"}),
    *_moved(ALIAS, "0.9.0", "jax.numpy", {"fix": "jax.numpy.trunc"}),
    *_moved(ADAPTER, "0.4.20", "jax.numpy", {"in1d": "jax.numpy.isin(x, y).ravel()", "NINF": "-jax.numpy.inf"}),
    *_moved(ADAPTER, "0.4.14", "jax.numpy", {"PZERO": "0.0", "NZERO": "-0.0"}),
    *_moved(ALIAS, "0.4.14", "jax.numpy", {"issubsctype": "jax.numpy.issubdtype"}),
    *_moved(ALIAS, "0.4.30", "jax.lax", {"zeros_like_array": "jax.numpy.zeros_like"}),
    *_moved(ADAPTER, "0.4.8", "jax.numpy", {"msort": "jax.numpy.sort(x, axis=0)"}),
    *_moved(ALIAS, "0.4.8", "jax.interpreters.xla", _each("DeviceArray _DeviceArray", ARRAY)),
    *_moved(ALIAS, "0.7.0", "jax.interpreters.xla", {"canonicalize_dtype": "jax.dtypes.canonicalize_dtype"}),
    *_moved(ALIAS, "0.6.0", "jax.interpreters.xla", {"abstractify": "jax.typeof"}),
    *_moved(ALIAS, "0.3.15", "jax.experimental.array", {"Array": ARRAY}),
    *_moved(ALIAS, "0.7.0", "jax.lib.xla_bridge", _each("get_backend get_compile_options", "jax.extend.backend.{}")),
    *_moved(ALIAS, "0.4.36", "jax.lib.xla_bridge", {"default_backend": "jax.default_backend"}),
    *_moved(ALIAS, "0.2.10", "jax.lib.xla_bridge", {**_each("devices local_devices", "jax.{}"), **HOSTS}),
    *_moved(ALIAS, "0.4.2", "jax.lib.xla_bridge", _each("device_count local_device_count process_index", "jax.{}")),
    *_moved(
        ALIAS, "0.4.38", "jax.lib.xla_client", {"Device": "jax.Device", "XlaRuntimeError": "jax.errors.JaxRuntimeError"}
    ),
    *_moved(ALIAS, "0.5.0", "jax.lib.xla_client", {"ArrayImpl": ARRAY}),
    *_moved(REFUSED, "0.5.0", "jax.lib.xla_client", {"register_custom_call_target": "jax.ffi.register_ffi_target"}),
    *_moved(ALIAS, "0.6.0", "jax.lib.xla_extension", {"Device": "jax.Device"}),
    *_moved(
        ALIAS, "0.5.0", "jax.lib.xla_extension", {"ArrayImpl": ARRAY, "XlaRuntimeError": "jax.errors.JaxRuntimeError"}
    ),
    *_moved(
        ALIAS, "0.5.0", "jax.core", _each("Primitive Jaxpr ClosedJaxpr JaxprEqn Literal Var Token jaxpr_as_fun", EXTEND)
    ),
    *_moved(
        ALIAS,
        "0.10.0",
        "jax.core",
        _each(
            "DropVar Effect Effects InconclusiveDimensionOperation JaxprTypeError CallPrimitive check_jaxpr "
            "concrete_or_error find_top_trace gensym jaxprs_in_params new_jaxpr_eqn no_effects "
            "primal_dtype_to_tangent_dtype valid_jaxtype",
            EXTEND,
        ),
    ),
    *_moved(
        ALIAS, "0.9.0", "jax.core", {**_each("subjaxprs mapped_aval unmapped_aval", EXTEND), "get_aval": "jax.typeof"}
    ),
    *_moved(ADAPTER, "0.5.0", "jax.core", {"raise_to_shaped": "the type as it is: jax.typeof(x)"}),
    *_moved(ADAPTER, "0.6.0", "jax.core", {"trace_state_clean": "jax.sharding.get_mesh raises while JAX traces"}),
    *_moved(
        REFUSED,
        "0.4.35",
        "jax.core",
        {
            "ConcreteArray": "jax.core.Tracer: what is no tracer is concrete",
            **_each("thread_local_state new_base_main cur_sublevel", INSIDE),
        },
    ),
    *_moved(REFUSED, "0.6.0", "jax.core", {"axis_frame": "jax.lax.axis_size(name)"}),
    *_moved(ALIAS, "0.4.14", "jax.abstract_arrays", {"ShapedArray": "jax.core.ShapedArray"}),
    *_moved(ADAPTER, "0.4.14", "jax.abstract_arrays", {"raise_to_shaped": "the type as it is: jax.typeof(x)"}),
    *_moved(
        REFUSED, "0.2.10", "jax.abstract_arrays", {"ConcreteArray": "jax.core.Tracer: what is no tracer is concrete"}
    ),
    *_moved(ADAPTER, "0.4.20", "jax.linear_util", {"wrap_init": "jax.extend.linear_util.wrap_init(f, debug_info=...)"}),
    *_moved(
        ALIAS,
        "0.4.20",
        "jax.linear_util",
        _each("transformation transformation_with_aux merge_linear_aux WrappedFun", "jax.extend.linear_util.{}"),
    ),
    *_moved(
        ADAPTER,
        "0.6.0",
        "jax.util",
        {
            "safe_map": "list(map(f, *lists)), for lists of one length",
            "safe_zip": "list(zip(*lists, strict=True))",
            "unzip2": "zip(*pairs)",
            "split_list": "slices of a list",
            "wraps": "functools.wraps",
        },
    ),
    *_moved(REFUSED, "0.6.0", "jax.util", _each("subvals toposort wrap_name cache HashableFunction", INSIDE)),
    *_moved(ALIAS, "0.2.10", "jax.util", {"partial": "functools.partial"}),
    *_moved(ALIAS, "0.4.20", "jax.config", {"config": "jax.config"}),
    *_moved(ALIAS, "0.2.10", "jax.config", {"FLAGS": "jax.config"}),
    *_moved(
        ADAPTER,
        "0.8.0",
        "jax.experimental.x64_context",
        {"enable_x64": "jax.enable_x64(True)", "disable_x64": "jax.enable_x64(False)"},
    ),
    *_moved(REFUSED, "0.7.0", "jax.experimental.host_callback", _each("call id_tap", CALLBACK)),
    *_moved(
        REFUSED,
        "0.4.33",
        "jax.experimental.host_callback",
        _each("id_print barrier_wait stop_outfeed_receiver CallbackException", CALLBACK),
    ),
    *_moved(REFUSED, "0.3.15", "jax.experimental.loops", {"Scope": "jax.lax.fori_loop, scan or cond"}),
    *_moved(
        ADAPTER,
        "0.3.1",
        "jax.ops",
        {
            "index": "x.at[...]",
            "index_update": "x.at[index].set(values)",
            "index_add": "x.at[index].add(values)",
            "index_mul": "x.at[index].multiply(values)",
            "index_min": "x.at[index].min(values)",
            "index_max": "x.at[index].max(values)",
        },
    ),
    *_moved(ADAPTER, "0.4.28", "jax.lax", {"tie_in": "the second argument alone"}),
    *_moved(
        ALIAS,
        "0.3.1",
        "jax.profiler",
        {"TraceContext": "jax.profiler.TraceAnnotation", "StepTraceContext": "jax.profiler.StepTraceAnnotation"},
    ),
    *_moved(ALIAS, "0.4.28", "jax.nn", {"normalize": "jax.nn.standardize"}),
    *_moved(ALIAS, "0.4.20", "jax.scipy.linalg", _each("tril triu", "jax.numpy.{}")),
]


@dataclasses.dataclass(frozen=True)
class Keyword:
    """A keyword that a function of JAX took; ``kind`` and ``now`` as those of :class:`Removed`."""

    function: str
    keyword: str
    kind: str
    now: str


QUANTILES = ("quantile", "nanquantile", "percentile", "nanpercentile")
_PJIT, _CLIP = "jax.experimental.pjit.pjit", "jax.numpy.clip"
KEYWORDS = [
    Keyword(_PJIT, "in_axis_resources", ADAPTER, "in_shardings"),
    Keyword(_PJIT, "out_axis_resources", ADAPTER, "out_shardings"),
    Keyword("jax.experimental.pjit.with_sharding_constraint", "axis_resources", ADAPTER, "shardings"),
    Keyword("jax.pure_callback", "vectorized", ADAPTER, "vmap_method='broadcast_all' for True, 'sequential' for False"),
    Keyword("jax.pure_callback", "without vmap_method", ADAPTER, "vmap_method='sequential'"),
    Keyword("jax.ShapeDtypeStruct", "named_shape", ADAPTER, "nothing: names are read from in_axes"),
    Keyword("jax.core.ShapedArray", "named_shape", ADAPTER, "nothing: names are those of the operands"),
    Keyword("jax.numpy.reshape", "newshape", ADAPTER, "shape"),
    *(Keyword(f"jax.numpy.{name}", "interpolation", ADAPTER, "method") for name in QUANTILES),
    Keyword(_CLIP, "a", ADAPTER, "the array as the first argument"),
    Keyword(_CLIP, "a_min", ADAPTER, "min"),
    Keyword(_CLIP, "a_max", ADAPTER, "max"),
    *(
        Keyword(f"jax.{function}", "concrete", REFUSED, "static_argnums, or leave it out")
        for function in ("checkpoint", "remat", "ad_checkpoint.checkpoint")
    ),
    *(
        Keyword(f"jax.{function}", "reduce_axes", REFUSED, "jax.grad(xmap(loss, ...)): from outside it is exact")
        for function in ("grad", "value_and_grad", "vjp")
    ),
]

# Options that can be set.  Those of xmap: the first one leaves mesh axes to the compiler, others have no effect.
SPMD_LOWERING = "experimental_xmap_spmd_lowering"
XMAP_OPTIONS = (
    SPMD_LOWERING,
    "experimental_xmap_spmd_lowering_manual",
    "experimental_xmap_ensure_fixed_sharding",
)
# And others: there is one behaviour, that which programs asked for with them, or they served what is gone.
OPTIONS: dict[str, Any] = {
    "jax_spmd_mode": "allow_all",
    "jax_array": True,
    "jax_jit_pjit_api_merge": True,
    "jax_parallel_functions_output_gda": False,
    "jax_experimental_name_stack": True,
    "jax_omnistaging": True,
    "jax_enable_mlir": True,
    "jax_host_callback_inline": False,
    "jax_host_callback_outfeed": False,
    "jax_host_callback_ad_transforms": False,
    "jax_coordination_service": True,
}

NAMES = {row.name: row for row in TABLE}
KEYWORDS_BY_NAME = {(row.function, row.keyword): row for row in KEYWORDS}
MODULES = sorted({row.name.rpartition(".")[0] for row in TABLE})
# Modules of the table that are gone as a whole.
GONE_MODULES = {
    "jax.abstract_arrays",
    "jax.api",
    "jax.experimental.array",
    "jax.experimental.global_device_array",
    "jax.experimental.host_callback",
    "jax.experimental.loops",
    "jax.experimental.sharding",
    "jax.experimental.x64_context",
    "jax.interpreters.sharded_jit",
    "jax.lib.xla_bridge",
    "jax.lib.xla_client",
    "jax.lib.xla_extension",
    "jax.linear_util",
    "jax.prng",
    "jax.util",
}
