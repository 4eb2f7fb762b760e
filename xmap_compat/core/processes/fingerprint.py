"""A fingerprint of a call: text that is the same in every process that makes it, and a digest of this text.

Identities, addresses, hash seeds and paths of files differ between processes of one program, and are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import xmap_compat
from xmap_compat import _jax
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.mesh import SerialLoop
from xmap_compat.core.rules.callables import derivative
from xmap_compat.core.trace import trace_flat

# Settings of JAX that change numbers and do not appear in a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Larger constants that a body closes over are compared by their type only.
LARGEST_CONSTANT = 2**24  # bytes

# Parameters that may differ between processes: they say what happens to values outside of the computation.
OWN = ("callback", "fmt", "logging_record")
ORDERS = 2  # rules within rules are compared to this depth: many rules call their own function without end

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of one call.

    Attributes:
      parts: texts, by the part of the call that they describe.
      program: the lines of the named program.
      processes: the processes that have devices on the mesh, in order.
      uses_mesh: whether an axis is split over the mesh.
    """

    parts: Mapping[str, str]
    program: tuple[str, ...]
    processes: tuple[int, ...]
    uses_mesh: bool

    @functools.cached_property
    def digest(self) -> str:
        return _digest(json.dumps([dict(self.parts), self.program]).encode())


def fingerprint(declared: Declaration, placed: PlacedCall, args: tuple[Any, ...]) -> Fingerprint:
    """The fingerprint of one call, which has been traced."""
    mesh = placed.scope.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    processes = tuple(sorted({d.process_index for d in mesh.devices.flat}))
    parts = {
        "function": declared.name,
        "axis_resources": _resources(declared),
        "in_axes": ", ".join(_mapping(spec.names) for spec in placed.in_specs),
        "out_axes": ", ".join(_mapping(spec.names) for spec in placed.out_specs),
        "axis sizes": _mapping(placed.body.sizes.items()),
        "arguments": ", ".join(_type(jax.typeof(leaf)) for leaf in jax.tree.leaves(args)),
        "axes of the compiler": ", ".join(sorted(map(repr, placed.compiler))) or "none",
        "axes of results beyond their specs": _mapping((k, n) for k, n in enumerate(placed.undeclared) if n),
        "serial loops": _mapping(placed.scope.loops),
        "mesh": f"{_mapping(mesh.shape.items())} of {_devices(mesh)}",
        "versions": f"jax {_jax.RELEASE}, xmap_compat {xmap_compat.__version__}",
        "settings": _mapping((name, getattr(jax.config, name)) for name in SETTINGS),
    }
    programs = _Programs(functools.partial(trace_flat, body=placed.body))
    program = programs.lines_of(placed.program.jaxpr, placed.program.consts)
    return Fingerprint(parts, tuple(program), processes, placed.uses_mesh)


def _resources(declared):
    """The resources as the user wrote them (one resource without its tuple), sorted by axis."""
    entries = {name: [_entry(r) for r in resources] for name, resources in declared.resources.items()}
    shown = [(name, _Verbatim(r[0] if len(r) == 1 else f"({', '.join(r)})")) for name, r in entries.items()]
    return _mapping(sorted(shown, key=lambda item: repr(item[0])))


def _entry(resource):
    return f"SerialLoop({resource.length})" if isinstance(resource, SerialLoop) else repr(resource)


class _Verbatim(str):
    __repr__ = str.__str__


def _mapping(items):
    return _without_addresses("{" + ", ".join(f"{key!r}: {value!r}" for key, value in items) + "}")


def _devices(mesh):
    """The order of the devices on the mesh, and the process of each."""
    devices = list(mesh.devices.flat)
    ids = " ".join(str(d.id) for d in devices)
    return f"{devices[0].platform} devices {ids} of processes {' '.join(str(d.process_index) for d in devices)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)


@functools.lru_cache(maxsize=1024)
def _type(aval):
    return _without_addresses(str(aval))


# ------------------------------------------------------------------------------ programs


