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
from xmap_compat.core import call as calls
from xmap_compat.core import nested_marks
from xmap_compat.core.names import Checker, read_names
from xmap_compat.core.rules.contraction import Subscripts
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import RULES
from xmap_compat.core.specs import AxisName
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
    """One step of the named program.

    Attributes:
      results: names and types, ``('a', 'f32[5]{batch}')``.
      inner: the programs that it contains (the body of a scan, the branches of a cond), with labels.
    """

    results: tuple[tuple[str, str], ...]
    primitive: str
    params: str
    operands: tuple[str, ...]
    where: Position | None
    inner: tuple[tuple[str, Program], ...]

    @property
    def text(self) -> str:
        """``a: f32[5]{batch} = mul b 2.0``"""
        results = ", ".join(f"{name}: {type}" for name, type in self.results)
        call = " ".join([self.primitive + (f"[{self.params}]" if self.params else ""), *self.operands])
        return f"{results} = {call}" if results else call


@dataclasses.dataclass(frozen=True)
class Program:
    """The user's function over named axes: each variable with its positional and its named shape."""

    inputs: tuple[tuple[str, str], ...]
    equations: tuple[Equation, ...]
    outputs: tuple[str, ...]

    def lines(self, where: bool = True) -> Iterator[tuple[str, str]]:
        """Each line of the listing, and the position that belongs to it."""
        for eqn in self.equations:
            yield eqn.text, str(eqn.where or "") if where else ""
            for label, program in eqn.inner:
                takes = ", ".join(f"{name}: {type}" for name, type in program.inputs)
                yield f"  {label}({takes}):", ""
                for text, place in program.lines(where):
                    yield f"    {text}", place
        yield f"return {', '.join(self.outputs)}", ""

    def __str__(self) -> str:
        return self.shown()

    def shown(self, margin: int = 0) -> str:
        """The listing, with ``margin`` columns of the terminal left over."""
        inputs = [(f"{name}: {type}", "") for name, type in self.inputs]
        return "\n".join(two_columns([*inputs, *self.lines()], margin))


# ------------------------------------------------------------------------- reading it


@dataclasses.dataclass(frozen=True)
class _Recording(Checker):
    """Infers named shapes and remembers those of every jaxpr that it has last looked into."""

    seen: dict[int, dict[Any, frozenset[AxisName]]] = dataclasses.field(default_factory=dict)

    def variables(self, jaxpr, inputs):
        names = super().variables(jaxpr, inputs)
        self.seen[id(_jax.open_jaxpr(jaxpr)[0])] = names
        return names


class Listing:
    """Reads a named program into a :class:`Program`, in which no two values have one name.

    Args:
      paths: what the arguments are called.
    """

    def __init__(self, plan: calls.PlacedCall, paths: Sequence[str]):
        self.plan = plan
        self.paths = paths
        self.checker = _Recording(plan.placements, plan.fun_name)
        self.fresh = (name for name in _letters() if name not in paths)
        self.constants = (name for k in itertools.count() if (name := f"const{k}") not in paths)

    def program(self) -> Program:
        jaxpr = self.plan.program.jaxpr
        inputs = [frozenset(spec.position_of()) for spec in self.plan.in_specs]
        names = self.checker.variables(jaxpr, inputs)
        variables = _jax.input_vars(jaxpr)
        consts = itertools.islice(self.constants, len(variables) - len(self.paths))
        return self._read(jaxpr, names, dict(zip(variables, [*consts, *self.paths])))

    def _read(self, jaxpr, names, called, where=None) -> Program:
        body, _ = _jax.open_jaxpr(jaxpr)
        for v in _jax.input_vars(body):
            if v not in called:
                called[v] = next(self.fresh)
        inputs = tuple((called[v], self._type(v, names)) for v in _jax.input_vars(body))
        equations = tuple(self._equation(eqn, names, called, where) for eqn in body.eqns)
        return Program(inputs, equations, tuple(self._atom(v, called) for v in body.outvars))

    def _equation(self, eqn, names, called, where) -> Equation:
        where = position_of(eqn) or where
        operands = tuple(self._atom(v, called) for v in eqn.invars)
        self.checker.equation(eqn, [read_names(names, v) for v in eqn.invars])
        seen = dict(self.checker.seen)
        primitive, params = _call_text(eqn)
        inner = []
        if not _is_plain_call(eqn):
            for label, sub in _labelled_subjaxprs(eqn):
                sub_names = seen.get(id(_jax.open_jaxpr(sub)[0]))
                if sub_names is not None:
                    inner.append((label, self._read(sub, sub_names, {}, where)))
        for v in eqn.outvars:
            called[v] = next(self.fresh)
        results = tuple((called[v], self._type(v, names)) for v in eqn.outvars)
        return Equation(results, primitive, params, operands, where, tuple(inner))

    def _type(self, v, names):
        return named_type(v.aval.dtype, v.aval.shape, read_names(names, v), self.plan.placements)

    def _atom(self, v, called):
        if isinstance(v, _jax.Literal):
            return str(np.asarray(v.val)) if np.ndim(v.val) == 0 else short_type(v.aval.dtype, v.aval.shape)
        return called[v]


def _letters() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


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
    inner = (e for sub in _jax.subjaxprs(eqn.params) for e, _ in _jax.walk(sub))
    return _is_call(eqn) and not any(e.primitive.name in RULES for e in inner)


def _call_text(eqn) -> tuple[str, str]:
    """A name for the step and its parameters, the telling ones."""
    primitive, params = eqn.primitive.name, eqn.params
    if primitive in RULES:
        axes = ",".join(map(str, mentioned_names(params)))
        rest = {k: v for k, v in params.items() if k not in ("axes", "axis_name") and not _is_usual(v)}
        return primitive, ", ".join([axes, *_shown_params(rest)])
    if _is_call(eqn):
        if nested := _nested_function(params):
            return "xmap", nested
        name = params.get("name") or _inner_name(params)
        return (str(name), "") if name and _is_plain_call(eqn) else (primitive, str(name or ""))
    return primitive, ", ".join(_shown_params(params))


def _is_usual(value):
    """Whether a parameter of a collective is as it is when one does not ask for anything."""
    return value is False or value == "auto" or (isinstance(value, Subscripts) and not any(value.inputs))


def _nested_function(params) -> str | None:
    """The name of the xmapped function that is called, if it is one."""
    for sub in _jax.subjaxprs(params):
        for eqn in _jax.open_jaxpr(sub)[0].eqns:
            for call in nested_marks.marked(_jax.name_stack(eqn)):
                return call.function
    return None


def _inner_name(params):
    """The name of the one function that a custom rule was made for."""
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
