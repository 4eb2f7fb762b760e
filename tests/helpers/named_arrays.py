"""A slow model of xmap's named arrays, over NumPy or, for derivatives, over jax.numpy without xmap.

A value is an array that has one explicit leading dimension for each named axis that it varies over.  An ordinary
function acts at each index of the named axes; a collective acts on their dimensions; control flow is
Python's, with both branches of a ``cond`` computed and every element of a ``while`` stepped until the last is done.
:class:`Model` offers what a program needs under the names ``jax``, ``jnp``, ``lax`` and ``xmap``, so that
the source of an xmapped function runs in it as it is.
"""

from __future__ import annotations

import contextlib
import math
import operator
from types import FunctionType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from oracles import contract, exchange, gather, permute, scatter_sum


class Named:
    """An array over named axes: ``data`` has one dimension for each of ``names``, then the positional ones.

    The names are kept in the model's order, whatever the order in which they are given with ``data``.
    """

    __array_ufunc__ = None  # NumPy's arrays leave operators to this class

    def __init__(self, model, data, names=()):
        self.model, self.names = model, model.ordered(names)
        self.data = model.xp.moveaxis(data, range(len(names)), [self.names.index(n) for n in names])

    @property
    def shape(self):
        return self.data.shape[len(self.names) :]

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def T(self):
        return self.model.pointwise(lambda x: x.T, self)

    def __getitem__(self, index):
        if isinstance(index, Named):
            return self.model.pointwise(lambda x, k: x[k], self, index)
        return self.model.pointwise(lambda x: x[index], self)

    def sum(self, axis=None):
        return Functions(self.model).sum(self, axis)

    def reshape(self, *shape):
        return self.model.pointwise(lambda x: x.reshape(*shape), self)


def _operator(name, function):
    setattr(Named, name, lambda self, *others: self.model.pointwise(function, self, *others))


for _name in ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "and"):
    _function = getattr(operator, f"__{_name}__")
    _operator(f"__{_name}__", _function)
    _operator(f"__r{_name}__", lambda x, y, function=_function: function(y, x))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg"):
    _operator(f"__{_name}__", getattr(operator, f"__{_name}__"))


