"""The table of names that JAX has removed since the time of xmap, as plain data: ``check`` reads it
without JAX.

``install()`` restores what the table says, where the JAX that runs lacks it
(:mod:`xmap_compat.legacy.restore`).
The names of xmap itself are not in here: they are in :mod:`xmap_compat.legacy.maps`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

# ALIAS: the same object under its old name; MODULE: a module that moved; ADAPTER: a function of the
# old signature that calls the new one; REFUSED: a name whose meaning is gone, which imports and
# raises at use; ABSENT: install() does not give it.
ALIAS = "alias"
MODULE = "module"
ADAPTER = "adapter"
REFUSED = "refused"
ABSENT = "absent"
INSTALL = "run it under xmap_compat.install()"


@dataclasses.dataclass(frozen=True)
class Removed:
    """A name that was in JAX, or a keyword: ``jax.grad(reduce_axes=)``.

    Attributes:
      name: where it was.
      kind: one of the words above.
      now: what to write today.
    """

    name: str
    kind: str
    now: str

    @property
    def remedy(self) -> str:
        """What to write today, and ``install()`` where that helps."""
        if self.kind in (REFUSED, ABSENT):
            return f"write {self.now}"
        if self.kind in (ALIAS, MODULE, ADAPTER) and self.now != INSTALL:
            return f"write {self.now}, or {INSTALL}"
        return self.now

    @property
    def is_same(self) -> bool:
        """Whether ``now`` can stand where the old name stood."""
        return self.kind in (ALIAS, MODULE) or self.now.isidentifier()


INSIDE = "something else: it is an inside of JAX, without a public place"
CALLBACK = "jax.debug.callback, jax.pure_callback or jax.experimental.io_callback"
GLOBAL_ARRAY = "jax.Array with jax.make_array_from_callback, or xmap_compat.global_array"

# The kind, the names, and what to write today: one text for all names in braces, in which ``{}`` is
# the name.
_ROWS = """
alias   jax.tree_{map leaves flatten unflatten structure transpose} -> jax.tree.{}
alias   jax.treedef_is_leaf -> jax.tree_util.treedef_is_leaf
alias   jax.tree_multimap -> jax.tree.map
adapter jax.{device_put_replicated device_put_sharded} -> jax.device_put
refused jax.clear_backends -> jax.clear_caches
refused jax.xla_computation -> jax.jit(f).lower(*args)
alias   jax.partial -> functools.partial
refused jax.{mask shapecheck} -> code for each shape
refused jax.soft_pmap -> xmap_compat.xmap
refused jax.invertible -> a jax.custom_vjp
refused jax.custom_transforms -> jax.custom_jvp or jax.custom_vjp
refused jax.defvjp -> jax.custom_vjp
refused jax.defjvp -> jax.custom_jvp
alias   jax.ad_checkpoint.{checkpoint remat} -> jax.{}
alias   jax.api.{ShapeDtypeStruct custom_jvp device_count device_get device_put} -> jax.{}
alias   jax.api.{devices eval_shape grad jacfwd jacobian jacrev jit jvp} -> jax.{}
alias   jax.api.{linear_transpose local_device_count make_jaxpr} -> jax.{}
alias   jax.api.{pmap vjp vmap} -> jax.{}
alias   jax.api.tree_{map flatten} -> jax.tree.{}
alias   jax.api.tree_multimap -> jax.tree.map
alias   jax.api.FLAGS -> jax.config
alias   jax.prng.{seed_with_impl threefry_2x32 threefry2x32_p} -> jax.extend.random.{}
alias   jax.random.{threefry_2x32 threefry2x32_p} -> jax.extend.random.{}
alias   jax.core.ConcretizationTypeError -> jax.errors.ConcretizationTypeError
alias   jax.core.{TracerArrayConversionError TracerIntegerConversionError} -> jax.errors.{}
alias   jax.core.UnexpectedTracerError -> jax.errors.UnexpectedTracerError
alias   jax.tree_util.tree_multimap -> jax.tree.map
alias   jax.experimental.PartitionSpec -> jax.sharding.PartitionSpec
adapter jax.experimental.enable_x64 -> jax.enable_x64(True)
adapter jax.experimental.disable_x64 -> jax.enable_x64(False)
module  jax.experimental.{stax optimizers} -> jax.example_libraries.{}
alias   jax.experimental.pjit.PartitionSpec -> jax.sharding.PartitionSpec
adapter jax.experimental.pjit.with_sharding_constraint -> jax.lax.with_sharding_constraint
adapter jax.experimental.pjit.FROM_GDA -> None in in_shardings
alias   jax.interpreters.pxla.PartitionSpec -> jax.sharding.PartitionSpec
alias   jax.interpreters.pxla.ShardedDeviceArray -> jax.Array
alias   jax.sharding.MeshPspecSharding -> jax.sharding.NamedSharding
alias   jax.sharding.XLACompatibleSharding -> jax.sharding.Sharding
refused jax.sharding.PositionalSharding -> jax.sharding.NamedSharding
alias   jax.experimental.sharding.MeshPspecSharding -> jax.sharding.NamedSharding
adapter jax.experimental.global_device_array.GlobalDeviceArray -> GLOBAL_ARRAY
refused jax.experimental.global_device_array.Shard -> GLOBAL_ARRAY
refused jax.interpreters.sharded_jit.sharded_jit -> jax.jit
refused jax.interpreters.sharded_jit.{with_sharding_constraint} -> jax.lax.{}
alias   jax.interpreters.sharded_jit.PartitionSpec -> jax.sharding.PartitionSpec
alias   jax.random.{KeyArray PRNGKeyArray} -> jax.Array
adapter jax.random.shuffle -> jax.random.permutation(key, x, independent=True)
alias   jax.numpy.DeviceArray -> jax.Array
alias   jax.numpy.trapz -> jax.numpy.trapezoid
alias   jax.numpy.row_stack -> jax.numpy.vstack
alias   jax.numpy.product -> jax.numpy.prod
alias   jax.numpy.cumproduct -> jax.numpy.cumprod
alias   jax.numpy.alltrue -> jax.numpy.all
alias   jax.numpy.sometrue -> jax.numpy.any
alias   jax.numpy.round_ -> jax.numpy.round
alias   jax.numpy.fix -> jax.numpy.trunc
adapter jax.numpy.in1d -> jax.numpy.isin(x, y).ravel()
adapter jax.numpy.NINF -> -jax.numpy.inf
adapter jax.numpy.PZERO -> 0.0
adapter jax.numpy.NZERO -> -0.0
alias   jax.numpy.issubsctype -> jax.numpy.issubdtype
alias   jax.lax.zeros_like_array -> jax.numpy.zeros_like
adapter jax.numpy.msort -> jax.numpy.sort(x, axis=0)
alias   jax.interpreters.xla.{DeviceArray _DeviceArray} -> jax.Array
alias   jax.interpreters.xla.canonicalize_dtype -> jax.dtypes.canonicalize_dtype
alias   jax.interpreters.xla.abstractify -> jax.typeof
alias   jax.experimental.array.Array -> jax.Array
alias   jax.lib.xla_bridge.{get_backend get_compile_options} -> jax.extend.backend.{}
alias   jax.lib.xla_bridge.default_backend -> jax.default_backend
alias   jax.lib.xla_bridge.{devices local_devices} -> jax.{}
alias   jax.lib.xla_bridge.host_id -> jax.process_index
alias   jax.lib.xla_bridge.host_count -> jax.process_count
alias   jax.lib.xla_bridge.host_ids -> jax.process_indices
alias   jax.lib.xla_bridge.{device_count local_device_count process_index} -> jax.{}
alias   jax.lib.xla_client.Device -> jax.Device
alias   jax.lib.xla_client.XlaRuntimeError -> jax.errors.JaxRuntimeError
alias   jax.lib.xla_client.ArrayImpl -> jax.Array
refused jax.lib.xla_client.register_custom_call_target -> jax.ffi.register_ffi_target
alias   jax.lib.xla_extension.Device -> jax.Device
alias   jax.lib.xla_extension.ArrayImpl -> jax.Array
alias   jax.lib.xla_extension.XlaRuntimeError -> jax.errors.JaxRuntimeError
alias   jax.core.{Primitive Jaxpr ClosedJaxpr JaxprEqn Literal} -> jax.extend.core.{}
alias   jax.core.{Var Token jaxpr_as_fun} -> jax.extend.core.{}
alias   jax.core.{DropVar Effect Effects JaxprTypeError} -> jax.extend.core.{}
alias   jax.core.{InconclusiveDimensionOperation CallPrimitive} -> jax.extend.core.{}
alias   jax.core.{check_jaxpr concrete_or_error find_top_trace gensym} -> jax.extend.core.{}
alias   jax.core.{jaxprs_in_params new_jaxpr_eqn no_effects} -> jax.extend.core.{}
alias   jax.core.{primal_dtype_to_tangent_dtype valid_jaxtype} -> jax.extend.core.{}
alias   jax.core.{subjaxprs mapped_aval unmapped_aval} -> jax.extend.core.{}
alias   jax.core.get_aval -> jax.typeof
adapter jax.core.raise_to_shaped -> the type as it is: jax.typeof(x)
adapter jax.core.trace_state_clean -> jax.sharding.get_mesh raises while JAX traces
refused jax.core.ConcreteArray -> jax.core.Tracer: what is no tracer is concrete
refused jax.core.{thread_local_state new_base_main cur_sublevel} -> INSIDE
refused jax.core.axis_frame -> jax.lax.axis_size(name)
alias   jax.abstract_arrays.ShapedArray -> jax.core.ShapedArray
adapter jax.abstract_arrays.raise_to_shaped -> the type as it is: jax.typeof(x)
refused jax.abstract_arrays.ConcreteArray -> jax.core.Tracer: what is no tracer is concrete
adapter jax.linear_util.wrap_init -> jax.extend.linear_util.wrap_init(f, debug_info=...)
alias   jax.linear_util.{transformation WrappedFun} -> jax.extend.linear_util.{}
alias   jax.linear_util.{transformation_with_aux} -> jax.extend.linear_util.{}
alias   jax.linear_util.{merge_linear_aux} -> jax.extend.linear_util.{}
adapter jax.util.safe_map -> list(map(f, *lists)), for lists of one length
adapter jax.util.safe_zip -> list(zip(*lists, strict=True))
adapter jax.util.unzip2 -> zip(*pairs)
adapter jax.util.split_list -> slices of a list
adapter jax.util.wraps -> functools.wraps
refused jax.util.{subvals toposort wrap_name cache HashableFunction} -> INSIDE
alias   jax.util.partial -> functools.partial
alias   jax.config.config -> jax.config
alias   jax.config.FLAGS -> jax.config
adapter jax.experimental.x64_context.enable_x64 -> jax.enable_x64(True)
adapter jax.experimental.x64_context.disable_x64 -> jax.enable_x64(False)
refused jax.experimental.host_callback.{call id_tap} -> CALLBACK
refused jax.experimental.host_callback.{id_print barrier_wait} -> CALLBACK
refused jax.experimental.host_callback.stop_outfeed_receiver -> CALLBACK
refused jax.experimental.host_callback.CallbackException -> CALLBACK
refused jax.experimental.loops.Scope -> jax.lax.fori_loop, scan or cond
adapter jax.ops.index -> x.at[...]
adapter jax.ops.index_update -> x.at[index].set(values)
adapter jax.ops.index_add -> x.at[index].add(values)
adapter jax.ops.index_mul -> x.at[index].multiply(values)
adapter jax.ops.index_min -> x.at[index].min(values)
adapter jax.ops.index_max -> x.at[index].max(values)
adapter jax.lax.tie_in -> the second argument alone
alias   jax.profiler.trace_function -> jax.profiler.annotate_function
alias   jax.profiler.TraceContext -> jax.profiler.TraceAnnotation
alias   jax.profiler.StepTraceContext -> jax.profiler.StepTraceAnnotation
alias   jax.nn.normalize -> jax.nn.standardize
alias   jax.scipy.linalg.{tril triu} -> jax.numpy.{}
"""


_TEXTS = {
    "INSIDE": INSIDE,
    "CALLBACK": CALLBACK,
    "GLOBAL_ARRAY": GLOBAL_ARRAY,
    "REDUCE_AXES": "lax.psum(gradient, axes) in a body; outside, leave it out",
}
_ROW = re.compile(r"(\w+) +([\w.]*)(?:\{([^}]*)\})?(\([^)]*\))? *-> (.*)")


def read(rows: str) -> Iterator[Removed]:
    """The names of a table."""
    for kind, module, several, keyword, now in _ROW.findall(rows):
        for name in several.split() or [""]:
            text = _TEXTS.get(now, now).replace("{}", name)
            yield Removed(f"{module}{name}{keyword}", kind, text)


TABLE = [*read(_ROWS)]
QUANTILES = ("quantile", "nanquantile", "percentile", "nanpercentile")
KEYWORDS = [
    *read(f"adapter jax.numpy.{{{' '.join(QUANTILES)}}}(interpolation=) -> method"),
    *read("""
