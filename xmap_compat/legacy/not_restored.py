"""Names and keywords that JAX had and that ``install()`` does not restore, with the reason;
``check`` shows it.

``tests/install/gone.json`` is the record of what is gone; each of its names is in the table of
removed names, or here.
"""

from __future__ import annotations

import re

INSIDE = "it was an inside of JAX, and has no public place today"
CHANGED = "it was experimental and has changed since: see the documentation of this JAX"
CALLBACK = "write jax.debug.callback, jax.pure_callback or jax.experimental.io_callback"
# Patterns of whole names: the first that matches says why.
REASONS = {
    r"jax\.numpy\.clip\(out=\)": "leave it out: it took nothing but None",
    r"jax\.scipy\.special\.exp1\(module=\)": "leave it out",
    r"jax\.export\.export\(lowering_platforms=\)": "write platforms=",
    r"jax\.export\.symbolic_args_specs\(symbolic_(constraints|scope)=\)": "write constraints= or scope=",
    r"jax\.experimental\.shard_map\.shard_map\(auto=\)": "write jax.shard_map, whose axis_names= are the other axes",
    r"jax\.experimental\.compilation_cache\..*\.(initialize_cache|is_initialized)": (
        "write jax.config.update('jax_compilation_cache_dir', path)"
    ),
    r"jax\.extend\.ffi\b.*": "write jax.ffi, which has the same functions",
    r"jax\.tree_util\.(register_keypaths|\w+KeyPathEntry)": "write jax.tree_util.register_pytree_with_keys",
    r"jax\.tree_util\.build_tree": "write jax.tree_util.tree_unflatten",
    r"jax\.scipy\.linalg\.solve\(sym_pos=\)": "write assume_a='pos'",
    r"jax\.(numpy|scipy\.special|dlpack|experimental\.checkify)\.\w+\((\w+)=\)": "pass it by position",
    r"jax\.scipy\.stats\.gennorm\.\w+\(p=\)": "write beta=",
    r"jax\.scipy\.linalg\.(polar_unitary|polar\(maxiter=\))": "write jax.scipy.linalg.polar(x)",
    r"jax\.scipy\.special\.sph_harm": "write jax.scipy.special.sph_harm_y(n, m, phi, theta): the order has changed",
    r"jax\.nn\.(log_)?softmax\(initial=\)": "leave it out, or write where=",
    r"jax\.pmap\(global_arg_shapes=\)": "leave it out: shapes are read from the arguments",
    r"jax\.make_jaxpr\(abstracted_axes=\)": "dynamic shapes are gone: trace for each shape, or use jax.export",
    r"jax\.dlpack\.to_dlpack": "pass the array itself to the other library's from_dlpack",
    r"jax\.dlpack\.SUPPORTED_DTYPES": INSIDE,
    r"jax\.(prng|random)\.\w*(key|[iI]mpl)": "write jax.random.key(seed, impl='threefry2x32'), or 'rbg', 'unsafe_rbg'",
    r"jax\.sharding\.(GSPMD|OpSharding|Pmap)Sharding": "write jax.sharding.NamedSharding, or jax.sharding.Sharding",
    r"jax\.cloud_tpu_init.*": "leave it out: JAX looks for TPUs by itself",
    r"jax\.spmd_mode": "leave it out: there is one behaviour, 'allow_all'",
    r"jax\.(lax\.(in|out)feed(_p)?|experimental\.(host_callback|callback))\b.*": CALLBACK,
    r"jax\.experimental\.(global_device_array|gda_serialization)\b.*": "write jax.Array, and orbax for checkpoints",
    r"jax\.experimental\.array_api\b.*": "write jax.numpy, which follows the array API by itself",
    r"jax\.experimental\.(export|jax2tf\.jax_export)\b.*": "write jax.export, whose functions differ",
    r"jax\.experimental\.(sharded_jit|with_sharding_constraint)": "write jax.jit, jax.lax.with_sharding_constraint",
    r"jax\.experimental\.layout\.DeviceLocalLayout": "write jax.experimental.layout.Layout",
    r"jax\.experimental\.shard_alike\b.*": "write jax.lax.with_sharding_constraint of both",
    r"jax\.experimental\.loops\b.*": "write jax.lax.fori_loop, scan or cond",
    r"jax\.experimental\.(maps|djax|custom_partitioning|pjit|shard_map|jet|multihost_utils|mesh_utils|ode)\b.*": INSIDE,
    r"jax\.experimental\.(sparse|jax2tf|pallas|mosaic|attrs|compilation_cache|array_serialization)\b.*": CHANGED,
    r"jax\.(custom_ivjp|custom_transpose|enable_custom_vjp_by_custom_transpose)\b.*": "write a jax.custom_vjp",
    r"jax\.(core|interpreters|linear_util|util|api|api_util|jaxpr_util|abstract_arrays|flatten_util)\b.*": INSIDE,
    r"jax\.(custom_derivatives|errors|lax|lib|numpy|stages|profiler|tree_util|extend|dtypes|export)\b.*": INSIDE,
    r"jax\.(ShapedArray|curry|flatten_fun_nokwargs|collect_profile\..*)": INSIDE,
}


def why_not_restored(name: str) -> str:
    """The reason, or nothing if there is none: for ``'jax.core.MainTrace'``, or
    ``'jax.numpy.sqrt(x=)'``.
    """
    return next((why for pattern, why in REASONS.items() if re.fullmatch(pattern, name)), "")