class Model:
    """The functions of jax, jax.numpy and jax.lax that programs use, on :class:`Named`.

    Args:
      sizes: the axes in scope.
      xp: ``numpy``, or ``jax.numpy`` to differentiate through the model.
    """

    def __init__(self, sizes, xp=np):
        self.sizes, self.xp = dict(sizes), xp
        self.differentiated = (
            frozenset()
        )  # the axes in scope where a derivative inside the body is taken

    # ------------------------------------------------------------------ named and positional

    def named(self, x, names=()):
        return x if isinstance(x, Named) else Named(self, self.xp.asarray(x), names)

    def ordered(self, names):
        names = set(names)
        return tuple(n for n in self.sizes if n in names)

    @contextlib.contextmanager
    def back_among(self, sizes):
        """The axes as they were when a rule was made: JAX runs it later, where inner axes are gone."""
        self.sizes, now = sizes, self.sizes
        try:
            yield
        finally:
            self.sizes = now

    def expanded(self, value, names):
        """The data of a value as if it varied over all of ``names``: repeated along those that it lacks."""
        value, names = self.named(value), self.ordered(names)
        assert set(value.names) <= set(names), (value.names, names)
        shape = [self.sizes[n] if n in value.names else 1 for n in names]
        data = value.data.reshape((*shape, *value.shape))
        return self.xp.broadcast_to(data, (*(self.sizes[n] for n in names), *value.shape))

    def pointwise(self, function, *values):
        """Apply a positional function at each index of the named axes."""
        values = [self.named(v) for v in values]
        names = self.ordered(n for v in values for n in v.names)
        data = [self.xp.asarray(v.data) for v in values]
        for name in reversed(names):
            function = self._over(
                function, [0 if name in v.names else None for v in values], self.sizes[name]
            )
        return Named(self, self.xp.asarray(function(*data)), names)

    def for_each(self, function):
        """A function that JAX applies to one element after another, so that no batching rule is asked."""

        def loop(*columns):
            return jax.lax.map(lambda row: function(*row), columns)

        def mapped(*values):
            values = [self.named(v) for v in values]
            names = self.ordered(n for v in values for n in v.names)
            sizes = [self.sizes[n] for n in names]
            columns = []
            for value in values:
                data = jnp.asarray(self.expanded(value, names))
                columns.append(data.reshape(math.prod(sizes), *value.shape))
            results = jax.jit(loop)(*columns)
            return Named(self, self.xp.asarray(results).reshape(*sizes, *results.shape[1:]), names)

        return mapped

    def _over(self, function, in_axes, size):
        if self.xp is jnp:
            return jax.vmap(function, in_axes)

        def each(*args):
            def pick(k):
                return [a if axis is None else a[k] for a, axis in zip(args, in_axes)]

            return np.stack([np.asarray(function(*pick(k))) for k in range(size)])

        return each

    def whole(self, value, names):
        """The data with ``names`` in front, in the given order, as one dimension; and the remaining names."""
        names = _tuple(names)
        value = self.named(value)
        kept = tuple(n for n in value.names if n not in names)
        order = self.ordered({*value.names, *names})
        data = self.expanded(value, order)
        data = self.xp.moveaxis(data, [order.index(n) for n in names], range(len(names)))
        return data.reshape(
            (math.prod(self.sizes[n] for n in names), *data.shape[len(names) :])
        ), kept

    def parts(self, data, names, kept):
        """Undo :meth:`whole`: the first dimension is the index over ``names``."""
        names = _tuple(names)
        data = data.reshape((*(self.sizes[n] for n in names), *data.shape[1:]))
        return Named(self, data, (*names, *kept))

    @contextlib.contextmanager
    def axis(self, name, size):
        assert name not in self.sizes
        self.sizes[name] = size
        yield
        del self.sizes[name]

    @contextlib.contextmanager
    def differentiable(self, axes=frozenset()):
        before = self.xp, self.differentiated
        self.xp, self.differentiated = jnp, frozenset(axes)
        yield
        self.xp, self.differentiated = before

    # --------------------------------------------------------------------------- namespaces

    def namespace(self):
        """What stands for the modules in the source of a program."""

        def pick(names):
            return SimpleNamespace(**{n: getattr(self, n) for n in names.split()})

        transformations = pick("vmap grad jvp linearize jit checkpoint custom_vjp custom_jvp")
        return {
            "jax": SimpleNamespace(nn=pick("logsumexp softmax"), **vars(transformations)),
            "jnp": Functions(self),
            "lax": pick(
                "psum pmax pmin pmean ppermute pshuffle all_gather all_to_all pswapaxes psum_scatter axis_index pdot"
                " scan cond switch while_loop fori_loop"
            ),
            "xmap": self.xmap,
            "pargmax": self.pargmax,
            "pargmin": self.pargmin,
        }

    # -------------------------------------------------------------------------- collectives

    def _reduce(self, function, x, names, dims=()):
        """``function(array, dimensions)`` over named and positional dimensions."""
        data, kept = self.whole(x, names)
        return Named(self, function(data, (0, *(1 + len(kept) + d for d in dims))), kept)

    def psum(self, x, names):
        if isinstance(x, int):  # known while a program is traced
            return x * math.prod(self.sizes[n] for n in _tuple(names))
        return self._reduce(lambda d, dims: d.sum(dims), x, names)

    def pmax(self, x, names):
        return self._reduce(lambda d, dims: d.max(dims), x, names)

    def pmin(self, x, names):
        return self._reduce(lambda d, dims: d.min(dims), x, names)

    def pmean(self, x, names):
        return self._reduce(lambda d, dims: d.mean(dims), x, names)

    def pargmax(self, x, name):
        data, kept = self.whole(x, name)
        return Named(self, data.argmax(0), kept)

    def pargmin(self, x, name):
        data, kept = self.whole(x, name)
        return Named(self, data.argmin(0), kept)

    def axis_index(self, name):
        return Named(self, self.xp.arange(self.sizes[name]), (name,))

    def _spmd(self, definition, x, names, *dims):
        """Apply ``definition(parts, *positional dimensions)`` of ``oracles`` to what the participants hold."""
        data, kept = self.whole(x, names)
        received = definition(list(data), *(len(kept) + d for d in dims))
        return self.parts(self.xp.stack(received), names, kept)

    def ppermute(self, x, names, perm):
        return self._spmd(lambda parts: permute(parts, perm, self.xp), x, names)

    def pshuffle(self, x, name, perm):
        return self._spmd(lambda parts: [parts[k] for k in perm], x, name)

    def all_gather(self, x, names, axis=0, tiled=False):
        data, kept = self.whole(x, names)
        return Named(self, gather(list(data), len(kept) + axis, tiled, self.xp)[0], kept)

    def all_to_all(self, x, names, split_axis, concat_axis, tiled=False):
        def definition(parts, split, concat):
            return exchange(parts, split, concat, tiled, self.xp)

        return self._spmd(definition, x, names, split_axis, concat_axis)

    def pswapaxes(self, x, name, axis):
        return self.all_to_all(x, name, axis, axis)

    def psum_scatter(self, x, names, scatter_dimension=0, tiled=False):
        def definition(parts, dimension):
            return scatter_sum(parts, dimension, tiled, self.xp)

        return self._spmd(definition, x, names, scatter_dimension)

    def pdot(self, x, y, names, pos_contract=((), ()), pos_batch=((), ())):
        product = self.pointwise(
            lambda a, b: contract(a, b, pos_contract, pos_batch, self.xp), x, y
        )
        held = [n for n in _tuple(names) if n in self.differentiated]
        if self.xp is np or not held:
            return self.psum(product, names)
        rest = [n for n in _tuple(names) if n not in held]
        return self._sum_as_it_is(self.psum(product, rest) if rest else product, held)

    def _sum_as_it_is(self, x, names):
        """The sum, held by each participant; a derivative inside the body hands each one's cotangent on as it is."""
        held = self.ordered({*x.names, *names})

        def total(data):
            return self.expanded(self.psum(Named(self, data, held), names), held)

        ruled = jax.custom_vjp(total)
        ruled.defvjp(lambda data: (total(data), None), lambda _, ct: (ct,))
        return Named(self, ruled(self.expanded(x, held)), held)

    # ----------------------------------------------------- functions of names and positions

    def softmax(self, x, axis):
        axes = _tuple(axis)
        names, dims = (
            [a for a in axes if isinstance(a, str)],
            [a for a in axes if not isinstance(a, str)],
        )
        exponential = self.pointwise(lambda v: self.xp.exp(v), x)
        total = self.pointwise(lambda v: v.sum(tuple(dims), keepdims=True), exponential)
        return exponential / (self.psum(total, names) if names else total)

    def logsumexp(self, x, axis):
        total = Functions(self).sum(self.pointwise(lambda v: self.xp.exp(v), x), axis)
        return self.pointwise(lambda v: self.xp.log(v), total)

    # ------------------------------------------------------------------------- control flow

    def scan(self, body, carry, xs, length=None, reverse=False):
        length = length if xs is None else jax.tree.leaves(xs, is_leaf=_is_named)[0].shape[0]
        stacked = []
        for k in reversed(range(length)) if reverse else range(length):
            carry, y = body(carry, self._map(lambda x, k=k: x[k], xs))
            stacked.append(y)
        stacked = stacked[::-1] if reverse else stacked
        return carry, self._map(
            lambda *ys: self.pointwise(lambda *rows: self.xp.stack(rows), *ys), *stacked
        )

    def fori_loop(self, lower, upper, body, carry):
        if isinstance(upper, Named):

            def step(state):
                return (state[0] + 1, body(*state))

            return self.while_loop(lambda state: state[0] < upper, step, (lower, carry))[1]
        for k in range(lower, upper):
            carry = body(k, carry)
        return carry

    def _select(self, predicate, yes, no):
        return self.pointwise(lambda p, a, b: self.xp.where(p, a, b), predicate, yes, no)

    def cond(self, predicate, yes, no, *operands):
        return self._map(lambda a, b: self._select(predicate, a, b), yes(*operands), no(*operands))

    def switch(self, index, branches, *operands):
        results = [branch(*operands) for branch in branches]
        result = results[-1]
        for k in reversed(range(len(branches) - 1)):
            result = self._map(lambda a, b, k=k: self._select(index <= k, a, b), results[k], result)
        return result

    def while_loop(self, condition, body, state):
        """Every element is stepped until the last is done; those that are done keep their value."""
        for _ in range(64 if self.xp is np else 8):
            going = self.named(condition(state))
            if self.xp is np and not going.data.any():
                return state
            state = self._map(
                lambda new, old, going=going: self._select(going, new, old), body(state), state
            )
        if self.xp is np:
            assert not self.named(condition(state)).data.any(), "more steps than a program may take"
        return state

    def _map(self, function, *trees):
        return jax.tree.map(function, *trees, is_leaf=_is_named)

    # --------------------------------------------------------------------- transformations

    def jit(self, function):
        return function

    def checkpoint(self, function):
        return function

    def xmap(self, function, in_axes, out_axes, axis_resources=None):
        """Of one argument, with one axis."""
        (((at_in, name),),) = (spec.items() for spec in in_axes)
        ((at_out, _),) = out_axes.items()

        def mapped(x):
            x = self.named(x)
            with self.axis(name, x.shape[at_in]):
                data = self.xp.moveaxis(x.data, len(x.names) + at_in, 0)
                return self._map(leave, function(Named(self, data, (name, *x.names))))

        def leave(result):
            data, kept = self.whole(result, name)
            return Named(self, self.xp.moveaxis(data, 0, len(kept) + at_out), kept)

        return mapped

    def vmap(self, function, in_axes=0, out_axes=0, axis_name="vmapped"):
        return self.xmap(function, ({in_axes: axis_name},), {out_axes: axis_name})

    def grad(self, function):
        """As inside a body: of the sum over all named elements, for each element's own copy of the argument."""

        def derivative(x):
            names = tuple(self.sizes)
            data = self.expanded(x, names)
            with self.differentiable(names):

                def total(data):
                    return self.expanded(function(Named(self, data, names)), names).sum()

                gradient = (
                    jax.grad(total)
                    if isinstance(data, jax.core.Tracer)
                    else jax.jit(jax.grad(total))
                )
                gradient = gradient(jnp.asarray(data, jnp.float32))
            return Named(self, self.xp.asarray(gradient), names)

        return derivative

    def jvp(self, function, primals, tangents):
        (x,), (t,) = primals, tangents
        names = tuple({*self.named(x).names, *self.named(t).names})
        layout = []
        with self.differentiable():

            def on_data(data):
                result = self.named(function(Named(self, data, self.ordered(names))))
                layout[:] = [result.names]
                return result.data

            data = [jnp.asarray(self.expanded(v, names), jnp.float32) for v in (x, t)]

            def push(x, t):
                return jax.jvp(on_data, (x,), (t,))

            traced = any(isinstance(d, jax.core.Tracer) for d in data)
            pair = push(*data) if traced else jax.jit(push)(*data)
        return tuple(Named(self, self.xp.asarray(d), *layout) for d in pair)

    def linearize(self, function, x):
        return function(x), lambda t: self.jvp(function, (x,), (t,))[1]

    def custom_vjp(self, function):
        return CustomRule(self, function)

    def custom_jvp(self, function):
        return CustomRule(self, function)


