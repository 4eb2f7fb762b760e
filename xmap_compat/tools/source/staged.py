"""A staged program as Python source: one statement for each equation, with public functions of JAX.

It can write whatever was staged from collectives, arithmetic and control flow.  Calls are written in
place, but for functions with a rule for their derivatives, which are written with their rules.
"""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from xmap_compat import _jax
from xmap_compat.collectives import mentioned_names
from xmap_compat.tools.source.text import (
    Lines,
    Names,
    NotWritable,
    array,
    axes,
    dtype,
    is_name,
    literal,
    partition_spec,
    scalar,
    typed_scalar,
)

Params = Mapping[str, Any]
MAX_LITERAL = 64


class Writer:
    """Writes the equations of jaxprs.

    Args:
      names: hands out names for variables.
      typed: whether the program runs in a shard_map that checks which mesh axes values vary over.
      sparing: leave casts to varying values out where operations make them by themselves.

    Attributes:
      constants: arrays too large to be written, by the names that stand for them.
      functions: the lines of functions for ``shard_map``, which must precede what is written.
    """

    def __init__(self, names: Names, typed: bool, sparing: bool):
        self.names = names
        self.typed = typed
        self.sparing = sparing
        self.constants: dict[str, Any] = {}
        self.functions = Lines()
        self._position: tuple[str, int] | None = None
        self._mesh: Any = None
        # Functions whose rules are being written, by what they do; rules call their own functions.
        self.open: dict[str, str] = {}

    def jaxpr(self, jaxpr: Any, args: Sequence[str], out: Lines) -> list[str]:
        """Write the equations; the texts of the results."""
        body, consts = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        texts = [*map(self._constant, consts)]
        texts = [*texts, *args]
        if len(texts) != len(variables):
            raise NotWritable("a program whose constants are not known")
        env = dict(zip(variables, texts))
        live = _live(body)
        implicit = _implicit_casts(body) if self.sparing else set()
        for eqn in body.eqns:
            if any(v in live for v in eqn.outvars) or _jax.has_side_effect(eqn):
                self._equation(eqn, env, live, out, implicit)
        return [self.typed_atom(v, env) for v in body.outvars]

    def _constant(self, value):
        if isinstance(value, jax.core.Tracer):
            raise NotWritable("a value of a transformation around the call")
        if np.ndim(value) == 0:
            return array(value)
        name = self.names.like("const")
        if np.size(value) <= MAX_LITERAL:
            self.functions.add(f"{name} = {array(value)}")
        else:
            self.constants[name] = value
        return name

    # ---- atoms

    def atom(self, v: Any, env: Mapping[Any, Any]) -> str:
        """A variable, or a number whose type follows from where it stands."""
        v = env.get(v, v) if not isinstance(v, _jax.Literal) else v
        return scalar(v.val) if isinstance(v, _jax.Literal) else v

    def typed_atom(self, v: Any, env: Mapping[Any, Any]) -> str:
        """The same where a number must show its type."""
        v = env.get(v, v) if not isinstance(v, _jax.Literal) else v
        if not isinstance(v, _jax.Literal):
            return v
        return scalar(v.val) if v.aval.weak_type else typed_scalar(np.asarray(v.val)[()])

    # ---- equations

    def _equation(self, eqn, env, live, out, implicit):
        primitive = eqn.primitive.name
        if eqn.outvars and eqn.outvars[0] in implicit:
            (v,) = eqn.invars
            env[eqn.outvars[0]] = v if isinstance(v, _jax.Literal) else env[v]
            return
        if primitive in _FOLDED and all(isinstance(v, _jax.Literal) for v in eqn.invars):
            env[eqn.outvars[0]] = scalar(_FOLDED[primitive](*(np.asarray(v.val) for v in eqn.invars)))
            return
        self._say_where(eqn, out)
        if primitive in STRUCTURED:
            results = STRUCTURED[primitive](self, eqn, env, out)
            env.update(zip(eqn.outvars, results, strict=True))
            return
        text = self._expression(eqn, env)
        if primitive == "add" and text.startswith("0 + "):
            text = text[4:]
        if any(text is known for known in env.values()) or text.replace(".", "", 1).lstrip("-").isdigit():
            env[eqn.outvars[0]] = text
            return
        targets = [self.names.fresh() if v in live else "_" for v in eqn.outvars]
        env.update(zip(eqn.outvars, targets))
        if not targets:
            out.add(text)
            return
        head = f"{targets[0]}," if eqn.primitive.multiple_results and len(targets) == 1 else ", ".join(targets)
        out.add(f"{head} = {text}")

    def _expression(self, eqn, env) -> str:
        primitive = eqn.primitive.name
        if primitive in EXPRESSIONS:
            return EXPRESSIONS[primitive](self, eqn, env)
        return self._bound(eqn, env)

    def _bound(self, eqn, env):
        """A primitive by its name, where no function of ``jax.lax`` is known to be it."""
        name = f"{eqn.primitive.name}_p"
        if name not in vars(primitives):
            raise NotWritable(f"the primitive {eqn.primitive.name}")
        operands = [self.typed_atom(v, env) for v in eqn.invars]
        params = [f"{key}={parameter(value)}" for key, value in eqn.params.items()]
        return f"primitives.{name}.bind({', '.join([*operands, *params])})"

    def _say_where(self, eqn, out):
        """A comment with the user's line before what came of it."""
        frames = _jax.user_frames(eqn)
        if not frames or frames[0][0::2][:2] == self._position:
            return
        file, _, line, *_ = frames[0]
        self._position = (file, line)
        code = linecache.getline(file, line).strip()
        if code:
            out.comment(f"{os.path.basename(file)}:{line}  {code}")

    # ---- functions inside

    def local_function(
        self, wanted: str, jaxpr: Any, out: Lines, consts: Sequence[str], pack: Callable, decorator: str = ""
    ) -> str:
        """Define a function for a body of control flow or a rule; its name.

        Args:
          consts: texts of the first inputs, which it closes over.
          pack: ``(parameters, results) -> (signature, lines before, returned)``.
        """
        name = self.names.like(wanted)
        count = len(_jax.open_jaxpr(jaxpr)[0].invars) - len(consts)
        parameters = [self.names.fresh() for _ in range(count)]
        signature, before, returned = pack(parameters)

        def write():
            for line in before:
                out.add(line)
            results = self.jaxpr(jaxpr, [*consts, *parameters], out)
            out.add(f"return {returned(results)}")

        out.block(f"def {name}({signature}):", write, decorator)
        return name

    def traced(self, fun: Callable[..., Any], avals: Sequence[Any]) -> Any:
        """Trace a rule of a derivative where it belongs: on a device of the mesh, if there is one."""
        if self._mesh is None:
            return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        traced = []

        def on_device():
            args = []
            for aval in avals:
                varying = tuple(m for m in self._mesh.axis_names if m in aval.manual_axis_type.varying)
                zeros = jnp.zeros(aval.shape, aval.dtype)
                args.append(lax.pcast(zeros, varying, to="varying") if varying else zeros)
            traced.append(jax.make_jaxpr(fun)(*args))
            return ()

        jax.eval_shape(jax.shard_map(on_device, mesh=self._mesh, in_specs=(), out_specs=()))
        return traced[0]


