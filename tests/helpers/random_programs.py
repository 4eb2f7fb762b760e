"""Random programs over named axes, and random assignments of their axes: strategies for hypothesis.

A :class:`Program` is source text: the same text runs under xmap and, with other meanings of ``jax``, ``jnp``
and ``lax``, in the model of ``named_arrays.py``.  The
writer of the text knows of each value its positional shape, its kind (float or integer) and an upper bound
of the names that it varies over; values stay small, and whatever decides something (a branch, an index, a
number of turns) is computed exactly, from integers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from types import SimpleNamespace
from typing import Any

import element_functions
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from named_arrays import Model, Named

import xmap_compat
from xmap_compat import SerialLoop

RULES = {
    "half_backward": """
@jax.custom_vjp
def half_backward(x):
    return jnp.sin(x)

half_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (0.5 * ct * jnp.cos(x),))
""",
    "half_tangent": """
@jax.custom_jvp
def half_tangent(x):
    return jnp.cos(x)

half_tangent.defjvp(lambda primals, tangents: (jnp.cos(primals[0]), -0.5 * jnp.sin(primals[0]) * tangents[0]))
""",
    "copy_to_all": """
def copy_to_all(name):
    @jax.custom_vjp
    def identity(x):
        return x * 1.0

    identity.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (lax.psum(ct, name),))
    return identity
""",
    "sine_and_mean": """
def sine_and_mean(name):
    @jax.custom_vjp
    def summed(x):
        return jnp.sin(x) + lax.pmean(x * x, name)

    def forward(x):
        return jnp.sin(x) + lax.pmean(x * x, name), x

    def backward(x, ct):
        return (jnp.cos(x) * ct + 2 * x * lax.pmean(ct, name),)

    summed.defvjp(forward, backward)
    return summed
""",
    "sum_from_all": """
def sum_from_all(name):
    @jax.custom_vjp
    def total(x):
        return lax.psum(x, name)

    total.defvjp(lambda x: (lax.psum(x, name), None), lambda _, ct: (ct,))
    return total