class _Programs:
    """The lines of a program and of those that its equations call, each written once and then called by its number.

    Custom rules appear in no equation.  Their programs are those of a function's derivative, or of the function under
    a ``vmap``, and those that the rules in these make, up to ``ORDERS`` levels deep.
    """

    def __init__(self, trace: Callable[..., Any] | None = None):
        self.trace = trace
        self.order = 0
        self.numbers: dict[tuple[str, ...], int] = {}
        self.known: dict[tuple[int, int], tuple[int, Any]] = {}  # keeps the programs, so that no other gets their id
        self.lines: list[str] = []

    def lines_of(self, jaxpr: Any, consts: Sequence[Any]) -> list[str]:
        self._number(jaxpr, consts)
        return self.lines

    def _called(self, closed):
        key = id(closed), self.order
        if key not in self.known:
            jaxpr, consts = _jax.open_jaxpr(closed)
            self.known[key] = (self._number(jaxpr, consts), closed)
        return f"program {self.known[key][0]}"

    def _number(self, jaxpr, consts):
        own = tuple(self._own_lines(jaxpr, consts))
        if own not in self.numbers:
            self.numbers[own] = len(self.numbers)
            self.lines.append(f"program {self.numbers[own]}:")
            self.lines.extend(own)
        return self.numbers[own]

    def _own_lines(self, jaxpr, consts):
        names: dict[Any, str] = {}

        def new(variable):
            names[variable] = f"v{len(names)}"
            return f"{names[variable]}:{_type(variable.aval)}"

        def use(atom):
            return self.text(atom.val) if isinstance(atom, _jax.Literal) else names[atom]

        yield f"of {' '.join(map(new, _jax.input_vars(jaxpr)))} with constants {self.text(tuple(consts))}"
        for eqn in jaxpr.eqns:
            operands = " ".join(map(use, eqn.invars))
            given = {key: value for key, value in sorted(eqn.params.items()) if key not in OWN}
            params = " ".join(f"{key}={self.text(value)}" for key, value in (given | self._rules(eqn)).items())
            yield f"{' '.join(map(new, eqn.outvars))} = {eqn.primitive.name} {operands} {params}".rstrip()
        yield f"returns {' '.join(map(use, jaxpr.outvars))}"

    def _rules(self, eqn):
        """The program that the rules of an equation make, if it has rules."""
        make = _RULES.get(type(_jax.read(eqn)))
        if make is None or self.order == ORDERS:
            return {}
        self.order += 1
        try:
            return {"rules": _Verbatim(self._called(make(self.trace, eqn)))}
        except Exception as error:  # for example, it has no derivative
            return {"rules": type(error)}
        finally:
            self.order -= 1

    def text(self, value: Any) -> str:
        """The text of a parameter or constant."""
        if _jax.is_jaxpr(value):
            return self._called(value)
        if isinstance(value, (type, enum.Enum, _Verbatim)):
            return str(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self.text(k)}: {self.text(v)}' for k, v in value.items()))}}}"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self.text, value))})"
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) or hasattr(value, "__array__"):
            return _constant(value)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.repr}
            return f"{type(value).__name__}{self.text(fields)}"
        if isinstance(value, functools.partial):
            return f"{self.text(value.func)} with {self.text((value.args, value.keywords))}"
        if callable(value) or hasattr(value, "f"):
            code = getattr(value, "__code__", None)
            own = f" of {_digest(code.co_code)[:16]}" if code is not None else ""
            return f"{getattr(value, '__qualname__', type(value).__name__)}{own}"
        return " ".join(_without_addresses(repr(value)).split())


def _under_vmap(trace, eqn):
    """An equation under a ``vmap``, with two elements of each operand."""
    mapped = jax.vmap(lambda *args: _jax.bind(eqn.primitive, args, eqn.params))
    return trace(mapped, [jax.ShapeDtypeStruct((2, *v.aval.shape), v.aval.dtype) for v in eqn.invars])


_RULES: dict[type, Callable[..., Any]] = {
    **dict.fromkeys((_jax.CustomJvp, _jax.CustomVjp, _jax.HijaxOperation), derivative),
    _jax.CustomVmap: _under_vmap,
}


def _constant(value):
    """A constant by its values; by its type alone if it is large, if other processes have parts of it, or if traced."""
    kind = _type(jax.typeof(value))
    here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if here and _jax.is_key(value):
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    if not here or value.size * value.dtype.itemsize > LARGEST_CONSTANT:
        return kind
    data = np.asarray(value)
    return f"{kind} {data.item()}" if data.ndim == 0 else f"{kind} of {_digest(data.tobytes())[:16]}"