def by_model(body, in_axes, out_axes, xp=np):
    """A function over named axes as one of whole arrays: its source, and that of its module, in a model of its own.

    Args:
      in_axes: names of the leading dimensions of each argument.
      out_axes: those of all results.
    """

    def function(*arrays):
        sizes = {
            n: size for array, names in zip(arrays, in_axes) for n, size in zip(names, array.shape)
        }
        model = Model(sizes, xp)
        results = _in_namespace(body, model.namespace())(
            *(Named(model, a, n) for a, n in zip(arrays, in_axes))
        )
        return model._map(lambda r: model.expanded(model.named(r), out_axes), results)

    return function


def _in_namespace(body, meanings):
    """The function, with other meanings of the names in its module."""
    names = {**body.__globals__, **meanings}

    def moved(function):
        return FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )

    for name, value in body.__globals__.items():
        if isinstance(value, FunctionType) and value.__globals__ is body.__globals__:
            names[name] = moved(value)
    return moved(body)


class Functions:
    """``jnp``: functions by name; the axes of reductions may be named; everything else is pointwise."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return lambda *args, **options: self._pointwise(name, args, options)

    def _pointwise(self, name, args, options):
        model = self._model
        if args and isinstance(args[0], (list, tuple)) and all(map(_is_named, args[0])):
            operands = args[0]
            return model.pointwise(
                lambda *xs: getattr(model.xp, name)(list(xs), *args[1:], **options), *operands
            )
        operands = [a for a in args if isinstance(a, Named)]
        places = [k for k, a in enumerate(args) if isinstance(a, Named)]

        def positional(*xs):
            full = list(args)
            for k, x in zip(places, xs):
                full[k] = x
            return getattr(model.xp, name)(*full, **options)

        return model.pointwise(positional, *operands)

    def _reduction(name):
        def reduce(self, x, axis=None):
            model = self._model
            x = model.named(x)
            axes = tuple(range(x.ndim)) if axis is None else _tuple(axis)
            names = [a for a in axes if isinstance(a, str)]
            dims = [a % x.ndim for a in axes if not isinstance(a, str)]
            return model._reduce(lambda d, dims: getattr(d, name)(dims), x, names, dims)

        return reduce

    sum, max, min, mean, var = map(_reduction, ("sum", "max", "min", "mean", "var"))


class CustomRule:
    """A function of one argument with its own derivative: forward by ``custom_jvp``, or backward."""

    def __init__(self, model, function):
        self.model, self.function = model, function

    def defvjp(self, forward, backward):
        self.forward, self.backward = forward, backward

    def defjvp(self, rule):
        self.rule = rule

    def __call__(self, x):
        model = self.model
        x = model.named(x)
        if model.xp is np:
            return self.function(x)
        names = x.names

        def wrap(data):
            return Named(model, data, names)

        result = self.function(x)

        def layout(value):
            return model.expanded(value, result.names)

        sizes = dict(model.sizes)

        if hasattr(self, "rule"):

            @jax.custom_jvp
            def on_data(data):
                return layout(self.function(wrap(data)))

            @on_data.defjvp
            def on_tangents(primals, tangents):
                with model.back_among(sizes):
                    return tuple(
                        layout(v)
                        for v in self.rule([wrap(p) for p in primals], [wrap(t) for t in tangents])
                    )

            return Named(model, on_data(x.data), result.names)

        @jax.custom_vjp
        def on_data(data):
            return layout(self.function(wrap(data)))

        def forward(data):
            with model.back_among(sizes):
                value, residual = self.forward(wrap(data))
                flat, tree = jax.tree.flatten(residual, is_leaf=_is_named)
                kinds[:] = [tree, [r.names for r in flat]]
                return layout(value), [r.data for r in flat]

        def backward(residual, cotangent):
            tree, residual_names = kinds
            with model.back_among(sizes):
                flat = [Named(model, r, n) for r, n in zip(residual, residual_names)]
                (ct,) = self.backward(
                    jax.tree.unflatten(tree, flat), Named(model, cotangent, result.names)
                )
                extra = [n for n in ct.names if n not in names]
                ct = model.psum(ct, extra) if extra else ct
                return (model.expanded(ct, names),)

        kinds = []
        on_data.defvjp(forward, backward)
        return Named(model, on_data(x.data), result.names)


def _is_named(x):
    return isinstance(x, Named)


def _tuple(axes):
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