""",
}

# ------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True)
class Var:
    """A value in the text: how to write it, its positional shape, kind, and the most names it may vary over."""

    text: str
    shape: tuple[int, ...]
    names: frozenset[str]
    kind: str = "float"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument or a result: where its names are in the positional array."""

    var: Var
    layout: tuple[str | None, ...]  # a name or None for each dimension
    spec: Any  # the same as the program writes it

    def shape(self, sizes):
        positional = iter(self.var.shape)
        return tuple(next(positional) if n is None else sizes[n] for n in self.layout)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function over named axes as text, and how xmap is called with it.

    Attributes:
      source: the text of ``body``, with the custom rules that it uses.
      args, results: of the body, in order.
      sizes: of the axes that the xmap defines, and of those of xmaps in the body.
      inner: the axes of xmaps in the body.
      used: axes that something refers to by name.
      seed: of the arguments.
    """

    source: str
    args: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    sizes: dict[str, int]
    inner: dict[str, int]
    used: frozenset[str]
    seed: int

    def arrays(self):
        rng = np.random.default_rng(self.seed)
        return [_draw_array(rng, leaf.shape(self.sizes), leaf.var.kind) for leaf in self.args]

    def body(self, namespace, assignment):
        """The Python function; ``inner`` in its source holds the resources of inner xmaps."""
        namespace["inner"] = {name: assignment.of([name]) for name in self.inner}
        exec(compile(self.source, "<random program>", "exec"), namespace)
        return namespace["body"]

    def xmapped(self, assignment, captured=None):
        """A function of the list of arrays that gives the list of result arrays, by xmap.

        ``captured``: arguments that the body captures instead, by index.
        """
        namespace = {"jax": jax, "jnp": jnp, "lax": lax}
        for name in ("xmap", "pargmax", "pargmin"):
            namespace[name] = getattr(xmap_compat, name)
        namespace["elements"] = SimpleNamespace(**element_functions.ALL)
        body = self.body(namespace, assignment)
        own = dict(self.sizes)
        for leaf in self.args:
            for name in leaf.layout:
                own.pop(name, None)
        captured = captured or {}
        kept = [k for k in range(len(self.args)) if k not in captured]

        def of_kept(*given):
            filled = {**captured, **dict(zip(kept, given))}
            return body(*(filled[k] for k in range(len(self.args))))

        in_axes = tuple(self.args[k].spec for k in kept)
        resources = assignment.of(self.sizes)
        mapped = xmap_compat.xmap(
            of_kept, in_axes, self.out_axes, axis_sizes=own, axis_resources=resources
        )
        return lambda *arrays: mapped(*(arrays[k] for k in kept))

    @property
    def out_axes(self):
        return tuple(leaf.spec for leaf in self.results)

    def modelled(self, xp=np):
        """The same function by the model."""

        def function(*arrays):
            model = Model(self.sizes, xp)
            elements = {n: model.for_each(f) for n, f in element_functions.ALL.items()}
            namespace = {**model.namespace(), "elements": SimpleNamespace(**elements)}
            body = self.body(namespace, NOWHERE)
            named = [_enter(model, array, leaf) for array, leaf in zip(arrays, self.args)]
            results = zip(body(*named), self.results)
            return [_leave(model, model.named(r), leaf) for r, leaf in results]

        return function

    def text(self, assignment):
        """The program and its call, for a report."""
        specs = f"{[leaf.spec for leaf in self.args]} -> {self.out_axes}"
        shapes = [leaf.shape(self.sizes) for leaf in self.args]
        return (
            f"{self.source}\n{specs}, sizes {self.sizes}, of {shapes} of seed {self.seed},"
            f" on {assignment}"
        )

    def __repr__(self):
        return f"program of seed {self.seed}"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


def _draw_array(rng, shape, kind):
    if kind == "int":
        return rng.integers(0, 10, shape).astype("int32")
    return rng.normal(size=shape).astype("float32")


def _enter(model, array, leaf):
    names = [n for n in leaf.layout if n is not None]
    data = model.xp.moveaxis(array, [leaf.layout.index(n) for n in names], range(len(names)))
    if model.xp is np and leaf.var.kind == "float":
        data = np.asarray(data, np.float64)
    return Named(model, data, names)


def _leave(model, value, leaf):
    names = model.ordered(n for n in leaf.layout if n is not None)
    data = model.expanded(value, names)
    return model.xp.moveaxis(data, range(len(names)), [leaf.layout.index(n) for n in names])


# -------------------------------------------------------------------------- assignments

MESHES = [
    (("x", 4), ("y", 2)),
    (("x", 2), ("y", 2), ("z", 2)),
    (("x", 8),),
    (("y", 2), ("x", 3)),
    (("x", 2), ("u", 1)),
]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A mesh, and resources for some of the axes of a program."""

    mesh: tuple[tuple[str, int], ...]
    resources: dict[str, tuple[Any, ...]]

    def of(self, axes):
        return {name: self.resources[name] for name in axes if name in self.resources}

    @contextlib.contextmanager
    def context(self):
        names, shape = zip(*self.mesh) if self.mesh else ((), ())
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        with xmap_compat.Mesh(devices, names):
            yield

    def __repr__(self):
        return f"{dict(self.mesh)}: {self.resources}"

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


NOWHERE = Assignment((), {})


@st.composite
def assignments(draw, program):
    """Distinct mesh axes for the axes, in any order, and loops for axes that nothing refers to."""
    mesh = draw(st.sampled_from(MESHES))
    left = dict(mesh)
    resources = {}
    axes = {**program.sizes, **program.inner}
    for name in draw(st.permutations(sorted(axes))):
        taken, rest = [], axes[name]
        for resource in draw(st.permutations(sorted(left))):
            if rest % left[resource] == 0 and draw(st.integers(0, 3)):
                taken.append(resource)
                rest //= left.pop(resource)
        if name not in program.used and rest > 1 and draw(st.booleans()):
            lengths = [k for k in range(1, rest + 1) if rest % k == 0]
            taken.append(SerialLoop(draw(st.sampled_from(lengths))))
        if taken:
            resources[name] = tuple(taken)
    return Assignment(mesh, resources)


# ------------------------------------------------------------------------------ writing

MAX_SIZE = 48


