"""An xmap over NumPy for the fuzz test: it reads what the user wrote, and says the result or that there is none.

The values are those of ``named_arrays``.  Nothing here knows how xmap_compat works; the rules are those of its
documentation.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import named_arrays
import numpy as np
from jax import lax
from named_arrays import Named

from xmap_compat import SerialLoop


class Refused(Exception):
    """The call should raise."""


def require(condition, reason):
    if not condition:
        raise Refused(reason)


# ------------------------------------------------------------------------------ programs


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The body returns a leaf of its arguments as it is."""

    index: int


@dataclasses.dataclass(frozen=True)
class Total:
    """The sum of all elements of some leaves, over their positional dimensions and the named axes ``over``."""

    indices: tuple[int, ...]
    over: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Index:
    """The index along a named axis."""

    name: Any


@dataclasses.dataclass(frozen=True)
class Constant:
    length: int


def body_of(results):
    """The function to xmap: it makes a tree of results from the leaves of its arguments."""

    def body(*args):
        leaves = jax.tree.leaves(args)
        return jax.tree.map(lambda expression: _compute(expression, leaves), results)

    return body


def _compute(expression, leaves):
    if isinstance(expression, Leaf):
        return leaves[expression.index]
    if isinstance(expression, Index):
        return lax.axis_index(expression.name)
    if isinstance(expression, Constant):
        return jnp.arange(expression.length)
    total = sum(jnp.sum(leaves[k]).astype(jnp.float32) for k in expression.indices)
    return lax.psum(total, expression.over) if expression.over else total


# ------------------------------------------------------------------- reading specifications


@dataclasses.dataclass(frozen=True)
class Spec:
    """``positions[k]`` is the name of dimension k; ``rank`` is asserted unless None."""

    positions: Mapping[int, Any]
    rank: int | None


def is_container(x):
    return isinstance(x, (list, tuple, dict))


def is_spec(x):
    """Whether a list, tuple or dictionary is a specification rather than a tree of them."""
    if isinstance(x, dict):
        return not any(is_container(v) for v in x.values())
    if type(x) is list or (type(x) is tuple and x):
        return any(v is ... or isinstance(v, str) for v in x) or not any(is_container(v) for v in x)
    return False


def read_spec(x):
    if isinstance(x, dict):
        require(
            all(type(k) in (int, np.int64) and k >= 0 for k in x),
            "positions are integers, and not negative",
        )
        spec = Spec(dict(x), None)
    else:
        entries = list(x[:-1] if x and x[-1] is ... else x)
        require(not any(v is ... for v in entries), "an ellipsis ends a list")
        names = {k: v for k, v in enumerate(entries) if v is not None}
        spec = Spec(names, None if x and x[-1] is ... else len(entries))
    for name in spec.positions.values():
        check_name(name)
    require(len(set(spec.positions.values())) == len(spec.positions), "a name occurs once")
    return spec


def check_name(name):
    bad = name is None or name is ... or isinstance(name, (tuple, jax.sharding.PartitionSpec))
    require(not bad and is_hashable(name), "a name is hashable")


def is_hashable(x):
    try:
        hash(x)
    except TypeError:
        return False
    return True


def read_tree(x):
    """The tree with every specification read."""
    if is_spec(x):
        return read_spec(x)
    if x is None:
        return None
    require(is_container(x), "a specification is a list or a dictionary")
    if isinstance(x, dict):
        require(len({type(k) for k in x}) <= 1, "keys of one kind")
        return {k: read_tree(v) for k, v in x.items()}
    return type(x)(read_tree(v) for v in x)


def names_in(tree):
    """The names of all specifications of a tree."""
    specs = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Spec))
    return [name for spec in specs for name in spec.positions.values()]


def broadcast(spec, value, is_leaf):
    """``(specification, leaf)`` for every leaf of a value."""
    if isinstance(spec, Spec):
        return [(spec, leaf) for leaf in jax.tree.leaves(value, is_leaf=is_leaf)]
    require(
        not is_leaf(value) and type(spec) is type(value),
        "the specifications are a prefix of the value",
    )
    if spec is None:
        return []
    require(len(spec) == len(value), "the specifications are a prefix of the value")
    if isinstance(spec, dict):
        require(spec.keys() == value.keys(), "the specifications are a prefix of the value")
        return [pair for k in sorted(spec) for pair in broadcast(spec[k], value[k], is_leaf)]
    return [pair for s, v in zip(spec, value) for pair in broadcast(s, v, is_leaf)]


# ------------------------------------------------------------------------------ the call


