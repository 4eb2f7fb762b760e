"""JAX's configuration, as far as it decides what a program computes or refuses: a program for plain JAX must set it."""

from __future__ import annotations

import ast
import contextlib
import enum
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from xmap_compat.tools import errors

# JAX's own values, which a new process has.  Options that a release does not have are absent there.
_OFF = (
    *("enable_x64", "high_dynamic_range_gumbel", "softmax_custom_jvp", "accurate_erf_inv", "enable_custom_prng"),
    *("disable_jit", "debug_nans", "debug_infs", "debug_key_reuse", "enable_checks", "check_tracer_leaks"),
    *("check_static_indices", "disable_bwd_checks", "disable_most_optimizations"),
)
_DEFAULTS: dict[str, Any] = {
    **{f"jax_{name}": False for name in _OFF},
    **{f"jax_error_checking_behavior_{kind}": "ignore" for kind in ("divide", "nan", "oob")},
    **{"jax_threefry_partitionable": True, "jax_default_prng_impl": "threefry2x32", "jax_random_seed_offset": 0},
    **{"jax_default_matmul_precision": None, "jax_allow_f16_reductions": True, "jax_default_dtype_bits": "_default"},
    **{"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"},
    **{"jax_explicit_x64_dtypes": "warn", "jax_legacy_prng_key": "allow"},
}
# Variables that libraries below JAX read when they start, and their flags that change numbers.
_BELOW = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_CHANGES_NUMBERS = re.compile(r"fast_math|fast_min_max|precision|tf32|denormal|^\d+$")


def configuration() -> dict[str, Any]:
    """The options that differ from JAX's own values now: because of the environment, a statement or a context."""
    present = {name: _present(name) for name in _DEFAULTS}
    return {name: value for name, value in present.items() if value != _DEFAULTS[name]}


def _present(name: str) -> Any:
    value = jax.config.values.get(name, _DEFAULTS[name])
    return value.name.lower() if isinstance(value, enum.Enum) else value


def statements(options: Mapping[str, Any]) -> list[str]:
    """The statements that set options."""
    return [f'jax.config.update("{name}", {value!r})'.replace("'", '"') for name, value in options.items()]


def taken_from(tree: ast.Module) -> dict[str, Any]:
    """Remove the statements that set options from a program, and return the options."""
    options = {}
    for node in list(tree.body):
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("jax.config.update("):
            assert isinstance(node.value, ast.Call)
            name, value = map(ast.literal_eval, node.value.args)
            options[name] = value
            tree.body.remove(node)
    return options


@contextlib.contextmanager
def configured(options: Mapping[str, Any]) -> Iterator[None]:
    """A context with these options, and JAX's own values of the others.

    Raises:
      NotImplementedError: an option must change for which JAX has no context.
    """
    with contextlib.ExitStack() as stack:
        for name, own in _DEFAULTS.items():
            if (value := options.get(name, own)) != _present(name):
                context = vars(jax).get(name.removeprefix("jax_"))
                if context is None:
                    raise errors.option_has_changed(name, value, _present(name))
                stack.enter_context(context(value))
        yield


def flags() -> list[str]:
    """Variables that change numbers below JAX, each with these flags: ``XLA_FLAGS=--xla_cpu_enable_fast_math``."""
    found = ((name, [f for f in os.environ.get(name, "").split() if _CHANGES_NUMBERS.search(f)]) for name in _BELOW)
    return [f"{name}={' '.join(given)}" for name, given in found if given]