def _live(body) -> set[Any]:
    """Variables that the results or side effects need."""
    live = {v for v in body.outvars if not isinstance(v, _jax.Literal)}
    for eqn in reversed(body.eqns):
        if any(v in live for v in eqn.outvars) or _jax.has_side_effect(eqn):
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    return live


_CASTS = ("pvary", "pcast")
_FOLDED = {"mul": lambda x, y: x * y, "add": lambda x, y: x + y}


def _implicit_casts(body) -> set[Any]:
    """Results of casts to varying that operations with several operands read in the end: they cast by themselves."""
    explicit = {v for v in body.outvars if not isinstance(v, _jax.Literal)}
    for eqn in reversed(body.eqns):
        passes_on = eqn.primitive.name in _PASSING and eqn.outvars[0] not in explicit
        if eqn.primitive.name not in _CASTING and not passes_on:
            explicit.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    return {e.outvars[0] for e in body.eqns if e.primitive.name in _CASTS and e.outvars[0] not in explicit}


def packed(texts: Sequence[str]) -> str:
    """Texts as a tuple; one of them stands alone."""
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def parameter(value: Any) -> str:
    """A parameter of a primitive."""
    if isinstance(value, (np.dtype, type)) and not isinstance(value, bool):
        return dtype(value)
    if isinstance(value, lax.GatherScatterMode):
        return f"lax.GatherScatterMode.{value.name}"
    if isinstance(value, lax.Precision):
        return f"lax.Precision.{value.name}"
    for kind in (lax.GatherDimensionNumbers, lax.ScatterDimensionNumbers, lax.ConvDimensionNumbers):
        if isinstance(value, kind):
            inside = ", ".join(f"{f}={parameter(getattr(value, f))}" for f in kind.__annotations__)
            return f"lax.{kind.__name__}({inside})"
    if type(value) is tuple:
        inside = ", ".join(map(parameter, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return literal(value)


# --------------------------------------------------------------------- simple expressions


def _operator(symbol: str):
    def write(w: Writer, eqn, env):
        x, y = (w.atom(v, env) for v in eqn.invars)
        return f"{x} {symbol} {y}"

    return write


def _division(w: Writer, eqn, env):
    if np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        return f"lax.div({', '.join(w.typed_atom(v, env) for v in eqn.invars)})"
    return _operator("/")(w, eqn, env)


def _prefixed(symbol: str):
    return lambda w, eqn, env: symbol + w.atom(eqn.invars[0], env)


def _integer_pow(w: Writer, eqn, env):
    return f"{w.typed_atom(eqn.invars[0], env)} ** {eqn.params['y']}".replace(" ** ", "**")


def _function(function: str, *shown: str, **renamed: str):
    """A call with the operands, then some parameters in order, then some by another name if they are not None."""

    def write(w: Writer, eqn, env):
        operands = [w.typed_atom(v, env) for v in eqn.invars]
        return f"{function}({', '.join([*operands, *_shown(eqn.params, shown, renamed)])})"

    return write


def _shown(params, shown, renamed) -> list[str]:
    texts = [parameter(_plain(params[key])) for key in shown]
    named = [f"{new}={parameter(_plain(params[key]))}" for key, new in renamed.items() if params[key] is not None]
    return [*texts, *named]


def _plain(value):
    return tuple(value) if isinstance(value, list) else value


def _broadcasting(function: str):
    """A function of jax.numpy, which takes Python numbers for literals."""
    return lambda w, eqn, env: f"{function}({', '.join(w.atom(v, env) for v in eqn.invars)})"


def _select(w: Writer, eqn, env):
    which, *cases = eqn.invars
    if len(cases) == 2 and which.aval.dtype == np.bool_:
        all_literal = all(isinstance(c, _jax.Literal) for c in cases)
        text = w.typed_atom if all_literal else w.atom
        no, yes = (text(c, env) for c in cases)
        return f"jnp.where({w.atom(which, env)}, {yes}, {no})"
    return f"lax.select_n({', '.join(w.typed_atom(v, env) for v in eqn.invars)})"


def _broadcast_in_dim(w: Writer, eqn, env):
    x, shape, dims = eqn.invars[0], eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(eqn.invars) > 1:
        raise NotWritable("a shape that is not known")
    if not dims:
        return f"jnp.full({literal(tuple(shape))}, {w.typed_atom(x, env)})"
    text = w.typed_atom(x, env)
    if tuple(dims) == tuple(range(len(shape) - len(dims), len(shape))):
        return f"jnp.broadcast_to({text}, {literal(tuple(shape))})"
    return f"lax.broadcast_in_dim({text}, {literal(tuple(shape))}, {literal(tuple(dims))})"


def _convert(w: Writer, eqn, env):
    return f"lax.convert_element_type({w.typed_atom(eqn.invars[0], env)}, {dtype(eqn.params['new_dtype'])})"


def _list_first(function: str, *shown: str):
    def write(w: Writer, eqn, env):
        items = ", ".join(w.typed_atom(v, env) for v in eqn.invars)
        return f"{function}([{items}], {', '.join(_shown(eqn.params, shown, {}))})"

    return write


def _dynamic_slice(w: Writer, eqn, env):
    x, *starts = eqn.invars
    at = f"({', '.join(w.atom(s, env) for s in starts)}{',' if len(starts) == 1 else ''})"
    return f"lax.dynamic_slice({w.typed_atom(x, env)}, {at}, {literal(tuple(eqn.params['slice_sizes']))})"


def _dynamic_update_slice(w: Writer, eqn, env):
    x, update, *starts = eqn.invars
    at = f"({', '.join(w.atom(s, env) for s in starts)}{',' if len(starts) == 1 else ''})"
    return f"lax.dynamic_update_slice({w.typed_atom(x, env)}, {w.typed_atom(update, env)}, {at})"


def _iota(w: Writer, eqn, env):
    p = eqn.params
    if len(p["shape"]) == 1:
        return f"lax.iota({dtype(p['dtype'])}, {p['shape'][0]})"
    return f"lax.broadcasted_iota({dtype(p['dtype'])}, {literal(tuple(p['shape']))}, {p['dimension']})"


def _dot_general(w: Writer, eqn, env):
    x, y = (w.typed_atom(v, env) for v in eqn.invars)
    (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    (x_aval, y_aval) = (v.aval for v in eqn.invars)
    preferred = eqn.params.get("preferred_element_type")
    plain = not eqn.params.get("precision") and (preferred is None or preferred == np.result_type(x_aval, y_aval))
    by_matmul = (
        plain
        and not x_batch
        and (x_aval.ndim, y_aval.ndim) in ((2, 2), (1, 2), (2, 1), (1, 1))
        and tuple(x_contract) == (x_aval.ndim - 1,)
        and tuple(y_contract) == (0,)
    )
    if by_matmul:
        return f"{x} @ {y}"
    numbers = literal(((tuple(x_contract), tuple(y_contract)), (tuple(x_batch), tuple(y_batch))))
    more = {"precision": "precision", "preferred_element_type": "preferred_element_type"}
    rest = _shown({k: eqn.params.get(k) for k in more}, (), more)
    if preferred is not None and preferred == np.result_type(x_aval, y_aval):
        rest = [r for r in rest if not r.startswith("preferred")]
    return f"lax.dot_general({', '.join([x, y, numbers, *rest])})"


def _reshape(w: Writer, eqn, env):
    if eqn.params.get("dimensions") is not None or len(eqn.invars) > 1:
        raise NotWritable("a reshape that permutes")
    return f"lax.reshape({w.typed_atom(eqn.invars[0], env)}, {literal(tuple(eqn.params['new_sizes']))})"


def _slice(w: Writer, eqn, env):
    p, x = eqn.params, w.typed_atom(eqn.invars[0], env)
    strides = p["strides"] or (1,) * len(p["start_indices"])
    sizes = eqn.invars[0].aval.shape
    parts = [
        ":".join([str(a or ""), str(b) if b != size else ""]) + (f":{s}" if s != 1 else "")
        for a, b, s, size in zip(p["start_indices"], p["limit_indices"], strides, sizes)
    ]
    while len(parts) > 1 and parts[-1] == ":":
        parts.pop()
    return f"{x}[{', '.join(parts)}]"


def _pad(w: Writer, eqn, env):
    x, value = (w.typed_atom(v, env) for v in eqn.invars)
    return f"lax.pad({x}, {value}, {literal(tuple(map(tuple, eqn.params['padding_config'])))})"


def _sort(w: Writer, eqn, env):
    operands = packed([w.typed_atom(v, env) for v in eqn.invars])
    p = eqn.params
    text = f"lax.sort({operands}, dimension={p['dimension']}, is_stable={p['is_stable']}, num_keys={p['num_keys']})"
    return f"({text},)" if len(eqn.invars) == 1 else text


def _argument_of_extremum(function: str):
    def write(w: Writer, eqn, env):
        (axis,) = eqn.params["axes"]
        return f"{function}({w.typed_atom(eqn.invars[0], env)}, {axis}, {dtype(eqn.params['index_dtype'])})"

    return write


def _gather(w: Writer, eqn, env):
    x, indices = (w.typed_atom(v, env) for v in eqn.invars)
    p = eqn.params
    keys = ("dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "mode", "fill_value")
    return f"lax.gather({x}, {indices}, {', '.join(_shown(p, (), {k: k for k in keys}))})"


def _scatter(function: str):
    def write(w: Writer, eqn, env):
        operands = ", ".join(w.typed_atom(v, env) for v in eqn.invars)
        keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return f"{function}({operands}, {', '.join(_shown(eqn.params, (), {k: k for k in keys}))})"

    return write


def _convolution(w: Writer, eqn, env):
    x, kernel = (w.typed_atom(v, env) for v in eqn.invars)
    keys = (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", "precision", "preferred_element_type"),
    )
    return f"lax.conv_general_dilated({x}, {kernel}, {', '.join(_shown(eqn.params, (), {k: k for k in keys}))})"


# --------------------------------------------------------------------------- collectives


def _reduction_over(function: str):
    def write(w: Writer, eqn, env):
        operands = [w.typed_atom(v, env) for v in eqn.invars]
        text = f"{function}({packed(operands)}, {_mesh_axes(eqn)})"
        return f"({text},)" if eqn.primitive.multiple_results and len(operands) == 1 else text

    return write


def _mesh_axes(eqn) -> str:
    if eqn.params.get("axis_index_groups") is not None:
        raise NotWritable("axis_index_groups")
    return axes(mentioned_names(eqn.params))


def _all_gather(to: str = ""):
    def write(w: Writer, eqn, env):
        p = eqn.params
        more = f", axis={p['all_gather_dimension']}" if p["all_gather_dimension"] else ""
        more += ", tiled=True" if p["tiled"] else ""
        more += f", to={literal(to)}" if to and w.typed else ""
        return f"lax.all_gather({w.typed_atom(eqn.invars[0], env)}, {_mesh_axes(eqn)}{more})"

    return write


def _reduce_scatter(w: Writer, eqn, env):
    p = eqn.params
    more = f", scatter_dimension={p['scatter_dimension']}" if p["scatter_dimension"] else ""
    more += ", tiled=True" if p["tiled"] else ""
    return f"lax.psum_scatter({w.typed_atom(eqn.invars[0], env)}, {_mesh_axes(eqn)}{more})"


def _all_to_all(w: Writer, eqn, env):
    p = eqn.params
    x = w.typed_atom(eqn.invars[0], env)
    return f"lax.all_to_all({x}, {_mesh_axes(eqn)}, {p['split_axis']}, {p['concat_axis']}, tiled=True)"


def _ppermute(w: Writer, eqn, env):
    pairs = [tuple(map(int, pair)) for pair in eqn.params["perm"]]
    return f"lax.ppermute({w.typed_atom(eqn.invars[0], env)}, {_mesh_axes(eqn)}, {literal(pairs)})"


def _axis_index(w: Writer, eqn, env):
    return f"lax.axis_index({_mesh_axes(eqn)})"


def _vary(w: Writer, eqn, env):
    x = w.typed_atom(eqn.invars[0], env)
    if not w.typed:
        return x
    if isinstance(eqn.invars[0], _jax.Literal):
        x = typed_scalar(np.asarray(eqn.invars[0].val)[()])
    return f"lax.pcast({x}, {axes(mentioned_names(eqn.params))}, to={literal('varying')})"


# ---------------------------------------------------------------------------- structured


def _inlined(key: str):
    def write(w: Writer, eqn, env, out):
        return w.jaxpr(eqn.params[key], [w.typed_atom(v, env) for v in eqn.invars], out)

    return write


def _scan(w: Writer, eqn, env, out):
    p = eqn.params
    num_consts, num_carry = _jax.scan_arity(p)
    texts = [w.typed_atom(v, env) for v in eqn.invars]
    consts, carry, xs = texts[:num_consts], texts[num_consts : num_consts + num_carry], texts[num_consts + num_carry :]
    num_ys = len(eqn.outvars) - num_carry

    def pack(parameters):
        first, second = parameters[:num_carry], parameters[num_carry:]
        groups = [(group, w.names.like(name)) for group, name in ((first, "carry"), (second, "slices"))]
        before = [f"{', '.join(group)} = {name}" for group, name in groups if len(group) > 1]
        signature = ", ".join(group[0] if len(group) == 1 else name for group, name in groups)
        return signature, before, lambda r: f"{packed(r[:num_carry]) or '()'}, {packed(r[num_carry:])}"

    body = w.local_function("body", p["jaxpr"], out, consts, pack)
    more = "".join([f", length={p['length']}", ", reverse=True" if p["reverse"] else ""])
    more += f", unroll={p['unroll']}" if p["unroll"] != 1 else ""
    last = [w.names.fresh() for _ in range(num_carry)]
    ys = [w.names.fresh() for _ in range(num_ys)]
    init, scanned = packed(carry) or "()", packed(xs) if xs else "None"
    target = f"{_target(last)}, {_target(ys)}"
    out.add(f"{target} = lax.scan({body}, {init}, {scanned}{more})")
    return [*last, *ys]


def _target(names):
    return "_" if not names else packed(names)


def _while(w: Writer, eqn, env, out):
    p = eqn.params
    num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
    texts = [w.typed_atom(v, env) for v in eqn.invars]
    cond_consts, body_consts, init = (
        texts[:num_cond],
        texts[num_cond : num_cond + num_body],
        texts[num_cond + num_body :],
    )

    def pack(parameters):
        if len(parameters) == 1:
            return parameters[0], [], packed
        carry = w.names.like("carry")
        return carry, [f"{', '.join(parameters)} = {carry}"], packed

    condition = w.local_function("condition", p["cond_jaxpr"], out, cond_consts, pack)
    body = w.local_function("body", p["body_jaxpr"], out, body_consts, pack)
    results = [w.names.fresh() for _ in eqn.outvars]
    out.add(f"{_plain_target(results)} = lax.while_loop({condition}, {body}, {packed(init)})")
    return results


def _plain_target(names):
    return ", ".join(names)


def _cond(w: Writer, eqn, env, out):
    index, *operands = (w.typed_atom(v, env) for v in eqn.invars)
    single = len(eqn.outvars) == 1

    def pack(parameters):
        return ", ".join(parameters), [], lambda r: packed(r) if r else "()"

    names = [w.local_function("branch", b, out, [], pack) for b in eqn.params["branches"]]
    results = [w.names.fresh() for _ in eqn.outvars]
    call = f"lax.switch({index}, [{', '.join(names)}]{''.join(f', {x}' for x in operands)})"
    if not results:
        out.add(call)
    else:
        out.add(f"{results[0] if single else ', '.join(results)} = {call}")
    return results


def _linear_solve(w: Writer, eqn, env, out):
    """The solver itself, written in place."""
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    texts = [w.typed_atom(v, env) for v in eqn.invars]
    counts = list(lengths)
    start = sum(counts[:2])
    consts, b = texts[start : start + counts[2]], texts[sum(counts) :]
    return w.jaxpr(jaxprs.solve, [*consts, *b], out)


def _custom_jvp(w: Writer, eqn, env, out):
    """A function and the rule for its derivative, in which tangents of integers have no part."""
    texts = [w.typed_atom(v, env) for v in eqn.invars]
    avals = [v.aval for v in eqn.invars]
    has_tangent = list(map(_has_derivative, avals))
    if not any(has_tangent):
        return w.jaxpr(eqn.params["call_jaxpr"], texts, out)
    key = str(eqn.params["call_jaxpr"])
    if key in w.open:
        return _call_of(w, w.open[key], texts, eqn, out)
    run_rule = _jax.custom_jvp_rule(eqn.params)
    count = len(eqn.outvars)

    def rule(*args):
        primals, given = args[: len(avals)], iter(args[len(avals) :])
        tangents = [next(given) if has else np.zeros(a.shape, _jax.float0) for a, has in zip(avals, has_tangent)]
        outs = run_rule(*primals, *tangents)
        return [*outs[:count], *(t for t in outs[count:] if t is not None and t.dtype != _jax.float0)]

    jaxpr = w.traced(rule, [*avals, *(a for a, has in zip(avals, has_tangent) if has)])
    name = w.local_function(_name_of(eqn), eqn.params["call_jaxpr"], out, [], _flat_signature, "@jax.custom_jvp")

    def pack(parameters):
        first, rest = parameters[: len(avals)], iter(parameters[len(avals) :])
        second = [next(rest) if has else "_" for has in has_tangent]
        before = [f"{_unpacked(first)} = primals", f"{_unpacked(second)} = tangents"]

        def returned(results):
            own, given = results[:count], iter(results[count:])
            tangents = [
                next(given)
                if _has_derivative(v.aval)
                else f"np.zeros({literal(tuple(v.aval.shape))}, jax.dtypes.float0)"
                for v in eqn.outvars
            ]
            return f"{packed(own)}, {packed(tangents)}"

        return "primals, tangents", before, returned

    w.open[key] = name
    w.local_function(f"{name}_jvp", jaxpr, out, [], pack, f"@{name}.defjvp")
    del w.open[key]
    return _call_of(w, name, texts, eqn, out)


def _custom_vjp(w: Writer, eqn, env, out):
    """A function, and its rules for going forward and backward."""
    texts = [w.typed_atom(v, env) for v in eqn.invars]
    key = str(eqn.params["call_jaxpr"])
    if key in w.open:
        return _call_of(w, w.open[key], texts, eqn, out)
    forwarded, fwd, bwd = vjp_rules(eqn, w.traced)
    called = eqn.params["call_jaxpr"]
    name = w.local_function(_name_of(eqn), called, out, [], _flat_signature, "@jax.custom_vjp")
    own = sum(k is None for k in forwarded)

    def pack_fwd(parameters):
        def returned(results):
            made = iter(results[:own])
            residuals = [next(made) if k is None else parameters[k] for k in forwarded]
            return f"{packed(results[own:])}, {_tuple(residuals)}"

        return ", ".join(parameters), [], returned

    def pack_bwd(parameters):
        residuals, given = parameters[: len(forwarded)], iter(parameters[len(forwarded) :])
        cotangents = [next(given) if _has_derivative(v.aval) else "_" for v in eqn.outvars]
        before = [f"{_unpacked(residuals)} = residuals"] if residuals else []

        def returned(results):
            own = iter(results)
            return _tuple([next(own) if _has_derivative(v.aval) else "None" for v in eqn.invars])

        if len(cotangents) == 1:
            return f"residuals, {cotangents[0]}", before, returned
        return "residuals, cotangents", [*before, f"{', '.join(cotangents)} = cotangents"], returned

    w.open[key] = name
    forward = w.local_function(f"{name}_fwd", fwd, out, [], pack_fwd)
    backward = w.local_function(f"{name}_bwd", bwd, out, [], pack_bwd)
    del w.open[key]
    out.add(f"{name}.defvjp({forward}, {backward})")
    return _call_of(w, name, texts, eqn, out)


def vjp_rules(eqn: Any, trace: Callable[..., Any]) -> tuple[list[int | None], Any, Any]:
    """The rules of a ``custom_vjp_call``, traced by ``trace(fun, avals)``, without what integers take part in.

    Returns:
      The operand that serves as each residual, or None for those that the forward rule returns; the forward rule
      ``(*operands) -> (*residuals, *results)``; the backward rule ``(*residuals, *cotangents) -> cotangents``.
    """
    run_fwd, run_bwd, layout = _jax.custom_vjp_rules(eqn.params)
    avals, out_avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    constant = eqn.params["num_consts"]
    perturbed = [False] * constant + [True] * (len(avals) - constant)
    fwd = trace(functools.partial(run_fwd, perturbed), avals)
    _, _, forwarded = layout()
    made = iter(fwd.out_avals)
    residuals = [next(made) if k is None else avals[k] for k in forwarded]

    def backward(*args):
        given = iter(args[len(residuals) :])
        cotangents = [next(given) if _has_derivative(a) else np.zeros(a.shape, _jax.float0) for a in out_avals]
        results = run_bwd(*args[: len(residuals)], *cotangents)
        return [r for r, a in zip(results, avals, strict=True) if _has_derivative(a)]

    return forwarded, fwd, trace(backward, [*residuals, *filter(_has_derivative, out_avals)])


def _has_derivative(aval) -> bool:
    return jnp.issubdtype(aval.dtype, np.inexact)


def _flat_signature(parameters):
    return ", ".join(parameters), [], packed


def _unpacked(names):
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names)


def _tuple(texts):
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _name_of(eqn) -> str:
    """What the function of a rule is called: as what it calls, if that is all that it does."""
    body, _ = _jax.open_jaxpr(eqn.params["call_jaxpr"])
    name = str(body.eqns[0].params.get("name", "")) if len(body.eqns) == 1 else ""
    return name if is_name(name) else "function"


def _call_of(w: Writer, name, texts, eqn, out):
    results = [w.names.fresh() for _ in eqn.outvars]
    out.add(f"{', '.join(results)} = {name}({', '.join(texts)})")
    return results


def _shard_map(w: Writer, eqn, env, out):
    p = eqn.params
    outer, w._position = w._position, None
    w._mesh = p["mesh"]
    name, mapped = w.names.like("per_device"), w.names.like("on_devices")
    jaxpr = p["jaxpr"]
    variables = _jax.open_jaxpr(jaxpr)[0].invars
    operands = [w.typed_atom(v, env) for v in eqn.invars]
    parameters = [w.names.like(f"{o}_part") if o.isidentifier() else w.names.fresh() for o in operands]
    if len(parameters) != len(variables):
        raise NotWritable("a shard_map with constants")
    inner = Lines()

    def write():
        inner.raw(['    """What each device computes from its parts of the arguments."""'])
        results = w.jaxpr(jaxpr, parameters, inner)
        inner.add(f"return {packed(results) if results else '()'}")

    inner.block(f"def {name}({', '.join(parameters)}):", write)
    in_specs = f"({', '.join(map(partition_spec, p['in_specs']))}{',' if len(p['in_specs']) == 1 else ''})"
    out_specs = packed(list(map(partition_spec, p["out_specs"])))
    call = f"{mapped} = jax.shard_map({name}, mesh=mesh, in_specs={in_specs}, out_specs={out_specs}"
    inner.blank(2)
    inner.add(call + ("" if w.typed else ", check_vma=False") + ")")
    w.functions.blank(2)
    w.functions.raw(inner.lines)
    w._position, w._mesh = outer, None
    results = [w.names.fresh() for _ in eqn.outvars]
    out.add(f"{', '.join(results)} = {mapped}({', '.join(operands)})")
    return results


# --------------------------------------------------------------------------------- table

_SAME_NAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clz", "complex", "conj"),
    *("cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "igamma", "igammac"),
    *("imag", "is_finite", "lgamma", "log", "log1p", "logistic", "nextafter", "population_count", "real", "rem"),
    *("rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"),
    *("stop_gradient", "tan", "tanh", "clamp", "regularized_incomplete_beta", "polygamma", "zeta", "bessel_i0e"),
)
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_REDUCTIONS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor")

_PASSING = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type", "neg", "exp", "log", "abs")
_OPERATORS = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "max", "min")
_CASTING = (*_OPERATORS, "add_any", "atan2", "nextafter", "pow", "rem", "select_n", "dot_general", "clamp")

EXPRESSIONS: dict[str, Callable[[Writer, Any, Mapping[Any, str]], str]] = {
    **{name: _function(f"lax.{name}") for name in _SAME_NAME},
    **{name: _function(f"lax.{name}", "axes") for name in _REDUCTIONS},
    **{name: _function(f"lax.{name}", axis="axis", reverse="reverse") for name in _CUMULATIVE},
    "add": _operator("+"),
    "add_any": _operator("+"),
    "sub": _operator("-"),
    "mul": _operator("*"),
    "div": _division,
    "pow": _function("lax.pow"),
    "integer_pow": _integer_pow,
    "max": _broadcasting("jnp.maximum"),
    "min": _broadcasting("jnp.minimum"),
    "eq": _operator("=="),
    "ne": _operator("!="),
    "lt": _operator("<"),
    "le": _operator("<="),
    "gt": _operator(">"),
    "ge": _operator(">="),
    "and": _operator("&"),
    "or": _operator("|"),
    "xor": _operator("^"),
    "not": _prefixed("~"),
    "neg": _prefixed("-"),
    "copy": lambda w, eqn, env: w.typed_atom(eqn.invars[0], env),
    "copy_p": lambda w, eqn, env: w.typed_atom(eqn.invars[0], env),
    "round": lambda w, eqn, env: (
        f"lax.round({w.typed_atom(eqn.invars[0], env)}, lax.RoundingMode.{eqn.params['rounding_method'].name})"
    ),
    "select_n": _select,
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "bitcast_convert_type": lambda w, eqn, env: (
        f"lax.bitcast_convert_type({w.typed_atom(eqn.invars[0], env)}, {dtype(eqn.params['new_dtype'])})"
    ),
    "concatenate": _list_first("lax.concatenate", "dimension"),
    "stack": _list_first("jnp.stack", "axis"),
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _function("lax.expand_dims", "dimensions"),
    "gather": _gather,
    "scatter": _scatter("lax.scatter"),
    "scatter-add": _scatter("lax.scatter_add"),
    "scatter_add": _scatter("lax.scatter_add"),
    "scatter-mul": _scatter("lax.scatter_mul"),
    "scatter_mul": _scatter("lax.scatter_mul"),
    "scatter-min": _scatter("lax.scatter_min"),
    "scatter_min": _scatter("lax.scatter_min"),
    "scatter-max": _scatter("lax.scatter_max"),
    "scatter_max": _scatter("lax.scatter_max"),
    "iota": _iota,
    "pad": _pad,
    "reduce_precision": _function("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
    "reshape": _reshape,
    "rev": _function("lax.rev", "dimensions"),
    "slice": _slice,
    "sort": _sort,
    "split": _function("lax.split", "sizes", "axis"),
    "squeeze": _function("lax.squeeze", "dimensions"),
    "transpose": _function("lax.transpose", "permutation"),
    "unstack": _function("jnp.unstack", axis="axis"),
    "argmax": _argument_of_extremum("lax.argmax"),
    "argmin": _argument_of_extremum("lax.argmin"),
    "conv_general_dilated": _convolution,
    "random_wrap": lambda w, eqn, env: (
        f"jax.random.wrap_key_data({w.typed_atom(eqn.invars[0], env)}, impl={literal(str(eqn.params['impl'].name))})"
    ),
    "random_unwrap": _function("jax.random.key_data"),
    "random_fold_in": _function("jax.random.fold_in"),
    "random_split": _function("jax.random.split", "shape"),
    "random_bits": lambda w, eqn, env: (
        f"jax.random.bits({w.typed_atom(eqn.invars[0], env)}, "
        f"{literal(tuple(eqn.params['shape']))}, jnp.uint{eqn.params['bit_width']})"
    ),
    "psum": _reduction_over("lax.psum"),
    "psum_invariant": _reduction_over("lax.psum"),
    "pmax": _reduction_over("lax.pmax"),
    "pmin": _reduction_over("lax.pmin"),
    "all_gather": _all_gather(),
    "all_gather_invariant": _all_gather("invarying"),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "axis_index": _axis_index,
    "pvary": _vary,
    "pcast": _vary,
}

STRUCTURED: dict[str, Callable[[Writer, Any, dict[Any, str], Lines], list[str]]] = {
    "jit": _inlined("jaxpr"),
    "pjit": _inlined("jaxpr"),
    "closed_call": _inlined("call_jaxpr"),
    "core_call": _inlined("call_jaxpr"),
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "remat2": _inlined("jaxpr"),
    "remat": _inlined("jaxpr"),
    "checkpoint": _inlined("jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "shard_map": _shard_map,
}
