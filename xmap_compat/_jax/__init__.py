"""The only package that uses private JAX names or asks for JAX's version, arranged by subject.

Everything else uses public JAX, and this package by the names below; ``tests/core/test_fences.py``
holds that line.  Each branch on a version names the release that made it necessary, and a test
fails when such a release is older than the supported floor.
"""

import os
from typing import TYPE_CHECKING

import jax

from xmap_compat._jax.version import (
    FLOOR,
    RELEASE,
    VERSION,
    check_release,
    parse_version,
    warn_if_untested,
)

check_release()
warn_if_untested()

from xmap_compat._jax.batching import (
    batched,
    has_custom_batching,
    has_known_rules,
    holds_custom_batching,
    operation_name,
    varying_results,
)
from xmap_compat._jax.equations import (
    Call,
    Checkpoint,
    Cond,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Expanded,
    HijaxOperation,
    LinearSolve,
    Scan,
    ShardMap,
    While,
    inline_calls,
    read,
    with_traced_transpose,
)
from xmap_compat._jax.jaxprs import (
    Literal,
    depends_on_axes,
    has_side_effect,
    input_vars,
    is_reference,
    open_jaxpr,
    subjaxprs,
    uses_references,
    walk,
    without_dead_code,
)
from xmap_compat._jax.local_operations import gather, local_operation
from xmap_compat._jax.meshes_in_scope import (
    AnyMesh,
    ambient_mesh,
    assign_mesh,
    axes_of_entry,
    context_of,
    enter_mesh,
    exit_mesh,
    forget_assigned_mesh,
    in_manual_region,
    mesh_context,
    mesh_to_stage,
    resharded,
)
from xmap_compat._jax.nice import optional
from xmap_compat._jax.patches import (
    Patch,
    SharedPatches,
    accepted_options,
    collective_batching,
    collective_transposes,
    extremum_gradients,
    named_reductions,
    replaced,
    set_for_all_threads,
)
from xmap_compat._jax.positions import (
    api_boundary,
    boundary,
    end_at_user,
    equation_context,
    exclude_from_positions,
    user_frames_of,
    warn_user,
    where_in_user_code,
    where_now,
)
from xmap_compat._jax.primitives import (
    bind,
    call_batched,
    define_cut,
    define_device_check,
    define_dual_primitives,
    define_named_primitive,
)
from xmap_compat._jax.tracing import current_trace, is_bound, jit, plainly, traced_as
from xmap_compat._jax.types import (
    draws_from_rbg,
    explicit_spec,
    float0,
    instantiate_symbolic,
    is_key,
    shaped_containers,
    varying_axes,
    with_weak_type,
)


def _without_origin(x):
    if isinstance(x, jax.core.Tracer):
        return "hidden", None
    return "constant", None


# What stands in where this JAX lacks something private that an optional part needs.
process_store = optional("key_value_store", process_store=lambda: None).process_store
tracer_origin = optional("origins", tracer_origin=_without_origin).tracer_origin
user_frames = optional("frames", user_frames=lambda eqn: []).user_frames

if TYPE_CHECKING:
    from xmap_compat._jax.nice.key_value_store import ProcessStore

# Positions in messages and in compiled programs are the user's, not this package's.
exclude_from_positions(os.path.dirname(os.path.dirname(__file__)))