@dataclasses.dataclass
class Call:
    """One call of an xmapped function, and what is in scope."""

    args: tuple
    in_axes: Any
    out_axes: Any
    results: Any
    axis_sizes: Any = None
    axis_resources: Any = None
    mesh: Mapping[str, int] | None = None
    loop: int | None = None

    def expected(self):
        """The results as NumPy arrays."""
        specs = read_tree(tuple(self.in_axes) if is_list_of_specs(self.in_axes) else self.in_axes)
        require(not (type(self.out_axes) is tuple and not self.out_axes), "there are results")
        out_specs = read_tree(self.out_axes)
        has_return = self.results is not None
        require(has_return or self.out_axes is not None, "out_axes of a missing return are {}")
        require(has_return or not names_in(out_specs), "None, for a missing return, has no names")
        given = read_sizes(self.axis_sizes)
        names = list(dict.fromkeys([*names_in(specs), *given]))
        require(set(names_in(out_specs)) <= set(names), "names of out_axes are known")
        resources = read_resources(self.axis_resources)
        require(set(resources) <= set(names), "names of axis_resources are known")
        pairs = broadcast(specs, self.args, lambda x: not is_container(x) and x is not None)
        sizes = infer_sizes(pairs, given)
        require(set(names) <= set(sizes), "every size is known")
        model = Model(sizes, self._placed(resources, sizes))
        leaves = [model.enter(spec, np.asarray(leaf)) for spec, leaf in pairs]
        if is_list_of_specs(self.out_axes) and isinstance(self.results, tuple):
            out_specs = tuple(out_specs)

        def is_expression(x):
            return isinstance(x, (Leaf, Total, Index, Constant))

        outs = iter(
            [
                model.leave(s, model.compute(e, leaves))
                for s, e in broadcast(out_specs, self.results, is_expression)
            ]
        )
        return jax.tree.map(lambda _: next(outs), self.results)

    def _placed(self, resources, sizes):
        """The resources of each axis, each once in scope and dividing its size."""
        in_scope = {**(self.mesh or {}), **({"l": self.loop} if self.loop else {})}
        placed = {}
        for name in sizes:
            entries = resources.get(name, ())
            require(
                all(isinstance(r, SerialLoop) or r in in_scope for r in entries),
                "resources are in scope",
            )
            loops = [isinstance(r, SerialLoop) or r == "l" for r in entries]
            require(loops == sorted(loops), "loops come last")
            lengths = [r.length if isinstance(r, SerialLoop) else in_scope[r] for r in entries]
            require(sizes[name] % math.prod(lengths) == 0, "resources divide sizes")
            placed[name] = entries
        return placed


def is_list_of_specs(x):
    return type(x) is list and not is_spec(x)


def read_sizes(sizes):
    require(sizes is None or isinstance(sizes, dict), "axis_sizes are a dictionary")
    for name, size in (sizes or {}).items():
        check_name(name)
        require(type(size) in (int, np.int64) and size >= 0, "sizes are integers")
    return dict(sizes or {})


def read_resources(resources):
    require(resources is None or isinstance(resources, dict), "axis_resources are a dictionary")
    read = {}
    for name, entry in (resources or {}).items():
        entries = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
        named = [r for r in entries if not isinstance(r, SerialLoop)]
        for r in named:
            meant = (
                r is not None
                and r is not ...
                and not isinstance(r, (tuple, type, jax.sharding.PartitionSpec))
            )
            require(meant and is_hashable(r), "resources are names")
        require(len(set(named)) == len(named), "resources are distinct")
        read[name] = entries
    return read


def infer_sizes(pairs, given):
    sizes = dict(given)
    for spec, leaf in pairs:
        shape = np.shape(leaf)
        require(
            all(k < len(shape) for k in spec.positions),
            "an array has the dimensions that are named",
        )
        require(spec.rank in (None, len(shape)), "an array has the rank that is asserted")
        for k, name in spec.positions.items():
            require(sizes.setdefault(name, shape[k]) == shape[k], "sizes agree")
    return sizes


class Model:
    """The axes of a call with their resources, and its values as named arrays."""

    def __init__(self, sizes: Mapping[Any, int], resources: Mapping[Any, tuple]):
        self.sizes, self.resources = sizes, resources
        self.arrays = named_arrays.Model(sizes)

    def checked(self, names):
        """Two axes that need one resource do not meet in a value."""
        for a, b in itertools.combinations(names, 2):
            shared = {r for r in self.resources[a] if not isinstance(r, SerialLoop)} & set(
                self.resources[b]
            )
            require(not shared, "axes on one resource do not meet")

    def enter(self, spec, data):
        self.checked(spec.positions.values())
        data = np.moveaxis(data, list(spec.positions), range(len(spec.positions)))
        return Named(self.arrays, data, spec.positions.values())

    def compute(self, expression, leaves):
        if isinstance(expression, Leaf):
            return leaves[expression.index]
        if isinstance(expression, Constant):
            return self.arrays.named(np.arange(expression.length))
        over = (expression.name,) if isinstance(expression, Index) else expression.over
        require(set(over) <= set(self.sizes), "names are bound")
        require(len(set(over)) == len(over), "a collective names an axis once")
        for name in over:
            looped = any(isinstance(r, SerialLoop) or r == "l" for r in self.resources[name])
            require(not looped, "collectives do not name looped axes")
        if isinstance(expression, Index):
            return self.arrays.axis_index(expression.name)
        total = self.arrays.named(0.0)
        for leaf in (leaves[k] for k in expression.indices):
            part = leaf.data.sum(tuple(range(len(leaf.names), leaf.data.ndim)), dtype=np.float64)
            names = self.arrays.ordered({*total.names, *leaf.names})
            self.checked(names)
            both = [
                self.arrays.expanded(v, names)
                for v in (total, Named(self.arrays, part, leaf.names))
            ]
            total = Named(self.arrays, sum(both), names)
        return self.arrays.psum(total, over) if over else total

    def leave(self, spec, value):
        wanted = self.arrays.ordered(spec.positions.values())
        require(set(value.names) <= set(wanted), "axes of results are declared")
        self.checked(wanted)
        rank = value.ndim + len(wanted)
        require(all(k < rank for k in spec.positions), "a result has the dimensions that are named")
        require(spec.rank in (None, rank), "a result has the rank that is asserted")
        position = {name: k for k, name in spec.positions.items()}
        return np.moveaxis(
            self.arrays.expanded(value, wanted), range(len(wanted)), [position[n] for n in wanted]
        )
