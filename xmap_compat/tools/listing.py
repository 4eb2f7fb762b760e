"""The program of a plan: the user's function over named axes, as a value that can be read and printed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xmap_compat import _jax
from xmap_compat.core.call import PlacedCall
from xmap_compat.core.collectives import COLLECTIVES
from xmap_compat.core.names import Checker, Names, read_names
from xmap_compat.core.nested import marks
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.rules.contraction import Subscripts
from xmap_compat.tools.text import short_type, two_columns


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of the named program.

    Attributes:
      results: names and types, ``('a', 'f32[5]{batch}')``.
      inner: the programs that it contains (the body of a scan, the branches of a cond), with labels.
    """

    results: tuple[tuple[str, str], ...]
    primitive: str
    params: str
    operands: tuple[str, ...]
    where: Position | None
    inner: tuple[tuple[str, Listing], ...]

    @property
    def text(self) -> str:
        """``a: f32[5]{batch} = mul b 2.0``"""
        results = _typed(self.results)
        call = " ".join([self.primitive + (f"[{self.params}]" if self.params else ""), *self.operands])
        return f"{results} = {call}" if results else call


def _typed(variables: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name}: {type}" for name, type in variables)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The user's function over named axes: each variable with its positional and its named shape."""

    inputs: tuple[tuple[str, str], ...]
    equations: tuple[Equation, ...]
    outputs: tuple[str, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each line of the listing, and the position that belongs to it."""
        for eqn in self.equations:
            yield eqn.text, str(eqn.where or "")
            for label, program in eqn.inner:
                yield f"  {label}({_typed(program.inputs)}):", ""
                for text, place in program.lines():
                    yield f"    {text}", place
        yield f"return {', '.join(self.outputs)}", ""

    def __str__(self) -> str:
        return self.shown()

    def shown(self, margin: int = 0) -> str:
        """The listing, with ``margin`` columns of the terminal left free."""
        inputs = [(_typed([variable]), "") for variable in self.inputs]
        return "\n".join(two_columns([*inputs, *self.lines()], margin))


# ------------------------------------------------------------------------- reading it


def listing(placed: PlacedCall, paths: Sequence[str]) -> Listing:
    """The named program of a call, in which no two values have the same name.

    Args:
      paths: the names of the arguments.
    """
    jaxpr, reader = placed.program.jaxpr, _Lister(placed, paths)
    variables = _jax.input_vars(jaxpr)
    constants = (name for k in itertools.count() if (name := f"const{k}") not in paths)
    called = dict(zip(variables, [*itertools.islice(constants, len(variables) - len(paths)), *paths]))
    return reader.read(jaxpr, [frozenset(spec.position_of()) for spec in placed.in_specs], called, None)


@dataclasses.dataclass(frozen=True)
class _Recording(Checker):
    """Infers named axes, and records over which axes the inputs of each jaxpr varied at its last visit."""

    entered: dict[int, Sequence[Names]] = dataclasses.field(default_factory=dict)

    def results(self, jaxpr, inputs):
        self.entered[id(jaxpr)] = inputs
        return super().results(jaxpr, inputs)


class _Lister:
    """Reads the jaxprs of a named program; ``called`` has the names of variables."""

    def __init__(self, placed: PlacedCall, paths: Sequence[str]):
        self.placements = placed.placements
        self.checker = _Recording(placed.placements, placed.fun_name)
        letters = (itertools.product(string.ascii_lowercase, repeat=length) for length in itertools.count(1))
        self.fresh = (name for words in letters for name in map("".join, words) if name not in paths)

    def read(self, jaxpr: Any, inputs: Sequence[Names], called: dict[Any, str], where: Position | None) -> Listing:
        body, _ = _jax.open_jaxpr(jaxpr)
        names = self.checker.variables(body, inputs)
        typed = self._called(_jax.input_vars(body), names, called)
        equations = tuple(self._equation(eqn, names, called, where) for eqn in body.eqns)
        return Listing(typed, equations, tuple(_atom(v, called) for v in body.outvars))

    def _equation(self, eqn, names, called, where) -> Equation:
        where = position_of(eqn) or where
        operands = tuple(_atom(v, called) for v in eqn.invars)
        self.checker.equation(eqn, [read_names(names, v) for v in eqn.invars])
        labelled = () if _is_plain_call(eqn) else _labelled_subjaxprs(eqn)
        entered = [(label, sub, self.checker.entered.get(id(sub))) for label, sub in labelled]
        inner = [(label, self.read(sub, inputs, {}, where)) for label, sub, inputs in entered if inputs is not None]
        return Equation(self._called(eqn.outvars, names, called), *_call_text(eqn), operands, where, tuple(inner))

    def _called(self, variables, names, called) -> tuple[tuple[str, str], ...]:
        """The names of variables, new ones where they have none, and their types."""
        for v in variables:
            if v not in called:
                called[v] = next(self.fresh)
        types = (named_type(v.aval.dtype, v.aval.shape, names[v], self.placements) for v in variables)
        return tuple(zip((called[v] for v in variables), types))


def _atom(v, called) -> str:
    if isinstance(v, _jax.Literal):
        return str(np.asarray(v.val)) if np.ndim(v.val) == 0 else short_type(v.aval.dtype, v.aval.shape)
    return called[v]


def named_type(dtype, shape, names, placements) -> str:
    """``f32[5]{batch}``"""
    ordered = [str(n) for n in placements if n in names]
    return short_type(dtype, shape) + (f"{{{','.join(ordered)}}}" if ordered else "")


_HIDDEN_PARAMS = {
    *("sharding", "out_sharding", "weak_type", "mode", "ctx_mesh", "mentions", "unroll", "axis_size", "linear"),
    *("num_consts", "num_carry", "cond_nconsts", "body_nconsts", "ft_in", "ft_out"),
}


def _is_call(eqn) -> bool:
    return isinstance(_jax.read(eqn), (_jax.Call, _jax.CustomJvp))


def _is_plain_call(eqn) -> bool:
    """A call of a function without collectives (relu, a jnp function) reads best as one equation."""
    return _is_call(eqn) and not any(e.primitive.name in COLLECTIVES for e, _ in _jax.walk(eqn.params, once=True))


def _call_text(eqn) -> tuple[str, str]:
    """A name for the equation, and those of its parameters that help a reader."""
    primitive, params = eqn.primitive.name, eqn.params
    if primitive in COLLECTIVES:
        axes = ",".join(map(str, mentioned_names(params)))
        rest = {k: v for k, v in params.items() if k not in ("axes", "axis_name") and v is not False and v != "auto"}
        rest = {k: v for k, v in rest.items() if not isinstance(v, Subscripts) or any(v.inputs)}  # no defaults
        return primitive, ", ".join([axes, *_shown_params(rest)])
    if _is_call(eqn):
        own = (eqn for eqn, around in _jax.walk(params) if not around)
        for nested in (call for eqn in own for call in marks.marked(_jax.name_stack(eqn))):
            return "xmap", nested.function
        name = params.get("name") or _inner_name(params)
        return (str(name), "") if name and _is_plain_call(eqn) else (primitive, str(name or ""))
    return primitive, ", ".join(_shown_params(params))


def _inner_name(params):
    """The name of the one function that has the custom rule."""
    for sub in _jax.subjaxprs(params):
        body, _ = _jax.open_jaxpr(sub)
        if len(body.eqns) == 1:
            return body.eqns[0].params.get("name", body.eqns[0].primitive.name)
    return None


def _shown_params(params: Mapping[str, Any]) -> list[str]:
    shown = []
    for key, value in params.items():
        if key in _HIDDEN_PARAMS or value is None or value is False or callable(value):
            continue
        if any(True for _ in _jax.subjaxprs(value)):
            continue
        text = np.dtype(value).name if isinstance(value, np.dtype) else repr(value)
        if len(text) <= 48 and " at 0x" not in text:
            shown.append(f"{key}={text}")
    return shown


def _labelled_subjaxprs(eqn) -> Iterator[tuple[str, Any]]:
    for key, value in eqn.params.items():
        subs = list(_jax.subjaxprs(value))
        for k, sub in enumerate(subs):
            yield (f"{key}[{k}]" if len(subs) > 1 else key.removesuffix("_jaxpr").replace("jaxpr", "body")), sub


def position_of(eqn) -> Position | None:
    for file, function, line, *_ in _jax.user_frames(eqn):
        return Position(file, line, function)
    return None
