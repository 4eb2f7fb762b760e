"""Two programs beside each other, on the same made-up arguments: whether they compute the same.

A process that cannot import the package runs this file as well, with ``python beside.py MODULE SAMPLES``, so it imports
nothing of the package.
"""

import importlib.util
import pickle
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np


class Sample(NamedTuple):
    """What is known of a call.

    Attributes:
      types: shape, dtype and, of keys, the implementation of each array of the arguments.
      bound: a number that is no larger than what integers may index.
      rounding: how much numbers differ by rounding, relative to the largest.
      derivative: whether gradients are compared as well.
    """

    types: list[tuple[tuple[int, ...], str, Any]]
    bound: int
    rounding: float
    derivative: bool


def made_up(sample, positive=False, moved=0.0):
    """Arguments: floats on both sides of zero or above it, perhaps moved by rounding; small integers; bits of keys."""
    draw, shift = np.random.default_rng(0), np.random.default_rng(1)

    def array(shape, dtype, impl):
        if impl is not None:
            shape, dtype = (*shape, *jax.random.key_data(jax.random.key(0, impl=impl)).shape), "uint32"
        kind = jnp.dtype(dtype)
        if impl is not None or (dtype == "uint32" and shape[-1:] in ((2,), (4,))):
            return draw.integers(0, 2**32, shape, np.uint32)
        if not jnp.issubdtype(kind, jnp.inexact):
            return draw.integers(0, 2 if dtype == "bool" else sample.bound, shape).astype(kind)
        one = lambda: draw.uniform(0.5, 1.5, shape) if positive else draw.normal(size=shape)  # noqa: E731
        x = one() + 1j * one() if jnp.issubdtype(kind, jnp.complexfloating) else one()
        return np.asarray(x * (1 + moved * shift.normal(size=shape))).astype(kind)

    return [array(*given) for given in sample.types]


def of(function, sample):
    """A function of made-up arguments: results that are floats, the others, and gradients of the former."""
    both = jax.jit(values_and_gradients(function, sample))
    return lambda args: jax.tree.map(np.asarray, jax.block_until_ready(both(*args)))


def values_and_gradients(function, sample):
    """The same before it is compiled; keys are arguments and results as their bits."""

    def both(*raw):
        impls = [impl for _, _, impl in sample.types]
        leaves = [x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in zip(raw, impls)]
        smooth = [k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def values(given):
            known = dict(zip(smooth, given))
            found = function(*(known.get(k, x) for k, x in enumerate(leaves)))
            found = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found]
            floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]
            return floats, [x for x in found if not jnp.issubdtype(x.dtype, jnp.inexact)]

        given = [leaves[k] for k in smooth]
        if not sample.derivative:
            return *values(given), []
        floats, pullback, others = jax.vjp(values, given, has_aux=True)
        waves = [jnp.cos(jnp.arange(x.size, dtype=np.float32)).reshape(x.shape).astype(x.dtype) for x in floats]
        return floats, others, pullback(waves)[0]

    return both


def compared(expected, function, sample):
    """Whether the original runs, and how a function differs from it, in words; "" if both compute the same."""
    try:
        expected(made_up(sample))
    except Exception as error:
        return False, f"on made-up arguments xmap gives {in_words(error).rstrip('.')}"
    try:
        return True, difference(expected, of(function, sample), sample) or ""
    except Exception as error:
        return True, f"it fails: {in_words(error)}"


def in_words(error):
    """Type and first line of an error.  The elements of sets, which have no order, are sorted."""
    in_order = lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}"  # noqa: E731
    return ": ".join([type(error).__name__, *(re.sub(r"\{([^{}]*)\}", in_order, str(error))).splitlines()[:1]])


def difference(expected, found, sample):
    """How two functions differ, in words; None if they compute the same up to rounding."""
    for positive in (False, True):
        args = made_up(sample, positive)
        wanted = expected(args)
        if all(np.isfinite(_wide(x)).all() for x in wanted[0]):
            break
    got = found(args)
    if (worst := _worst(wanted, got, sample.rounding)) is None:
        return None
    # Rounding may decide more than the last digits: where it moves the original as far, the difference tells nothing.
    near = expected(made_up(sample, positive, sample.rounding))
    apart = jax.tree.map(lambda a, b: 10 * np.abs(_wide(a) - _wide(b)), wanted, near)
    return _worst(wanted, got, sample.rounding, apart) and worst


def _wide(x):
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _worst(wanted, got, rounding, apart=None):
    """The array that differs most, in words; None if there is none."""
    (paths, structure), (others, other) = (jax.tree_util.tree_flatten_with_path(tree) for tree in (wanted, got))
    if structure != other:
        return "it has other results"
    worst = (0.0, "")
    for (path, a), (_, b), far in zip(paths, others, jax.tree.leaves(apart) if apart else [0.0] * len(paths)):
        what = ("a result", "a result", "a gradient")[path[0].idx]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{what} has type {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
        x, y = _wide(a), _wide(b)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(x - y))
        scale = np.abs(x[np.isfinite(x)]).max(initial=0.0)
        allowed = (rounding * scale if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0) + np.nan_to_num(far)
        if not (gap <= allowed).all():
            most = float(np.nan_to_num(gap, nan=np.inf).max())
            worst = max(
                worst, (most, f"{what} {a.dtype}{list(a.shape)} differs by {most:.3g}, and is up to {scale:.3g}")
            )
    return worst[1] or None


# ---------------------------------------------------------------- in a process without the package


def main(module, samples):
    """Print for each function of a module that has a sample whether it ran, and how it differs from the original."""
    sys.modules["xmap_compat"] = None  # type: ignore[assignment]  # an import of it fails
    with open(samples, "rb") as file:
        todo, values = pickle.load(file)
    spec = importlib.util.spec_from_file_location("generated", module)
    assert spec is not None and spec.loader is not None
    sys.modules["generated"] = generated = importlib.util.module_from_spec(spec)
    vars(generated).update(values)
    spec.loader.exec_module(generated)
    print(repr([_of_exported(getattr(generated, entry), *given) for entry, *given in todo]))


def _of_exported(entry, exported, sizes, structure, sample):
    sample = Sample(*sample)

    def expected(args):
        original = jax.export.deserialize(bytearray(exported))
        devices = np.array(jax.devices()[: original.nr_devices]).reshape([*sizes.values()])
        everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, (*sizes,)), jax.sharding.PartitionSpec())
        return jax.tree.map(np.asarray, jax.jit(original.call)(*jax.device_put(args, everywhere)))

    function = lambda *leaves: jax.tree.leaves(entry(*jax.tree.unflatten(structure, leaves)))  # noqa: E731
    return compared(expected, function, sample)


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # few cores must not wait for each other
    main(*sys.argv[1:])