class Writer:
    """Writes the lines of one function.

    Attributes:
      draw: hypothesis's.
      shared: what all writers of a program share.
      env: the values in scope.
      lines: the text so far.
      axes: the named axes in scope.
    """

    def __init__(self, draw, shared, env, axes, depth=0):
        self.draw, self.shared = draw, shared
        self.env, self.axes, self.depth = list(env), axes, depth
        self.lines = []

    # --------------------------------------------------------------------- drawing

    def number(self, low, high):
        return self.draw(st.integers(low, high))

    def choose(self, options):
        options = list(options)
        return options[self.number(0, len(options) - 1)]

    def flag(self):
        return self.draw(st.booleans())

    def some(self, options, least=1):
        options = list(options)
        chosen = [o for o in self.draw(st.permutations(options)) if self.flag()]
        return chosen if len(chosen) >= least else options[:least]

    def float_var(self, suits=lambda v: True):
        return self._latest(v for v in reversed(self.env) if v.kind == "float" and suits(v))

    def small(self, size, suits=lambda v: True):
        return self.float_var(lambda v: math.prod(v.shape) <= size and suits(v))

    def int_var(self, suits=lambda v: True):
        return self._latest(v for v in reversed(self.env) if v.kind == "int" and suits(v))

    def scalar_int(self):
        return self.int_var(lambda n: n.shape == ())

    def dimension(self, v):
        return self.number(0, len(v.shape) - 1)

    def size_of(self, names):
        return math.prod(self.shared.sizes[n] for n in names)

    def _latest(self, fitting):
        """One of them, or None; mostly one of the latest, so that statements build on each other."""
        fitting = list(fitting)
        return self.choose(fitting if self.number(0, 2) == 2 else fitting[:2]) if fitting else None

    def name(self, vmapped=False):
        """An axis name that is about to be referred to; of a vmap's only if asked for."""
        name = self.choose(n for n in self.axes if vmapped or n not in self.shared.vmapped)
        self.shared.used.add(name)
        return name

    def some_names(self, vmapped=False):
        names = self.some(n for n in self.axes if vmapped or n not in self.shared.vmapped)
        self.shared.used.update(names)
        return tuple(names)

    # --------------------------------------------------------------------- writing

    def fresh(self, letter="v"):
        self.shared.counter += 1
        return f"{letter}{self.shared.counter}"

    def let(self, expression, shape, names, kind="float"):
        """Bind an expression to a new variable."""
        var = Var(self.fresh(), tuple(shape), frozenset(names), kind)
        self.lines.append(f"{var.text} = {expression}")
        if math.prod(shape) <= MAX_SIZE:
            self.env.append(var)
            return var
        total = Var(self.fresh(), (), var.names, kind)
        self.lines.append(
            f"{total.text} = jnp.sum({var.text})" + (" * 0.1" if kind == "float" else "")
        )
        self.env.append(total)
        return total

    def define(self, params, write, suffix="f"):
        """Define an inner function of the given values; ``write(writer) -> text`` of what it returns."""
        inner = Writer(self.draw, self.shared, [*self.env, *params], self.axes, self.depth + 1)
        name = self.fresh(suffix)
        returned = write(inner)
        self.lines.append(f"def {name}({', '.join(p.text for p in params)}):")
        self.lines.extend("    " + line for line in [*inner.lines, f"return {returned}"])
        return name

    def statements(self, count):
        for _ in range(count):
            self.statement()

    def statement(self):
        table = OPERATIONS if self.depth < 2 else FLAT_OPERATIONS
        operation = self.choose(table + ELEMENT_OPERATIONS * self.shared.elements)
        if operation(self) is None:
            unary(self)

    def inner_value(self, shape):
        """A few statements, and the text of a bounded value of the given shape."""
        self.statements(self.number(1, 3))
        return self.fitted(self.env[-1], shape)

    def fitted(self, var, shape):
        if var.kind != "float":
            return f"(jnp.sum({var.text}) * 0.1 + jnp.zeros({shape}))"
        return (
            f"jnp.tanh({var.text})"
            if var.shape == shape
            else f"(jnp.tanh(jnp.sum({var.text})) + jnp.zeros({shape}))"
        )

    def all_names(self):
        return frozenset(self.axes).union(*(v.names for v in self.env))


def has_dimensions(v):
    return v.shape != ()


def expanded(w, v, size):
    """Text of a float value with a new leading dimension of the given size, along which it differs."""
    ranks = ", ".join(["-1", *["1"] * len(v.shape)])
    return f"({v.text} * (1.0 + 0.5 * jnp.arange({size}.0)).reshape({ranks}))"


# --------------------------------------------------------------------- positional operations


