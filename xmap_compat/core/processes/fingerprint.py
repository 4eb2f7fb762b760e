"""A fingerprint of a call: lines of text that are the same in every process that makes the call, and their digest.

Identities, addresses, hash seeds and paths of files differ between processes of one program, and are left out.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xmap_compat import _jax, _version
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.derivatives import derivative
from xmap_compat.core.trace import trace_flat

# Settings of JAX that change numbers and do not appear in a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Larger constants that a body closes over are compared by their type only.
LARGEST_CONSTANT = 2**24  # bytes
ORDERS = 2  # the depth to which rules within rules are compared: many rules call their own function without end
# Parameters that may differ between processes: they say what happens to values outside of the computation.
_MAY_DIFFER = re.compile(r"\b(?:callback|fmt|logging_record)=.*?(?=\n\s+\w+=)", re.DOTALL)
_ADDRESS = re.compile(r" at 0x\w+|\b0x[0-9a-fA-F]{6,}")
_SET = re.compile(r"\{([^{}:;]*)\}")


class Fingerprint(NamedTuple):
    """The fingerprint of one call.

    Attributes:
      lines: each with its subject: first the arguments of the call, then lines of the named program and of the
        programs that it calls.
      digest: the digest of the lines.
      processes: the processes that have devices on the mesh, in order.
      uses_mesh: whether an axis is split over the mesh.
    """

    lines: tuple[tuple[str, str], ...]
    digest: str
    processes: tuple[int, ...]
    uses_mesh: bool


def fingerprint(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Fingerprint:
    """The fingerprint of a call that has been traced."""
    mesh = placed.scope.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = list(mesh.devices.flat)
    ids, processes = ([getattr(d, name) for d in devices] for name in ("id", "process_index"))
    resources = ((n, r[0] if len(r) == 1 else r) for n, r in declared.resources.items())
    parts = {
        "function": declared.name,
        "axis_resources": _mapping(sorted(resources, key=repr)),
        "in_axes": ", ".join(_mapping(spec.names) for spec in placed.in_specs),
        "out_axes": ", ".join(_mapping(spec.names) for spec in placed.out_specs),
        "axis sizes": _mapping(placed.body.sizes.items()),
        "arguments": ", ".join(_steady(str(jax.typeof(leaf))) for leaf in jax.tree.leaves(args)),
        "serial loops": _mapping(placed.scope.loops),
        "mesh": f"{_mapping(mesh.shape.items())} of {devices[0].platform} devices {ids} of processes {processes}",
        "versions": f"jax {_jax.RELEASE}, xmap_compat {_version.__version__}",
        "settings": _mapping((name, getattr(jax.config, name)) for name in SETTINGS),
    }
    texts = _texts(functools.partial(trace_flat, body=placed.body), placed.program.jaxpr, placed.program.consts)
    program = (("program:", line.strip()) for text in dict.fromkeys(texts) for line in text.splitlines())
    lines = (*parts.items(), *program)
    return Fingerprint(lines, _digest(json.dumps(lines).encode()), tuple(sorted({*processes})), placed.uses_mesh)


def _mapping(items):
    return _steady("{" + ", ".join(f"{key!r}: {value!r}" for key, value in items) + "}")


def _steady(text: str) -> str:
    """The text without addresses and parameters that may differ, and with the elements of sets in order."""
    text = _ADDRESS.sub("", _MAY_DIFFER.sub("", text))
    return _SET.sub(lambda match: "{" + ", ".join(sorted(match[1].split(", "))) + "}", text)


def _texts(trace: Callable[..., Any], jaxpr: Any, consts: Sequence[Any], order: int = 0) -> Iterator[str]:
    """The texts of a program, of the constants in it, and of the derivatives that its custom rules make."""
    equations = [eqn for eqn, _ in _jax.walk(jaxpr, once=True)]
    inner = [_jax.open_jaxpr(held)[1] for eqn in equations for held in _jax.subjaxprs(eqn.params)]
    literals = [a.val for eqn in equations for a in eqn.invars if isinstance(a, _jax.Literal) and np.ndim(a.val)]
    yield _steady(str(jaxpr))
    yield f"with constants {' '.join(map(_constant, itertools.chain(consts, *inner, literals)))}"
    for eqn in equations if order < ORDERS else ():
        if isinstance(_jax.read(eqn), (_jax.CustomJvp, _jax.CustomVjp, _jax.HijaxOperation)):
            try:
                yield from _texts(trace, *_jax.open_jaxpr(derivative(trace, eqn)), order + 1)
            except Exception as error:  # for example, it has no derivative
                yield f"rules of {eqn.primitive.name}: {type(error).__name__}"


def _constant(value: Any) -> str:
    """A constant by its values; by its type alone if it is large, if other processes have parts of it, or if traced."""
    kind = _steady(str(jax.typeof(value)))
    here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if not here or np.size(value) * jax.typeof(value).dtype.itemsize > LARGEST_CONSTANT:
        return kind
    if _jax.is_key(value):
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    return f"{kind} of {_digest(np.asarray(value).tobytes())[:16]}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
