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
      until: the last of the releases looked at that has it.
      kind: one of the words above.
      now: what to write today.
    """

    name: str
    until: str
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

# The kind, the last release looked at (0.2.10 to 0.10.2) that has the names, the names, and what to
# write today: one text for all names in braces, in which ``{}`` is the name.
_ROWS = """
alias   0.5.0   jax.tree_{map leaves flatten unflatten structure transpose} -> jax.tree.{}
alias   0.5.0   jax.treedef_is_leaf -> jax.tree_util.treedef_is_leaf
alias   0.3.15  jax.tree_multimap -> jax.tree.map
adapter 0.9.0   jax.{device_put_replicated device_put_sharded} -> jax.device_put
refused 0.4.35  jax.clear_backends -> jax.clear_caches
refused 0.4.33  jax.xla_computation -> jax.jit(f).lower(*args)
alias   0.2.10  jax.partial -> functools.partial
refused 0.3.15  jax.{mask shapecheck} -> code for each shape
refused 0.3.15  jax.soft_pmap -> xmap_compat.xmap
refused 0.3.1   jax.invertible -> a jax.custom_vjp
refused 0.2.10  jax.custom_transforms -> jax.custom_jvp or jax.custom_vjp
refused 0.2.10  jax.defvjp -> jax.custom_vjp
refused 0.2.10  jax.defjvp -> jax.custom_jvp
alias   0.9.2   jax.ad_checkpoint.{checkpoint remat} -> jax.{}
alias   0.2.20  jax.api.{ShapeDtypeStruct custom_jvp device_count device_get device_put} -> jax.{}
alias   0.2.20  jax.api.{devices eval_shape grad jacfwd jacobian jacrev jit jvp} -> jax.{}
alias   0.2.20  jax.api.{linear_transpose local_device_count make_jaxpr} -> jax.{}
alias   0.2.20  jax.api.{pmap vjp vmap} -> jax.{}
alias   0.2.20  jax.api.tree_{map flatten} -> jax.tree.{}
alias   0.2.20  jax.api.tree_multimap -> jax.tree.map
alias   0.2.20  jax.api.FLAGS -> jax.config
alias   0.4.14  jax.prng.{seed_with_impl threefry_2x32 threefry2x32_p} -> jax.extend.random.{}
alias   0.4.14  jax.random.{threefry_2x32 threefry2x32_p} -> jax.extend.random.{}
alias   0.4.30  jax.core.ConcretizationTypeError -> jax.errors.ConcretizationTypeError
alias   0.4.14  jax.core.{TracerArrayConversionError TracerIntegerConversionError} -> jax.errors.{}
alias   0.4.14  jax.core.UnexpectedTracerError -> jax.errors.UnexpectedTracerError
alias   0.3.15  jax.tree_util.tree_multimap -> jax.tree.map
alias   0.4.8   jax.experimental.PartitionSpec -> jax.sharding.PartitionSpec
adapter 0.8.0   jax.experimental.enable_x64 -> jax.enable_x64(True)
adapter 0.8.0   jax.experimental.disable_x64 -> jax.enable_x64(False)
module  0.3.15  jax.experimental.{stax optimizers} -> jax.example_libraries.{}
alias   0.4.8   jax.experimental.pjit.PartitionSpec -> jax.sharding.PartitionSpec
adapter 0.4.20  jax.experimental.pjit.with_sharding_constraint -> jax.lax.with_sharding_constraint
adapter 0.3.25  jax.experimental.pjit.FROM_GDA -> None in in_shardings
alias   0.4.8   jax.interpreters.pxla.PartitionSpec -> jax.sharding.PartitionSpec
alias   0.4.11  jax.interpreters.pxla.ShardedDeviceArray -> jax.Array
alias   0.4.2   jax.sharding.MeshPspecSharding -> jax.sharding.NamedSharding
alias   0.4.33  jax.sharding.XLACompatibleSharding -> jax.sharding.Sharding
refused 0.6.0   jax.sharding.PositionalSharding -> jax.sharding.NamedSharding
alias   0.3.15  jax.experimental.sharding.MeshPspecSharding -> jax.sharding.NamedSharding
adapter 0.4.2   jax.experimental.global_device_array.GlobalDeviceArray -> GLOBAL_ARRAY
refused 0.4.2   jax.experimental.global_device_array.Shard -> GLOBAL_ARRAY
refused 0.3.15  jax.interpreters.sharded_jit.sharded_jit -> jax.jit
refused 0.3.15  jax.interpreters.sharded_jit.{with_sharding_constraint} -> jax.lax.{}
alias   0.3.15  jax.interpreters.sharded_jit.PartitionSpec -> jax.sharding.PartitionSpec
alias   0.4.20  jax.random.{KeyArray PRNGKeyArray} -> jax.Array
adapter 0.4.30  jax.random.shuffle -> jax.random.permutation(key, x, independent=True)
alias   0.4.11  jax.numpy.DeviceArray -> jax.Array
alias   0.4.20  jax.numpy.trapz -> jax.numpy.trapezoid
alias   0.4.20  jax.numpy.row_stack -> jax.numpy.vstack
alias   0.4.14  jax.numpy.product -> jax.numpy.prod
alias   0.4.14  jax.numpy.cumproduct -> jax.numpy.cumprod
alias   0.4.14  jax.numpy.alltrue -> jax.numpy.all
alias   0.4.14  jax.numpy.sometrue -> jax.numpy.any
alias   0.4.36  jax.numpy.round_ -> jax.numpy.round
alias   0.9.0   jax.numpy.fix -> jax.numpy.trunc
adapter 0.4.20  jax.numpy.in1d -> jax.numpy.isin(x, y).ravel()
adapter 0.4.20  jax.numpy.NINF -> -jax.numpy.inf
adapter 0.4.14  jax.numpy.PZERO -> 0.0
adapter 0.4.14  jax.numpy.NZERO -> -0.0
alias   0.4.14  jax.numpy.issubsctype -> jax.numpy.issubdtype
alias   0.4.30  jax.lax.zeros_like_array -> jax.numpy.zeros_like
adapter 0.4.8   jax.numpy.msort -> jax.numpy.sort(x, axis=0)
alias   0.4.8   jax.interpreters.xla.{DeviceArray _DeviceArray} -> jax.Array
alias   0.7.0   jax.interpreters.xla.canonicalize_dtype -> jax.dtypes.canonicalize_dtype
alias   0.6.0   jax.interpreters.xla.abstractify -> jax.typeof
alias   0.3.15  jax.experimental.array.Array -> jax.Array
alias   0.7.0   jax.lib.xla_bridge.{get_backend get_compile_options} -> jax.extend.backend.{}
alias   0.4.36  jax.lib.xla_bridge.default_backend -> jax.default_backend
alias   0.2.10  jax.lib.xla_bridge.{devices local_devices} -> jax.{}
alias   0.2.10  jax.lib.xla_bridge.host_id -> jax.process_index
alias   0.2.10  jax.lib.xla_bridge.host_count -> jax.process_count
alias   0.2.10  jax.lib.xla_bridge.host_ids -> jax.process_indices
alias   0.4.2   jax.lib.xla_bridge.{device_count local_device_count process_index} -> jax.{}
alias   0.4.38  jax.lib.xla_client.Device -> jax.Device
alias   0.4.38  jax.lib.xla_client.XlaRuntimeError -> jax.errors.JaxRuntimeError
alias   0.5.0   jax.lib.xla_client.ArrayImpl -> jax.Array
refused 0.5.0   jax.lib.xla_client.register_custom_call_target -> jax.ffi.register_ffi_target
alias   0.6.0   jax.lib.xla_extension.Device -> jax.Device
alias   0.5.0   jax.lib.xla_extension.ArrayImpl -> jax.Array
alias   0.5.0   jax.lib.xla_extension.XlaRuntimeError -> jax.errors.JaxRuntimeError
alias   0.5.0   jax.core.{Primitive Jaxpr ClosedJaxpr JaxprEqn Literal} -> jax.extend.core.{}
alias   0.5.0   jax.core.{Var Token jaxpr_as_fun} -> jax.extend.core.{}
alias   0.10.0  jax.core.{DropVar Effect Effects JaxprTypeError} -> jax.extend.core.{}
alias   0.10.0  jax.core.{InconclusiveDimensionOperation CallPrimitive} -> jax.extend.core.{}
alias   0.10.0  jax.core.{check_jaxpr concrete_or_error find_top_trace gensym} -> jax.extend.core.{}
alias   0.10.0  jax.core.{jaxprs_in_params new_jaxpr_eqn no_effects} -> jax.extend.core.{}
alias   0.10.0  jax.core.{primal_dtype_to_tangent_dtype valid_jaxtype} -> jax.extend.core.{}
alias   0.9.0   jax.core.{subjaxprs mapped_aval unmapped_aval} -> jax.extend.core.{}
alias   0.9.0   jax.core.get_aval -> jax.typeof
adapter 0.5.0   jax.core.raise_to_shaped -> the type as it is: jax.typeof(x)
adapter 0.6.0   jax.core.trace_state_clean -> jax.sharding.get_mesh raises while JAX traces
refused 0.4.35  jax.core.ConcreteArray -> jax.core.Tracer: what is no tracer is concrete
refused 0.4.35  jax.core.{thread_local_state new_base_main cur_sublevel} -> INSIDE
refused 0.6.0   jax.core.axis_frame -> jax.lax.axis_size(name)
alias   0.4.14  jax.abstract_arrays.ShapedArray -> jax.core.ShapedArray
adapter 0.4.14  jax.abstract_arrays.raise_to_shaped -> the type as it is: jax.typeof(x)
refused 0.2.10  jax.abstract_arrays.ConcreteArray -> jax.core.Tracer: what is no tracer is concrete
adapter 0.4.20  jax.linear_util.wrap_init -> jax.extend.linear_util.wrap_init(f, debug_info=...)
alias   0.4.20  jax.linear_util.{transformation WrappedFun} -> jax.extend.linear_util.{}
alias   0.4.20  jax.linear_util.{transformation_with_aux} -> jax.extend.linear_util.{}
alias   0.4.20  jax.linear_util.{merge_linear_aux} -> jax.extend.linear_util.{}
adapter 0.6.0   jax.util.safe_map -> list(map(f, *lists)), for lists of one length
adapter 0.6.0   jax.util.safe_zip -> list(zip(*lists, strict=True))
adapter 0.6.0   jax.util.unzip2 -> zip(*pairs)
adapter 0.6.0   jax.util.split_list -> slices of a list
adapter 0.6.0   jax.util.wraps -> functools.wraps
refused 0.6.0   jax.util.{subvals toposort wrap_name cache HashableFunction} -> INSIDE
alias   0.2.10  jax.util.partial -> functools.partial
alias   0.4.20  jax.config.config -> jax.config
alias   0.2.10  jax.config.FLAGS -> jax.config
adapter 0.8.0   jax.experimental.x64_context.enable_x64 -> jax.enable_x64(True)
adapter 0.8.0   jax.experimental.x64_context.disable_x64 -> jax.enable_x64(False)
refused 0.7.0   jax.experimental.host_callback.{call id_tap} -> CALLBACK
refused 0.4.33  jax.experimental.host_callback.{id_print barrier_wait} -> CALLBACK
refused 0.4.33  jax.experimental.host_callback.stop_outfeed_receiver -> CALLBACK
refused 0.4.33  jax.experimental.host_callback.CallbackException -> CALLBACK
refused 0.3.15  jax.experimental.loops.Scope -> jax.lax.fori_loop, scan or cond
adapter 0.3.1   jax.ops.index -> x.at[...]
adapter 0.3.1   jax.ops.index_update -> x.at[index].set(values)
adapter 0.3.1   jax.ops.index_add -> x.at[index].add(values)
adapter 0.3.1   jax.ops.index_mul -> x.at[index].multiply(values)
adapter 0.3.1   jax.ops.index_min -> x.at[index].min(values)
adapter 0.3.1   jax.ops.index_max -> x.at[index].max(values)
adapter 0.4.28  jax.lax.tie_in -> the second argument alone
alias   0.2.20  jax.profiler.trace_function -> jax.profiler.annotate_function
alias   0.3.1   jax.profiler.TraceContext -> jax.profiler.TraceAnnotation
alias   0.3.1   jax.profiler.StepTraceContext -> jax.profiler.StepTraceAnnotation
alias   0.4.28  jax.nn.normalize -> jax.nn.standardize
alias   0.4.20  jax.scipy.linalg.{tril triu} -> jax.numpy.{}
"""


_TEXTS = {
    "INSIDE": INSIDE,
    "CALLBACK": CALLBACK,
    "GLOBAL_ARRAY": GLOBAL_ARRAY,
    "REDUCE_AXES": "lax.psum(gradient, axes) in a body; outside, leave it out",
}
_ROW = re.compile(r"(\w+) +([\d.]*) *([\w.]*)(?:\{([^}]*)\})?(\([^)]*\))? *-> (.*)")


def read(rows: str) -> Iterator[Removed]:
    """The names of a table."""
    for kind, until, module, several, keyword, now in _ROW.findall(rows):
        for name in several.split() or [""]:
            text = _TEXTS.get(now, now).replace("{}", name)
            yield Removed(f"{module}{name}{keyword}", until, kind, text)


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