def unary(w):
    v = w.float_var()
    function = w.choose(
        ["jnp.sin({})", "jnp.tanh({})", "{} * 0.5", "-{}", "jnp.cos({})", "1.5 - {}"]
    )
    return w.let(function.format(v.text), v.shape, v.names)


def binary(w):
    v = w.float_var()
    u = w.float_var(lambda u: _broadcasts(u.shape, v.shape))
    function = w.choose(
        ["{} + {}", "{} * {}", "{} - {}", "jnp.maximum({}, {})", "jnp.minimum({}, jnp.sin({}))"]
    )
    shape = np.broadcast_shapes(u.shape, v.shape)
    return w.let(function.format(v.text, u.text), shape, v.names | u.names)


def _broadcasts(a, b):
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1]))


def with_integer(w):
    n, v = w.scalar_int(), w.float_var()
    if n is None:
        return None
    return w.let(f"{v.text} * (0.1 * {n.text})", v.shape, v.names | n.names)


def integer(w):
    n = w.int_var()
    if n is None:
        return None
    function = w.choose(["{} + 1", "{} % 3", "{} * 2 - 1", "jnp.maximum({}, 2)"])
    return w.let(function.format(n.text), n.shape, n.names, "int")


def select(w):
    n = w.scalar_int()
    v = w.float_var()
    if n is None:
        return None
    return w.let(
        f"jnp.where({n.text} > {w.number(0, 6)}, {v.text}, 0.5)", v.shape, v.names | n.names
    )


def reduce_positions(w):
    v = w.float_var(has_dimensions)
    if v is None:
        return None
    dims = tuple(sorted(w.some(range(len(v.shape)))))
    function = w.choose(["sum", "mean", "max"])
    shape = [n for k, n in enumerate(v.shape) if k not in dims]
    return w.let(f"jnp.{function}({v.text}, axis={dims})", shape, v.names)