adapter jax.experimental.pjit.pjit(in_axis_resources=) -> in_shardings
adapter jax.experimental.pjit.pjit(out_axis_resources=) -> out_shardings
adapter jax.experimental.pjit.with_sharding_constraint(axis_resources=) -> shardings
adapter jax.pure_callback(vectorized=) -> vmap_method='broadcast_all' for True, or 'sequential'
adapter jax.ShapeDtypeStruct(named_shape=) -> nothing: names are read from in_axes
adapter jax.core.ShapedArray(named_shape=) -> nothing: names are those of the operands
adapter jax.numpy.reshape(newshape=) -> shape
adapter jax.numpy.clip(a=) -> the array as the first argument
adapter jax.numpy.clip(a_min=) -> min
adapter jax.numpy.clip(a_max=) -> max
refused jax.{checkpoint remat ad_checkpoint.checkpoint}(concrete=) -> static_argnums, or none
refused jax.{grad value_and_grad vjp}(reduce_axes=) -> REDUCE_AXES
"""),
]

# Options that can be set.  Those of xmap have no effect; setting the first one warns.
SPMD_LOWERING = "experimental_xmap_spmd_lowering"
XMAP_OPTIONS = (
    SPMD_LOWERING,
    "experimental_xmap_spmd_lowering_manual",
    "experimental_xmap_ensure_fixed_sharding",
)
# Other options: JAX has only the behaviour that programs asked for with them, or they served
# removed features.
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
