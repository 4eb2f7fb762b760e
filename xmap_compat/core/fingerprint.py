"""What a call is, in words that are the same in every process that makes it, and a digest of them.

Identities, addresses, hash seeds and paths of files differ between processes of one program, and stay out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import xmap_compat
from xmap_compat import _jax
from xmap_compat.core.call import Declaration, PlacedCall
from xmap_compat.core.mesh import SerialLoop

# Settings of JAX that change numbers and are not seen in a program.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Larger constants that a body closes over are compared by their type only.
LARGEST_CONSTANT = 2**24  # bytes

# Parameters that may be each process's own: what is done with values outside of the computation.
OWN = ("callback", "fmt", "logging_record")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What one call is.

    Attributes:
      parts: in words, by what they describe.
      program: the lines of the named program.
      processes: those that have devices on the mesh, in order.
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
    """Of one call, which has been traced."""
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
    program = _Programs().lines_of(placed.program.jaxpr, placed.program.consts)
    return Fingerprint(parts, tuple(program), processes, placed.uses_mesh)


def _resources(declared):
    """As the user wrote them: one resource without its tuple."""
    entries = {name: [_entry(r) for r in resources] for name, resources in declared.resources.items()}
    return _mapping((name, _Verbatim(r[0] if len(r) == 1 else f"({', '.join(r)})")) for name, r in _by_name(entries))


def _by_name(mapping):
    """In an order that does not depend on how the mapping was made."""
    return sorted(mapping.items(), key=lambda item: repr(item[0]))


def _entry(resource):
    return f"SerialLoop({resource.length})" if isinstance(resource, SerialLoop) else repr(resource)


class _Verbatim(str):
    __repr__ = str.__str__


def _mapping(items):
    return _without_addresses("{" + ", ".join(f"{key!r}: {value!r}" for key, value in items) + "}")


def _devices(mesh):
    """Their order on the mesh, and whose they are."""
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
    """The lines of a program and of those that its equations call, each written once and then called by its number."""

    def __init__(self):
        self.numbers: dict[tuple[str, ...], int] = {}
        self.known: dict[int, tuple[int, Any]] = {}  # the programs are kept, so that no other gets their id
        self.lines: list[str] = []

    def lines_of(self, jaxpr: Any, consts: Sequence[Any]) -> list[str]:
        self._number(jaxpr, consts)
        return self.lines

    def _called(self, closed):
        if id(closed) not in self.known:
            jaxpr, consts = _jax.open_jaxpr(closed)
            self.known[id(closed)] = (self._number(jaxpr, consts), closed)
        return f"program {self.known[id(closed)][0]}"

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
            params = " ".join(
                f"{key}={self.text(value)}" for key, value in sorted(eqn.params.items()) if key not in OWN
            )
            yield f"{' '.join(map(new, eqn.outvars))} = {eqn.primitive.name} {operands} {params}".rstrip()
        yield f"returns {' '.join(map(use, jaxpr.outvars))}"

    def text(self, value: Any) -> str:
        """A parameter or constant."""
        if _jax.is_jaxpr(value):
            return self._called(value)
        if isinstance(value, (type, enum.Enum)):
            return str(value)
        if isinstance(value, _CONTAINERS):
            return _container(value, self.text)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) or hasattr(value, "__array__"):
            return _constant(value)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.repr}
            return f"{type(value).__name__}{self.text(fields)}"
        if callable(value) or hasattr(value, "f"):
            return _callable(value)
        return " ".join(_without_addresses(repr(value)).split())


def _constant(value):
    """By its values; by its type alone if it is large, if other processes have parts of it, or if it is traced."""
    kind = _type(jax.typeof(value))
    here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if here and _jax.is_key(value):
        with jax.ensure_compile_time_eval():
            value = jax.random.key_data(value)
    if not here or value.size * value.dtype.itemsize > LARGEST_CONSTANT:
        return kind
    data = np.asarray(value)
    return f"{kind} {data.item()}" if data.ndim == 0 else f"{kind} of {_digest(data.tobytes())[:16]}"


def _callable(fun: Any, seen: tuple[int, ...] = ()) -> str:
    """A function by its name, its code and the values that it uses; other callables by their type.

    JAX wraps the rules of custom derivatives in functions of its own: of those it is the functions inside.
    """
    given = []
    while not isinstance(fun, types.FunctionType) and id(fun) not in seen:
        seen = (*seen, id(fun))
        if isinstance(fun, functools.partial):
            given.extend([*fun.args, fun.keywords])
            fun = fun.func
        elif isinstance(fun, types.MethodType):
            fun = fun.__func__
        elif hasattr(fun, "f"):
            fun = fun.f
    if not isinstance(fun, types.FunctionType) or id(fun) in seen:
        return type(fun).__name__
    seen = (*seen, id(fun))
    if (fun.__module__ or "").split(".")[0] != "jax":
        defaults = {"defaults": fun.__defaults__, "keywords": fun.__kwdefaults__, "given": given or None}
        used = {**globals_of(fun), **closed_over(fun), **{k: v for k, v in defaults.items() if v is not None}}
        return f"{fun.__qualname__} of {_digest(code_text(fun.__code__).encode())[:16]} with {_value(used, seen)}"
    inside = [cell for cell in closed_over(fun).values() if _has_code(cell)]
    return f"{fun.__qualname__}({', '.join(_callable(f, seen) for f in inside)})"


def closed_over(fun):
    return dict(zip(fun.__code__.co_freevars, map(_content, fun.__closure__ or ())))


def globals_of(fun):
    """The numbers and arrays of its module that a function names."""
    there = {name: fun.__globals__.get(name) for name in fun.__code__.co_names}
    return {name: v for name, v in there.items() if isinstance(v, (int, float, complex, *_ARRAYS))}


def _value(value: Any, seen: tuple[int, ...]) -> str:
    """What a function uses: containers, numbers, texts, arrays and functions by what they are, all else by its type."""
    if value is None or isinstance(value, (int, float, complex, str, bytes)):
        return _without_addresses(repr(value))
    if isinstance(value, _ARRAYS) and not (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSUmM"):
        return _constant(value)
    if _has_code(value):
        return _callable(value, seen)
    if id(value) in seen:
        return "..."
    inside = functools.partial(_value, seen=(*seen, id(value)))
    return _container(value, inside) if isinstance(value, _CONTAINERS) else type(value).__name__


_CONTAINERS = (Mapping, set, frozenset, tuple, list)


def _container(value: Any, text: Callable[[Any], str]) -> str:
    """By what it holds, in an order that does not depend on how it was made."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{text(k)}: {text(v)}' for k, v in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    return f"({', '.join(map(text, value))})"


_ARRAYS = (np.ndarray, np.generic, jax.Array)


def _has_code(value):
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or hasattr(value, "f")


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def code_text(code: types.CodeType) -> str:
    """What Python code does; its constants in words, for sets among them are in any order."""
    return f"{code.co_code.hex()} {code.co_names} {_constants(code.co_consts)}"


def _constants(values):
    return [
        code_text(v)
        if isinstance(v, types.CodeType)
        else sorted(map(repr, v))
        if isinstance(v, frozenset)
        else _without_addresses(repr(v))
        for v in values
    ]