def rearrange(w):
    v = w.float_var(has_dimensions)
    if v is None:
        return None
    n, *rest = v.shape
    total = math.prod(v.shape)
    text, shape = w.choose(
        [
            ("{}[0]", rest),
            ("{}.reshape(-1)", [total]),
            ("{}.T", v.shape[::-1]),
            ("jnp.flip({}, 0)", v.shape),
            ("jnp.concatenate([{0}, {0} * 0.5], 0)", [2 * n, *rest]),
            ("jnp.stack([{0}, jnp.sin({0})], -1)", [*v.shape, 2]),
            ("jnp.cumsum({}, 0)", v.shape),
            ("jnp.sort({}, 0)", v.shape),
            ("jnp.roll({}, 1, 0)", v.shape),
            ("{}[::2]", [(n + 1) // 2, *rest]),
            ("jnp.expand_dims({}, 0)", [1, *v.shape]),
            ("jnp.concatenate([{0}[1:], {0}[:1]], 0)", v.shape),
        ]
    )
    return w.let(text.format(v.text), shape, v.names)


def widen(w):
    v = w.small(12)
    if v is None:
        return None
    size = w.number(1, 4)
    return w.let(expanded(w, v, size), [size, *v.shape], v.names)


def matmul(w):
    v = w.float_var(has_dimensions)
    u = v and w.float_var(lambda u: u.shape and u.shape[0] == v.shape[-1] and len(u.shape) <= 2)
    if u is None:
        return None
    return w.let(
        f"0.3 * jnp.tensordot({v.text}, {u.text}, 1)",
        [*v.shape[:-1], *u.shape[1:]],
        v.names | u.names,
    )


def index(w):
    v = w.float_var(has_dimensions)
    n = w.scalar_int()
    if v is None or n is None:
        return None
    return w.let(f"{v.text}[{n.text} % {v.shape[0]}]", v.shape[1:], v.names | n.names)


# ------------------------------------------------------------------------- named operations


def axis_index(w):
    name = w.name(vmapped=True)
    return w.let(f"lax.axis_index({name!r})", (), {name}, "int")


def sum_over_names(w):
    v, names = w.float_var(), w.some_names(vmapped=True)
    call = w.choose(
        ["0.3 * lax.psum({}, {})", "lax.pmean({}, {})", "lax.pmax({}, {})", "lax.pmin({}, {})"]
    )
    return w.let(call.format(v.text, _names_text(w, names)), v.shape, v.names - set(names))


def _names_text(w, names):
    return repr(names[0]) if len(names) == 1 and w.flag() else repr(tuple(names))


def integer_sum_over_names(w):
    v, names = w.int_var(), w.some_names(vmapped=True)
    if v is None:
        return None
    call = w.choose(["lax.psum({}, {})", "lax.pmax({}, {})", "lax.pmin({}, {})"])
    return w.let(f"({call.format(v.text, names)}) % 11", v.shape, v.names - set(names), "int")


def named_reduction(w):
    v, names = w.float_var(), w.some_names(vmapped=True)
    dims = w.some(range(len(v.shape)), 0)
    axes = tuple(w.draw(st.permutations([*names, *dims])))
    function = w.choose(
        [
            "0.3 * jnp.sum({}, axis={})",
            "jnp.mean({}, axis={})",
            "jnp.max({}, axis={})",
            "jnp.var({}, axis={})",
            "jax.nn.logsumexp(jnp.sin({}), axis={})",
        ]
    )
    shape = [n for k, n in enumerate(v.shape) if k not in dims]
    return w.let(function.format(v.text, axes), shape, v.names - set(names))


def softmax(w):
    v, name = w.float_var(), w.name()
    return w.let(f"jax.nn.softmax({v.text}, axis={name!r})", v.shape, v.names | {name})


def ppermute(w):
    v = w.float_var()
    names = w.some_names()
    size = w.size_of(names)
    order = w.draw(st.permutations(range(size)))
    perm = list(zip(range(size), order))
    perm = [pair for pair in perm if w.flag()] if w.flag() else perm
    return w.let(
        f"lax.ppermute({v.text}, {_names_text(w, names)}, {perm})", v.shape, v.names | set(names)
    )


def pshuffle(w):
    v, name = w.float_var(), w.name()
    order = list(w.draw(st.permutations(range(w.shared.sizes[name]))))
    return w.let(f"lax.pshuffle({v.text}, {name!r}, {order})", v.shape, v.names | {name})


def all_gather(w):
    v, names = w.float_var(), w.some_names()
    size = w.size_of(names)
    tiled = bool(v.shape) and w.flag()
    at = w.number(0, len(v.shape) - tiled)
    shape = list(v.shape)
    if tiled:
        shape[at] *= size
    else:
        shape.insert(at, size)
    text = f"lax.all_gather({v.text}, {_names_text(w, names)}, axis={at}, tiled={tiled})"
    return w.let(text, shape, v.names - set(names))


def psum_scatter(w):
    v, names = w.small(8), w.some_names()
    if v is None:
        return None
    size = w.size_of(names)
    tiled = w.flag()
    at = w.number(0, len(v.shape))
    length = size * (w.number(1, 2) if tiled else 1)
    text = f"jnp.moveaxis({expanded(w, v, length)}, 0, {at})"
    shape = list(v.shape)
    if tiled:
        shape.insert(at, length // size)
    text = f"0.3 * lax.psum_scatter({text}, {_names_text(w, names)}, scatter_dimension={at}, tiled={tiled})"
    return w.let(text, shape, v.names | set(names))


def all_to_all(w):
    v, name = w.small(8), w.name()
    if v is None:
        return None
    size = w.shared.sizes[name]
    tiled = w.flag()
    length = size * (w.number(1, 2) if tiled else 1)
    shape = [length, *v.shape]
    split = w.number(0, len(v.shape))
    text = f"jnp.moveaxis({expanded(w, v, length)}, 0, {split})"
    shape.insert(split, shape.pop(0))
    concat = w.number(0, len(v.shape))
    if tiled:
        shape[split] //= size
        shape[concat] *= size
    else:
        shape.pop(split)
        shape.insert(concat, size)
    text = f"lax.all_to_all({text}, {name!r}, {split}, {concat}, tiled={tiled})"
    return w.let(text, shape, v.names | {name})


def pdot(w):
    v = w.float_var()
    u = w.float_var(lambda u: u.shape[:1] == v.shape[-1:] or not v.shape)
    names = w.some_names()
    if u is None:
        return None
    contract = bool(v.shape) and bool(u.shape) and v.shape[-1] == u.shape[0] and w.flag()
    numbers = ((len(v.shape) - 1,), (0,)) if contract else ((), ())
    shape = [*v.shape[:-1], *u.shape[1:]] if contract else [*v.shape, *u.shape]
    text = f"0.2 * lax.pdot({v.text}, {u.text}, {_names_text(w, names)}, pos_contract={numbers})"
    return w.let(text, shape, (v.names | u.names) - set(names))


def pargmax(w):
    n, name = w.int_var(), w.name()
    if n is None:
        return None
    return w.let(
        f"{w.choose(['pargmax', 'pargmin'])}({n.text}, {name!r})", n.shape, n.names - {name}, "int"
    )


# ------------------------------------------------------------------------- control flow


def scan(w):
    v = w.small(16)
    xs = w.small(24, has_dimensions)
    if v is None or xs is None:
        return None
    everything = w.all_names()
    carry = Var(w.fresh("c"), v.shape, everything)
    x = Var(w.fresh("t"), xs.shape[1:], xs.names)
    row = w.float_var(lambda u: u.shape == ()) or None

    def write(inner):
        new = inner.inner_value(v.shape)
        return f"({carry.text} * 0.5 + {new}, {row.text if row else x.text})"

    body = w.define([carry, x], write)
    pair = Var(w.fresh(), v.shape, everything)
    ys = Var(w.fresh(), (xs.shape[0], *(row.shape if row else xs.shape[1:])), everything)
    reverse = w.flag()
    w.lines.append(
        f"{pair.text}, {ys.text} = lax.scan({body}, {v.text}, {xs.text}, reverse={reverse})"
    )
    w.env.extend([ys, pair] if math.prod(ys.shape) <= MAX_SIZE else [pair])
    return pair


def fori_loop(w):
    v = w.small(16)
    if v is None:
        return None
    everything = w.all_names()
    carry = Var(w.fresh("c"), v.shape, everything)
    step = Var(w.fresh("k"), (), frozenset(), "step")
    body = w.define(
        [step, carry],
        lambda inner: f"{carry.text} * 0.5 + {inner.inner_value(v.shape)} * ({step.text} + 1)",
    )
    return w.let(f"lax.fori_loop(0, {w.number(1, 3)}, {body}, {v.text})", v.shape, everything)


def cond(w):
    v, n = w.small(16), w.scalar_int()
    if v is None or n is None:
        return None
    everything = w.all_names()
    param = Var(w.fresh("p"), v.shape, v.names)
    branches = [
        w.define([param], lambda inner: inner.inner_value(v.shape)) for _ in range(w.number(2, 3))
    ]
    if len(branches) == 2:
        text = f"lax.cond({n.text} > {w.number(0, 4)}, {', '.join(branches)}, {v.text})"
    else:
        text = f"lax.switch({n.text} % 3, [{', '.join(branches)}], {v.text})"
    return w.let(text, v.shape, everything)


def while_loop(w, n=None):
    v, n = w.small(16), n or w.scalar_int()
    if v is None or n is None or not w.shared.while_loops:
        return None
    everything = w.all_names()
    count = Var(w.fresh("n"), (), everything, "int")
    value = Var(w.fresh("c"), v.shape, everything)
    state = Var(w.fresh("s"), (), everything, "state")

    def write(inner):
        inner.lines.append(f"{count.text}, {value.text} = {state.text}")
        inner.env.extend([count, value])
        return f"({count.text} - 1, {value.text} * 0.5 + {inner.inner_value(v.shape)})"

    body = w.define([state], write)
    text = f"lax.while_loop(lambda s: s[0] > 0, {body}, ({n.text} % {w.number(2, 4)}, {v.text}))[1]"
    return w.let(text, v.shape, everything)


def wrapped(w):
    """jit, remat, and vmap over a dimension."""
    v = w.small(16)
    if v is None:
        return None
    everything = w.all_names()
    wrap = w.choose(["jax.vmap", "jax.jit", "jax.checkpoint"])
    if wrap != "jax.vmap" or not v.shape:
        wrap = "jax.jit" if wrap == "jax.vmap" else wrap
        param = Var(w.fresh("p"), v.shape, v.names)
        body = w.define([param], lambda inner: inner.inner_value(v.shape))
        return w.let(f"{wrap}({body})({v.text})", v.shape, everything)
    at, out = w.dimension(v), w.dimension(v)

    def call(body, name):
        return f"jax.vmap({body}, in_axes={at}, out_axes={out}, axis_name={name!r})"

    return _mapped(w, v, at, out, call, w.shared.vmapped)


def vmapped_while(w):
    """A loop that turns as often as the index of a vmap says: JAX stages one loop with an array for a predicate."""
    v = w.small(16, has_dimensions)
    if v is None or not w.shared.while_loops:
        return None
    at, out = w.dimension(v), w.dimension(v)

    def call(body, name):
        return f"jax.vmap({body}, in_axes={at}, out_axes={out}, axis_name={name!r})"

    def first(inner, name):
        while_loop(inner, inner.let(f"lax.axis_index({name!r})", (), {name}, "int"))

    return _mapped(w, v, at, out, call, w.shared.vmapped, first)


def inner_xmap(w):
    v = w.small(24, has_dimensions)
    if v is None:
        return None
    at, out = w.dimension(v), w.dimension(v)

    def call(body, name):
        return f"xmap({body}, ({{{at}: {name!r}}},), {{{out}: {name!r}}}, axis_resources=inner[{name!r}])"

    return _mapped(w, v, at, out, call, w.shared.inner)


def _mapped(w, v, at, out, call, registry, first=lambda inner, name: None):
    """A function mapped over a dimension of v by vmap or an inner xmap; its axis has a name inside.

    Args:
      first: writes statements at the start of the function.
    """
    everything = w.all_names()
    name = w.fresh("m")
    registry.add(name)
    size = v.shape[at]
    rest = tuple(n for k, n in enumerate(v.shape) if k != at)
    param = Var(w.fresh("p"), rest, v.names | {name})
    w.shared.sizes[name] = size

    def write(inner):
        inner.axes = [*inner.axes, name]
        first(inner, name)
        return inner.inner_value(rest)

    text = call(w.define([param], write), name)
    shape = list(rest)
    shape.insert(out, size)
    result = w.let(f"{text}({v.text})", shape, everything)
    return result


def inner_grad(w):
    v = w.small(16)
    if v is None or w.shared.in_grad:
        return None
    everything = w.all_names()
    param = Var(w.fresh("p"), v.shape, everything)
    with w.shared.with_changes(in_grad=True, while_loops=False):
        body = w.define([param], lambda inner: f"jnp.sum({inner.inner_value(v.shape)})")
    return w.let(f"0.3 * jax.grad({body})({v.text})", v.shape, everything)


def inner_jvp(w, call="sum(jax.jvp({}, ({},), ({},)))"):
    v = w.small(16)
    u = v and w.float_var(lambda u: u.shape == v.shape)
    if u is None or w.shared.in_grad:
        return None
    everything = w.all_names()
    param = Var(w.fresh("p"), v.shape, everything)
    with w.shared.with_changes(backward_rules=False):
        body = w.define([param], lambda inner: inner.inner_value(v.shape))
    return w.let(call.format(body, v.text, u.text), v.shape, everything)


def custom_rule(w):
    v = w.float_var()
    rule = w.choose(
        [
            "half_tangent",
            *["half_backward", "copy_to_all", "sum_from_all"] * w.shared.backward_rules,
        ]
    )
    if rule.startswith("half"):
        return w.let(f"{rule}({v.text})", v.shape, v.names)
    name = w.name()
    names = v.names - {name} if rule == "sum_from_all" else v.names
    return w.let(f"0.3 * {rule}({name!r})({v.text})", v.shape, names)


def element_function(w):
    """A function of JAX that has no names: linear algebra, solvers, random numbers, narrow floats, branches."""
    mapped = not w.shared.vmapped.isdisjoint(w.axes)
    only_values = w.shared.while_loops and w.shared.backward_rules
    kinds = [element_functions.SMOOTH] * 3 + [element_functions.OF_INTEGERS]
    if not mapped:
        kinds += [element_functions.OTHER_KEYS, element_functions.BRANCHING]
        kinds += [element_functions.ONLY_VALUES] * only_values
    kind = w.choose(kinds)
    name = w.choose(sorted(kind))
    v = w.float_var()
    if kind in (element_functions.OF_INTEGERS, element_functions.OTHER_KEYS):
        other = w.scalar_int() or axis_index(w)
        text = other.text
    else:
        other = w.float_var()
        text = w.fitted(other, (3,))
    text = f"elements.{name}({w.fitted(v, (3,))}, {text})"
    return w.let(text, (3,), v.names | other.names)


def structured(w):
    """A loop, a branch, a transformation, or a gradient, whose body calls such functions."""
    return w.choose(STRUCTURED)(w)


def linearized(w):
    return inner_jvp(w, "jax.linearize({}, {})[1]({})")


def rule_of_weights(w):
    """A rule with a sum of cotangents and a term of each element's own."""
    v = w.float_var()
    if not w.shared.backward_rules:
        return None
    return w.let(f"0.3 * sine_and_mean({w.name()!r})({v.text})", v.shape, v.names)


FLAT_OPERATIONS = [
    unary, binary, sum_over_names, axis_index, with_integer, integer, select, reduce_positions, rearrange, widen,
    matmul, index, integer_sum_over_names, named_reduction, softmax, ppermute, pshuffle, all_gather, psum_scatter,
    all_to_all, pdot, pargmax, custom_rule,
]  # fmt: skip
STRUCTURED = [scan, cond, while_loop, fori_loop, wrapped, inner_xmap, inner_grad, inner_jvp]
OPERATIONS = [*FLAT_OPERATIONS, *STRUCTURED, *STRUCTURED]
ELEMENT_OPERATIONS = [element_function] * 20 + [linearized, rule_of_weights]


# ----------------------------------------------------------------------------- programs


@dataclasses.dataclass
class Shared:
    sizes: dict[str, int]
    while_loops: bool
    backward_rules: bool
    elements: bool
    used: set[str] = dataclasses.field(default_factory=set)
    inner: set[str] = dataclasses.field(default_factory=set)
    vmapped: set[str] = dataclasses.field(
        default_factory=set
    )  # JAX's vmap has few collectives over several names
    counter: int = 0
    in_grad: bool = False

    @contextlib.contextmanager
    def with_changes(self, **changes):
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        yield
        vars(self).update(before)


AXES = ("a", "b", "c")


@st.composite
def programs(draw, while_loops=True, backward_rules=True, elements=False, operations=()):
    """A program; with while loops (not for reverse mode) and custom_vjp rules (not for forward mode) if allowed.

    Args:
      elements: whether it calls :mod:`element_functions`.
      operations: what every program has.
    """
    sizes = {n: draw(st.sampled_from([4, 2, 8, 3, 6])) for n in AXES[: draw(st.integers(1, 3))]}
    shared = Shared(dict(sizes), while_loops, backward_rules, elements)
    w = Writer(draw, shared, [], list(sizes))
    args = [_argument(w, k, sizes) for k in range(w.number(2, 4))]
    w.env.extend(leaf.var for leaf in args)
    for operation in operations:
        operation(w)
    w.statements(w.number(0 if operations else 2, 2 if operations else 8))
    returned = dict.fromkeys([w.env[-1], *w.some(w.env, 0)][:3])
    results = [_result(w, var, sizes) for var in returned]
    texts = ", ".join(var.text for var in returned)
    lines = textwrap.indent("\n".join([*w.lines, f"return {texts},"]), "    ")
    params = ", ".join(leaf.var.text for leaf in args)
    source = f"\ndef body({params}):\n{lines}\n"
    source = "".join(text for name, text in RULES.items() if f"{name}(" in source) + source
    inner = {n: shared.sizes[n] for n in sorted(shared.inner)}
    return Program(
        source=source,
        args=tuple(args),
        results=tuple(results),
        sizes=sizes,
        inner=inner,
        used=frozenset(shared.used),
        seed=draw(st.integers(0, 1000)),
    )


def _argument(w, k, sizes):
    kind = "int" if k == 1 and w.flag() else "float"
    shape = tuple(w.choose([2, 4, 3, 1]) for _ in range(w.number(0, 2)))
    names = w.some(sizes, least=1 if k == 0 else 0)
    return _leaf(w, Var(f"x{k}", shape, frozenset(names), kind), names)


def _result(w, var, sizes):
    extra = [n for n in sizes if n not in var.names and w.flag()]
    return _leaf(w, var, [n for n in sizes if n in var.names or n in extra])


def _leaf(w, var, names):
    """Names at any positions, and a specification that says so, in one of its spellings."""
    layout = list(w.draw(st.permutations([*names, *[None] * len(var.shape)])))
    positions = {k: n for k, n in enumerate(layout) if n is not None}
    prefix = layout[: 1 + max(positions, default=-1)]
    specs = [
        [*prefix, ...],
        positions,
        list(layout),
        {k: positions[k] for k in reversed(positions)},
    ]
    return Leaf(var, tuple(layout), w.choose(specs))
