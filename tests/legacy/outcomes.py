"""What came out of a program, as plain data: the same description under jax 0.4.30 and under xmap_compat."""

import hashlib
import re

import jax
import numpy as np
from jax.sharding import NamedSharding
from program_table import LEGACY


def outcome_of(program, assignment):
    """A description that JSON can hold, and the values of the leaves as NumPy arrays."""
    try:
        result, notes = program.run(assignment, program.make_args())
    except Exception as error:  # the outcome is whatever legacy raised
        return {"error": type(error).__name__, "bases": bases(error), "message": message(error)}, []
    leaves, tree = jax.tree_util.tree_flatten(result)
    outcome = {"tree": str(tree), "leaves": [describe(leaf) for leaf in leaves]}
    if notes:
        outcome["notes"] = notes
    return outcome, [values(leaf) for leaf in leaves]


def bases(error):
    """The builtin exceptions that ``except`` would catch it as."""
    return [
        c.__name__
        for c in type(error).__mro__
        if c.__module__ == "builtins" and issubclass(c, Exception)
    ]


def message(error):
    """The message without places in files, addresses and JAX's advice on long tracebacks."""
    text = str(error).split("\n--------------------")[0]
    text = re.sub(r"[^\s`(]*\.(py|txt):\d+(:\d+)?", "FILE:LINE", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text).strip()


def describe(leaf):
    """Shape, dtype, weak type, and the sharding: its spec, or None for a single device; whether committed."""
    aval = jax.core.get_aval(leaf) if LEGACY else jax.typeof(leaf)
    sharding = leaf.sharding
    spec = list(map(entry, sharding.spec)) if isinstance(sharding, NamedSharding) else None
    return {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "weak": bool(getattr(aval, "weak_type", False)),
        "spec": spec,
        "committed": bool(leaf._committed if LEGACY else leaf.committed),
    }


def entry(axes):
    return axes if axes is None or isinstance(axes, str) else list(axes)


def values(leaf):
    """As NumPy can store them: keys as their data, bfloat16 as float32."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def checksum(args):
    """Of the arguments, so that the recording is compared on the same."""
    digest = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(args):
        array = values(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]
