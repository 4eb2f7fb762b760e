"""What xmap and its vocabulary say when they are misused: each row commits one misuse and states the whole message.

A message names the argument by its path (``args[0]['w']``), what was seen, what was needed, and what to do; ``HERE``
stands for the file and line of the misuse itself.  Where JAX refuses an argument before xmap sees it, the message is
compared with that of ``jax.jit``.
"""

import collections
import functools
import re
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import (
    Mesh,
    SerialLoop,
    einsum,
    mesh,
    named_shape,
    pdot,
    random,
    serial_loop,
    xmap,
)
from xmap_compat import numpy as xnp
from xmap_compat.core import notes
from xmap_compat.legacy import maps
from xmap_compat.random import NamedShape
from xmap_compat.testing import assignments, check_assignments

LEGACY = "\nLegacy's words: "

I = ["i", ...]  # noqa: E741
J, BATCH = ["j", ...], ["batch", ...]
Pair = collections.namedtuple("Pair", ["first", "second"])
DEVICES = np.array(jax.devices())
ones = functools.partial(np.ones, dtype=np.float32)


def identity(*args):
    return args[0] if len(args) == 1 else args


def add(x, y):
    return x + y


def grid():
    """The 4x2 mesh as a context."""
    return Mesh(DEVICES.reshape(4, 2), ("x", "y"))


def in_grid(fun):
    with grid():
        return fun()


def on_grid(fun, in_axes, out_axes, *args, **options):
    with grid():
        return xmap(fun, in_axes, out_axes, **options)(*args)


def over_i(fun, out_axes=I, shape=(3,), resources=None):
    """Call ``fun`` on an array of the given shape that varies over ``i`` (8)."""
    return on_grid(fun, I, out_axes, ones((8, *shape)), axis_resources=resources or {})


def over_i_and_j(fun, out_axes=("i", "j", ...), resources=None):
    """Call ``fun`` on two arrays of shape (3,), over ``i`` (8) and over ``j`` (4)."""
    in_axes = (["i", ...], ["j", ...])
    return on_grid(
        fun, in_axes, out_axes, ones((8, 3)), ones((4, 3)), axis_resources=resources or {}
    )


def in_loop(name, length, fun):
    with serial_loop(name, length):
        return fun()


def in_mesh(devices, names, fun):
    with Mesh(devices, names):
        return fun()


def ordered_callback(v):
    jax.debug.callback(lambda v: None, v, ordered=True)
    return v


def split_on_x(v):
    """A nested xmap over the mesh axis ``x``."""
    return xmap(identity, ["n", ...], ["n", ...], axis_resources={"n": "x"})(v)


def closing_over(v):
    return xmap(lambda u: u * v[0], ["n"], ["n"], axis_resources={"n": "x"})(jnp.ones(4))


def shard_map_in_body(v):
    mesh = grid().physical_mesh
    return jax.shard_map(
        lambda u: u, mesh=mesh, in_specs=PartitionSpec("y"), out_specs=PartitionSpec("y")
    )(v)


def shard_map_with_psum_in_body(v):
    mesh, specs = (
        grid().physical_mesh,
        {"in_specs": PartitionSpec("y"), "out_specs": PartitionSpec()},
    )
    return jax.shard_map(lambda u: lax.psum(u, "y"), mesh=mesh, **specs)(v)


# The misuse, its error, and the whole message.
MISUSES = {
    # ------------------------------------------------------------------------------------------------ specifications
    "xmap of something that cannot be called": (
        lambda: xmap(3, I, I),
        TypeError,
        "The first argument of xmap should be a function, but got 3. Write xmap(fun, in_axes, out_axes), or the "
        "decorator @xmap(in_axes=..., out_axes=...)",
    ),
    "a string as in_axes": (
        lambda: xmap(identity, "i", I),
        TypeError,
        "in_axes is 'i', which is not an axis specification. Write ['i', ...] for the leading dimension"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: 'i'",
    ),
    "an integer as in_axes": (
        lambda: xmap(identity, 0, I),
        TypeError,
        "in_axes is 0, which is not an axis specification. Write ['name', ...] or {0: 'name'}, with "
        "the name of that dimension"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: 0",
    ),
    "an ellipsis alone": (
        lambda: xmap(identity, ..., I),
        TypeError,
        "in_axes is ..., which is not an axis specification. Write [...] where no dimension is named"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: ...",
    ),
    "an ellipsis for an argument": (
        lambda: xmap(add, (I, ...), I),
        TypeError,
        "in_axes is (['i', ...], ...), but ['i', ...] cannot be used as an axis name: it must be hashable, and "
        "neither None nor an ellipsis. A tuple that ends in ... is one specification: for an argument without names "
        "write [...] or {}",
    ),
    "an ellipsis in front, deep in a tree": (
        lambda: xmap(identity, ({"w": [..., "i"]},), I),
        ValueError,
        "in_axes[0]['w'] is [..., 'i'], but an ellipsis can only end a list of axis names. Use a dictionary to name "
        "dimensions that are not leading, e.g. {0: 'i', 2: 'j'}",
    ),
    "an ellipsis as a name in a dictionary": (
        lambda: xmap(identity, {0: "i", 1: ...}, I),
        TypeError,
        "in_axes is {0: 'i', 1: ...}, but ... cannot be used as an axis name: it must be hashable, and neither None "
        "nor an ellipsis. Use a string instead",
    ),
    "an ellipsis in quotes, deep in out_axes": (
        lambda: xmap(identity, I, {"w": ["i", "..."]}),
        TypeError,
        "out_axes['w'] is ['i', '...'], but '...' cannot be used as an axis name: `'...'` is a string. Write `...`",
    ),
    "an ellipsis in quotes, alone": (
        lambda: xmap(identity, "...", I),
        TypeError,
        "in_axes is '...', which is not an axis specification. Write [...] where no dimension is named"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: '...'",
    ),
    "a dictionary from names to positions, deep in a tree": (
        lambda: xmap(identity, ({"w": [I, {"i": 0}]},), I),
        TypeError,
        "in_axes[0]['w'][1] is {'i': 0}, which is not an axis specification. Write it the other way "
        "round: {0: 'i'}"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: {'i': 0}",
    ),
    "a bool as a position": (
        lambda: xmap(identity, {True: "i"}, I),
        TypeError,
        "in_axes is {True: 'i'}, which is not an axis specification. Write a list of names, or "
        "{position: name} with integers for positions"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: {True: 'i'}",
    ),
    "a negative position in out_axes": (
        lambda: xmap(identity, I, (I, {-1: "i"})),
        ValueError,
        "out_axes[1] is {-1: 'i'}, but a position cannot be negative. Count from the first dimension\n"
        "Legacy's words: xmap doesn't support negative axes in out_axes",
    ),
    "a repeated name in the second argument": (
        lambda: xmap(add, (I, {0: "i", 2: "i"}), I),
        ValueError,
        "in_axes[1] is {0: 'i', 2: 'i'}, which repeats a name. Give each dimension its own name. For a "
        "diagonal, call jnp.diagonal before"
        f"{LEGACY}Named axes should be unique within each in_axes argument specification, but one them is: {{0: "
        "'i', 2: 'i'}",
    ),
    "a repeated name in out_axes": (
        lambda: xmap(identity, I, {"out": ["i", "i"]}),
        ValueError,
        "out_axes['out'] is ['i', 'i'], which repeats a name. Give each dimension its own name"
        f"{LEGACY}Named axes should be unique within each out_axes argument specification, but one them is: "
        "['i', 'i']",
    ),
    "a PartitionSpec as in_axes": (
        lambda: xmap(identity, PartitionSpec("i"), I),
        TypeError,
        f"in_axes is {PartitionSpec('i')}, which is not an axis specification: a PartitionSpec has a meaning in jit "
        "and shard_map only. Write a list of names, e.g. ['i', ...]"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        f"axis names (e.g. {{2: 'name'}}) but got: {PartitionSpec('i')}",
    ),
    "an array as in_axes": (
        lambda: xmap(identity, ones(3), I),
        TypeError,
        "in_axes is an array of shape (3,), which is not an axis specification. Write a list of names, "
        "or {position: name} with integers for positions"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: an array of shape (3,)",
    ),
    "a PartitionSpec as a spec": (
        lambda: xmap(identity, (PartitionSpec("i"),), I),
        TypeError,
        f"in_axes is ({PartitionSpec('i')},), but {PartitionSpec('i')} cannot be used as an axis name: a PartitionSpec "
        "has a meaning in jit and shard_map only. Name the dimensions of an array with a list, e.g. ['i', ...]",
    ),
    "a tuple as a name in a dictionary": (
        lambda: xmap(identity, {0: ("a", "b")}, {}),
        TypeError,
        "in_axes is {0: ('a', 'b')}, but ('a', 'b') cannot be used as an axis name: JAX reads a tuple as several "
        "names. Use a string instead",
    ),
    "a truth value as a name in axis_resources": (
        lambda: xmap(identity, [1], [1], axis_resources={True: "x"}),
        TypeError,
        "In axis_resources, True cannot be used as an axis name: JAX reads a truth value as the position 0 or 1. Use "
        "a string instead",
    ),
    "None as a name in a dictionary": (
        lambda: xmap(identity, ({0: None},), {}),
        TypeError,
        "in_axes[0] is {0: None}, but None cannot be used as an axis name: it must be hashable, and neither None nor "
        "an ellipsis. Use a string instead",
    ),
    "out_axes that are an empty tuple": (
        lambda: xmap(identity, I, ()),
        ValueError,
        "The xmapped function has no results. Return at least one array, and name its dimensions in out_axes\n"
        "Legacy's words: xmapped functions cannot have no return values",
    ),
    "a name only in out_axes": (
        lambda: xmap(identity, ["a", ...], ["c", "d", ...]),
        ValueError,
        "out_axes name `c`, `d`, which neither in_axes nor axis_sizes do. Give an axis that no "
        "argument has its size in axis_sizes"
        f"{LEGACY}All axis names appearing in out_axes must also appear in in_axes or axis_sizes, but the "
        "following are missing: {'c', 'd'}",
    ),
    "None as the spec of an array": (
        lambda: xmap(add, (I, None), I)(ones(3), ones(3)),
        ValueError,
        "args[1] is an array, but in_axes has None for it. Write {} for what is not mapped. The "
        "in_axes here: (['i', ...], None)"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification (['i', ...], None) for value tree PyTreeDef((*, *)). Note that xmap in_axes that are "
        "non-trivial pytrees should always be wrapped in a tuple representing the argument list.",
    ),
    "fewer specs than arguments": (
        lambda: xmap(add, (I,), I)(ones(5), ones(5)),
        ValueError,
        "args is a tuple of length 2, but in_axes has a tuple of length 1 for it. Call it with as many "
        "arguments as in_axes has entries, or add an entry to in_axes (`{}` for one without names). The in_axes "
        "here: (['i', ...],)"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification (['i', ...],) for value tree PyTreeDef((*, *)). Note that xmap in_axes that are non-trivial "
        "pytrees should always be wrapped in a tuple representing the argument list.",
    ),
    "specs with more keys than the argument": (
        lambda: xmap(identity, ({"a": I, "b": I},), I)({"a": ones(5)}),
        ValueError,
        "The keys of in_axes[0] are not those of args[0]. args[0] lacks 'b': remove 'b' from "
        "in_axes[0]. The in_axes here: ({'a': ['i', ...], 'b': ['i', ...]},)"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification ({'a': ['i', ...], 'b': ['i', ...]},) for value tree PyTreeDef(({'a': *},)). Note that xmap "
        "in_axes that are non-trivial pytrees should always be wrapped in a tuple representing the argument list.",
    ),
    "a namedtuple of specs for a tuple": (
        lambda: xmap(identity, (Pair(I, {}),), I)((ones(5), ones(5))),
        ValueError,
        "args[0] is a tuple of length 2, but in_axes has the class Pair of length 2 for it. Give both "
        "the same structure, or one specification for all of it. The in_axes here: (Pair(first=['i', ...], "
        "second={}),)"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification (Pair(first=['i', ...], second={}),) for value tree PyTreeDef(((*, *),)). Note that xmap "
        "in_axes that are non-trivial pytrees should always be wrapped in a tuple representing the argument list.",
    ),
    "specs that should be wrapped in a tuple": (
        lambda: xmap(identity, {"a": I}, I)({"a": ones(5)}),
        ValueError,
        "args is a tuple of length 1, but in_axes has a dict with the keys 'a' for it. Write in_axes "
        "as a tuple, with an entry for each argument. The in_axes here: {'a': ['i', ...]}"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification {'a': ['i', ...]} for value tree PyTreeDef(({'a': *},)). Note that xmap in_axes that are "
        "non-trivial pytrees should always be wrapped in a tuple representing the argument list. In particular, "
        "you're passing in a single argument which means that xmap in_axes might need to be wrapped in a singleton "
        "tuple.",
    ),
    "two out specs for one result": (
        lambda: xmap(identity, I, (I, I))(ones(5)),
        ValueError,
        "The result is an array, but out_axes has a tuple of length 2 for it. Give both the same "
        "structure, or one specification for all of it. The out_axes here: (['i', ...], ['i', ...])"
        f"{LEGACY}xmap out_axes specification must be a tree prefix of the corresponding value, got "
        "specification (['i', ...], ['i', ...]) for value tree PyTreeDef(*).",
    ),
    "out specs with other keys than the result": (
        lambda: xmap(lambda x: {"a": {"b": x}}, I, {"a": {"c": I}})(ones(5)),
        ValueError,
        "The keys of out_axes['a'] are not those of result['a']. out_axes['a'] lacks 'b': add 'b': "
        "[...] or {}. result['a'] lacks 'c': remove 'c' from out_axes['a']. The out_axes here: {'a': {'c': ['i', "
        "...]}}"
        f"{LEGACY}xmap out_axes specification must be a tree prefix of the corresponding value, got "
        "specification {'a': {'c': ['i', ...]}} for value tree PyTreeDef({'a': {'b': *}}).",
    ),
    # ------------------------------------------------------------------------------------------- ranks and arguments
    "a leaf of too small rank": (
        lambda: xmap(lambda tree: tree["w"][1], ({"w": [I, {3: "i"}]},), I)(
            {"w": [ones(5), ones((5, 5))]}
        ),
        ValueError,
        "args[0]['w'][1] has shape (5, 5), but {3: 'i'} needs at least 4 dimensions. Name fewer "
        "dimensions, or pass an array that has them"
        f"{LEGACY}One of xmap arguments has an in_axes specification of {{3: 'i'}}, which implies that it has at "
        "least 4 dimensions, but the argument has rank 2",
    ),
    "an argument of smaller rank than asserted": (
        lambda: xmap(identity, (["i", None],), I)(ones(5)),
        ValueError,
        "args[0] has shape (5,), but ['i', None] names exactly 2 dimensions. Name fewer dimensions, or "
        "pass an array that has them"
        f"{LEGACY}xmap argument has an in_axes specification of ['i', None], which asserts that it should be of "
        "rank 2, but the argument has rank 1 (and shape (5,))",
    ),
    "a result of too small rank, deep in a tree": (
        lambda: xmap(lambda x: {"a": [x, x]}, I, {"a": [I, {3: "i"}]})(ones((5, 2))),
        ValueError,
        "result['a'][1] has one dimension without its named axes, but its out_axes {3: 'i'} need at "
        "least 3. Put the named axes at lower positions"
        f"{LEGACY}One of xmap outputs has an out_axes specification of {{3: 'i'}}, which requires the result of "
        "the xmapped function to have at least 3 positional dimensions, but it only has 1",
    ),
    "a result of another rank than asserted": (
        lambda: xmap(identity, I, ["i", None])(ones((5, 2, 2))),
        ValueError,
        "The result has shape (5, 2, 2), named axes included, but ['i', None] names exactly 2 "
        "dimensions. Write ['i', None, ...] or name the other"
        f"{LEGACY}xmap output has an out_axes specification of ['i', None], which asserts that it should be of "
        "rank 2, but the output has rank 3 (and shape (5, 2, 2))",
    ),
    "a Python scalar as a mapped argument": (
        lambda: xmap(add, (I, I), I)(ones(3), 1.0),
        TypeError,
        "args[1] is a Python scalar, but ['i', ...] needs at least one dimension. Pass an array with a dimension for "
        "each name",
    ),
    "a list of numbers as a mapped argument": (
        lambda: xmap(identity, (I, {"w": I}), I)(ones(3), {"w": [1.0, 2.0]}),
        TypeError,
        "args[1]['w'][0] is a Python scalar, but ['i', ...] needs at least one dimension. Pass an array with a "
        "dimension for each name (a list of numbers is a pytree of scalars)",
    ),
    "a plan without arguments": (
        lambda: xmap(add, (I, J), I).plan(),
        ValueError,
        "There are no arguments. Call add with its arguments; its plan also takes "
        "jax.ShapeDtypeStruct(shape, dtype)"
        f"{LEGACY}Failed to infer size of axes: i, j. You've probably passed in empty containers in place of "
        "arguments that had those axes in their in_axes. Provide the sizes of missing axes explicitly via "
        "axis_sizes to fix this error.",
    ),
    "an empty container to take sizes from": (
        lambda: xmap(lambda _: 1.0, (["i", "j", ...],), ["i", "j", ...])({"w": None}),
        ValueError,
        "No array has the axes `i`, `j`, as containers in the place of arguments are empty. Give their "
        "sizes in axis_sizes"
        f"{LEGACY}Failed to infer size of axes: i, j. You've probably passed in empty containers in place of "
        "arguments that had those axes in their in_axes. Provide the sizes of missing axes explicitly via "
        "axis_sizes to fix this error.",
    ),
    # --------------------------------------------------------------------------------------------------------- sizes
    "two sizes in two arguments": (
        lambda: xmap(add, I, I)(ones(5), ones(6)),
        ValueError,
        "Axis `i` has size 5 in args[0], but size 6 in args[1], dimension 0 of its shape (6,). One in_axes is for "
        "all arguments. To tell them apart, write a tuple, with {} for what is not mapped"
        f"{LEGACY}The size of axis i was previously inferred to be 5, but found an argument of shape (6,) with "
        "in_axes specification ['i', ...]. Shape mismatch occurs in dimension 0: 6 != 5",
    ),
    "a size that disagrees with axis_sizes": (
        lambda: xmap(identity, I, I, axis_sizes={"i": 5})(ones((6, 2))),
        ValueError,
        "Axis `i` has size 5 in axis_sizes, but size 6 in args[0], dimension 0 of its shape (6, 2). If these are "
        "different axes, give them different names. If they are one, pass arrays of one length"
        f"{LEGACY}The size of axis i was previously inferred to be 5, but found an argument of shape (6, 2) with "
        "in_axes specification ['i', ...]. Shape mismatch occurs in dimension 0: 6 != 5",
    ),
    "a bool as a size": (
        lambda: xmap(identity, I, I, axis_sizes={"i": True}),
        TypeError,
        "The size of axis i in axis_sizes should be an integer, such as 8, but got True",
    ),
    "None as a size": (
        lambda: xmap(identity, I, I, axis_sizes={"i": None}),
        TypeError,
        "The size of axis i in axis_sizes should be an integer, such as 8, but got None",
    ),
    "a negative size": (
        lambda: xmap(identity, I, I, axis_sizes={"i": -1}),
        ValueError,
        "The size of axis i in axis_sizes should be at least 0, but got -1",
    ),
    "axis_sizes that are a list": (
        lambda: xmap(identity, I, I, axis_sizes=[3]),
        TypeError,
        "axis_sizes should be a dictionary, such as {'batch': 8}, but got [3]",
    ),
    # ----------------------------------------------------------------------------------------------------- resources
    "a resource without a mesh": (
        lambda: xmap(identity, I, I, axis_resources={"i": "x"})(ones(4)),
        ValueError,
        "No mesh is in scope, but axis_resources assign {'x'} to `i`. Enter one around the call, `with mesh(devices, "
        "names):`, or a loop, `with serial_loop(name, length):`"
        f"{LEGACY}In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        "{'x'}",
    ),
    "a resource that the mesh lacks": (
        lambda: on_grid(
            add,
            (["i"], ["j"]),
            ["i", "j"],
            ones(4),
            ones(4),
            axis_resources={"i": ("x", "z"), "j": "y"},
        ),
        ValueError,
        "axis_resources assign {'z'} to `i`, but the resources in scope are {'x', 'y'}. Assign one of these, or "
        "enter a mesh or a loop of that name around the call"
        f"{LEGACY}In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        "{'z'}",
    ),
    "the same loop twice": (
        lambda: xmap(identity, I, I, axis_resources={"i": ["l", "l"]}),
        ValueError,
        "axis_resources give `i` the resources ['l', 'l'], but one of these is repeated. Name each "
        "resource once"
        f"{LEGACY}Resource assignment of a single axis must be a tuple of distinct resources, but specified "
        "['l', 'l'] for axis i",
    ),
    "axis_resources that are a list of pairs": (
        lambda: xmap(identity, I, I, axis_resources=[("i", "x")]),
        TypeError,
        "axis_resources should be a dictionary from axis names to resources, such as {'batch': 'x'}, but got "
        "[('i', 'x')]",
    ),
    "None as a resource": (
        lambda: xmap(identity, I, I, axis_resources={"i": None}),
        TypeError,
        "The resources of axis i should be names of mesh axes or of serial loops, or SerialLoop(length), but got "
        "None. Write a tuple of several resources, and () for none",
    ),
    "a mesh as a resource": (
        lambda: on_grid(identity, I, I, ones(4), axis_resources={"i": Mesh(DEVICES, ("x",))}),
        TypeError,
        "The resources of axis i should be names of mesh axes or of serial loops, or SerialLoop(length), but got "
        f"{Mesh(DEVICES, ('x',))!r}. Enter `with mesh(devices, ('x',)):` around the call, and write "
        "axis_resources={'i': 'x'}",
    ),
    "an ellipsis as a resource": (
        lambda: xmap(identity, I, I, axis_resources={"i": ...}),
        TypeError,
        "The resources of axis i should be names of mesh axes or of serial loops, or SerialLoop(length), but got "
        "Ellipsis. Write a tuple of several resources, and () for none",
    ),
    "a set of resources": (
        lambda: xmap(identity, I, I, axis_resources={"i": {"x"}}),
        TypeError,
        "The resources of axis i should be names of mesh axes or of serial loops, or SerialLoop(length), but got "
        "{'x'}. Write a tuple of several resources, and () for none",
    ),
    "a size that mesh and loop do not divide": (
        lambda: on_grid(identity, I, I, ones(8), axis_resources={"i": ("x", SerialLoop(3))}),
        ValueError,
        "args[0] has 8 elements along `i`, but the resources ('x', SerialLoop(length=3)) need a "
        "multiple of 12. Pad the axis to 12, or give it other resources"
        f"{LEGACY}Size of axis i (8) is not divisible by the total number of resources assigned to this axis "
        "(('x', SerialLoop(length=3)), 12 in total)",
    ),
    "a named loop before a mesh axis": (
        lambda: in_loop(
            "l", 2, lambda: on_grid(identity, I, I, ones(8), axis_resources={"i": ("l", "x")})
        ),
        ValueError,
        "axis_resources give `i` the resources ('l', 'x'), but loops come last. Write the mesh axes "
        "first"
        f"{LEGACY}Loop resources cannot appear before mesh axes in the resource_axis argument",
    ),
    "a loop of length zero": (
        lambda: SerialLoop(0),
        ValueError,
        "The length of a serial loop should be a positive integer, but got 0. Write the number of chunks: "
        "SerialLoop(4), or serial_loop('l', 4)",
    ),
    "a loop with an unhashable name": (
        lambda: in_loop(["l"], 2, lambda: None),
        TypeError,
        "The name of a serial loop should be a string (or hashable, and not None), but got ['l']. Write "
        "serial_loop('l', 4)",
    ),
    "a loop named None": (
        lambda: in_loop(None, 2, lambda: None),
        TypeError,
        "The name of a serial loop should be a string (or hashable, and not None), but got None. Write "
        "serial_loop('l', 4)",
    ),
    "a loop within a loop of the same name": (
        lambda: in_loop("l", 2, lambda: in_loop("l", 4, lambda: None)),
        ValueError,
        "serial_loop cannot have the name 'l', which a mesh axis or a loop in scope has. Give it "
        "another name"
        f"{LEGACY}Cannot extend the resource environment with loop named `l`. An axis of this name is already "
        "defined!",
    ),
    "a loop with the name of a mesh axis": (
        lambda: in_mesh(DEVICES, "x", lambda: in_loop("x", 2, lambda: None)),
        ValueError,
        "serial_loop cannot have the name 'x', which a mesh axis or a loop in scope has. Give it "
        "another name"
        f"{LEGACY}Cannot extend the resource environment with loop named `x`. An axis of this name is already "
        "defined!",
    ),
    "a mesh axis with the name of a loop": (
        lambda: in_loop("x", 2, lambda: in_mesh(DEVICES, "x", lambda: None)),
        ValueError,
        "The mesh has axes `x`, as have serial loops in scope. Give the loop or the mesh axis another "
        "name"
        f"{LEGACY}Cannot update the mesh of the current resource environment. The new mesh shadows already "
        "defined axes `x`",
    ),
    # ----------------------------------------------------------------------- names that meet, and undeclared outputs
    "two axes on one loop": (
        lambda: in_loop(
            "l", 2, lambda: over_i_and_j(lambda u, v: u + v, resources={"i": ("x", "l"), "j": "l"})
        ),
        jax.errors.JAXTypeError,
        "Axes `i` and `j` are both assigned `l`, but the result of add at HERE varies over both. "
        "Assign another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `i` and `j` are both mapped to the resource `l`, but they coincide in the named_shape of "
        "a value returned from a primitive add created at HERE",
    ),
    "two axes that meet in the carry of a scan": (
        lambda: over_i_and_j(
            lambda u, v: lax.fori_loop(0, 2, lambda _, c: c + v, u), resources={"i": "x", "j": "x"}
        ),
        jax.errors.JAXTypeError,
        "Axes `i` and `j` are both assigned `x`, but the result of add at HERE varies over both. "
        "Assign another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `i` and `j` are both mapped to the resource `x`, but they coincide in the named_shape of "
        "a value returned from a primitive add created at HERE",
    ),
    "two axes that meet in a predicate and a branch": (
        lambda: over_i_and_j(
            lambda u, v: lax.cond(u[0] > 0, lambda: v, lambda: 2 * v),
            resources={"i": "x", "j": "x"},
        ),
        jax.errors.JAXTypeError,
        "Axes `i` and `j` are both assigned `x`, but the result of cond at HERE varies over both. "
        "Assign another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `i` and `j` are both mapped to the resource `x`, but they coincide in the named_shape of "
        "a value returned from a primitive cond created at HERE",
    ),
    "an output broadcast over a taken resource": (
        lambda: on_grid(
            identity,
            ["a"],
            ["a", "b"],
            ones(4),
            axis_sizes={"b": 4},
            axis_resources={"a": "x", "b": "x"},
        ),
        jax.errors.JAXTypeError,
        "The result varies over `a` and its out_axes add `b`, but both axes are mapped to the resource "
        "`x`. Map one of them to another resource, or reduce over `a` in the function"
        f"{LEGACY}One of xmapped function (identity) outputs is broadcast along axis `b` which is assigned to "
        "resources `x`, but the output is already partitioned along `x`, because its named shape contains `a`",
    ),
    "an output broadcast twice over one resource": (
        lambda: on_grid(
            lambda: {"c": 1.0},
            (),
            {"c": ["a", "b"]},
            axis_sizes={"a": 4, "b": 4},
            axis_resources={"a": "x", "b": "x"},
        ),
        jax.errors.JAXTypeError,
        "Axes `a` and `b` are both assigned `x`, but an output of an xmapped function (result['c']) "
        "varies over both. Assign another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `a` and `b` are both mapped to the resource `x`, but they coincide in the named_shape of "
        "an output of an xmapped function (result['c'])",
    ),
    "two axes that meet where a nested xmap closes over a value": (
        lambda: over_i(lambda v: closing_over(v), shape=(4,), resources={"i": "x"}),
        jax.errors.JAXTypeError,
        "Axes `i` and `n` are both assigned `x`, but a value that an xmapped function <lambda> uses at "
        "HERE varies over both. Assign another resource to one of them, or reduce over one before they meet"
        f"{LEGACY}Axes `i` and `n` are both mapped to the resource `x`, but they coincide in the named_shape of "
        "a value that an xmapped function <lambda> uses at HERE",
    ),
    "two axes that meet in the third of nested xmaps": (
        lambda: over_i(
            xmap(split_on_x, ["m", ...], ["m", ...], axis_resources={"m": "x"}), shape=(4, 4)
        ),
        jax.errors.JAXTypeError,
        "Axes `m` and `n` are both assigned `x`, but an input to an xmapped function identity (xmap "
        "called at HERE) varies over both. Assign another resource to one of them, or reduce over one before they "
        "meet"
        f"{LEGACY}Axes `m` and `n` are both mapped to the resource `x`, but they coincide in the named_shape of "
        "an input to an xmapped function identity (xmap called at HERE)",
    ),
    "undeclared axes of one of several results": (
        lambda: over_i_and_j(
            lambda u, v: {"good": u, "bad": (u, u * v)}, out_axes={"good": I, "bad": (I, {})}
        ),
        TypeError,
        "result['bad'][1] varies over `i`, `j`, but its out_axes {} do not name `i`, `j`. Add `i`, `j` "
        "to out_axes, or reduce over `i`, `j` in the function"
        f"{LEGACY}One of xmap results has an out_axes specification of {{}}, but is actually mapped along more "
        "axes defined by this xmap call: i, j",
    ),
    # ------------------------------------------------------------------------------------------------ names in scope
    "an axis of an outer xmap": (
        lambda: over_i(lambda v: xmap(identity, I, I)(v), shape=(3, 2)),
        TypeError,
        "The xmap at HERE has axes `i`, as has an xmap around it. Rename its axes"
        f"{LEGACY}Detected disallowed xmap axis name shadowing at HERE (shadowed axes: `i`)",
    ),
    "a position in along": (
        lambda: over_i(lambda v: xnp.along(jnp.sum, 0, v)),
        TypeError,
        "axis_name of along should be a named axis, but got 0. Call the function itself, with axis=0",
    ),
    "nanmax along an axis without elements": (
        lambda: xmap(lambda v: xnp.nanmax(v, axis="i"), I, [...])(np.zeros((0, 3))),
        ValueError,
        "nanmax got the axis 'i' of size 0 (a zero-size array). Leave nanmax out where it is empty",
    ),
    "a reference as an argument": (
        lambda: xmap(lambda v: v[...], I, I)(jax.new_ref(ones(4))),
        NotImplementedError,
        "An xmapped function cannot read or write a reference (jax.new_ref) that was made outside. Pass its value as "
        "an argument and return the new one (args[0] is a reference: pass its value, ref[...])",
    ),
    "an ordered print on a mesh": (
        lambda: over_i(
            lambda v: (jax.debug.print("{}", 1, ordered=True), v)[1], resources={"i": "x"}
        ),
        NotImplementedError,
        "The xmapped function <lambda> has a callback or print with ordered=True, which JAX runs on one device, but "
        "its axis_resources compute it on 8. Write ordered=False, or call it without resources of a mesh",
    ),
    "an ordered callback on a mesh, in a branch": (
        lambda: over_i(
            lambda v: lax.cond(v[0] > 0, ordered_callback, lambda v: v, v), resources={"i": "x"}
        ),
        ValueError,
        "An argument of debug_callback(..., ordered=True) at HERE varies over {'i'}, but the elements of a named axis "
        f"have no order. Leave out ordered=True{LEGACY}Cannot `vmap` ordered IO callback",
    ),
    "a token": (
        lambda: over_i(lambda v: (lax.create_token(), v)[1], resources={"i": "x"}),
        NotImplementedError,
        "The value at HERE is a token, but effects in an xmapped function have no order. Leave it out",
    ),
    "a token as a result": (
        lambda: over_i(lambda v: lax.create_token()),
        NotImplementedError,
        "A result is a token, but effects in an xmapped function have no order. Leave it out",
    ),
    "a mesh axis as a name": (
        lambda: over_i(lambda v: lax.psum(v, "x"), resources={"i": "x"}),
        NameError,
        "Found an unbound axis name: x. Named axes in scope: i: 8. Name one of them, or add the axis "
        "to in_axes or axis_sizes. `x` is an axis of the mesh: name the axis that axis_resources assign to it",
    ),
    "a typing error in a reduction": (
        lambda: xmap(lambda v: jnp.sum(v, axis="Batch"), BATCH, {})(ones(3)),
        NameError,
        "Found an unbound axis name: Batch. Named axes in scope: batch: 3. Name one of them, or add the axis "
        "to in_axes or axis_sizes. Did you mean `batch`?",
    ),
    "a typing error in out_axes": (
        lambda: xmap(identity, BATCH, ["bacth", ...]),
        ValueError,
        "out_axes name `bacth`, which neither in_axes nor axis_sizes do. Did you mean `batch`?"
        f"{LEGACY}All axis names appearing in out_axes must also appear in in_axes or axis_sizes, but the "
        "following are missing: {'bacth'}",
    ),
    "a number of chunks as a resource": (
        lambda: on_grid(identity, BATCH, BATCH, ones(8), axis_resources={"batch": ("x", 2)}),
        ValueError,
        "axis_resources assign {2} to `batch`, but the resources in scope are {'x', 'y'}. Assign one of these, or "
        "enter a mesh or a loop of that name around the call. To compute an axis in 2 chunks write SerialLoop(2)"
        f"{LEGACY}In-scope resources are insufficient to execute the xmapped function. The missing resources are: "
        "{2}",
    ),
    "a set as a specification": (
        lambda: xmap(identity, {"i"}, I),
        TypeError,
        "in_axes is {'i'}, which is not an axis specification. A set has no order: write a list, or "
        "{position: name}"
        f"{LEGACY}Value mapping specification in xmap in_axes pytree can be either: - lists of axis names "
        "(possibly ending with the ellipsis object: ...) - dictionaries that map positional axes (integers) to "
        "axis names (e.g. {2: 'name'}) but got: {'i'}",
    ),
    "the name before the function": (
        lambda: over_i(lambda v: xnp.along("i", jnp.sum, v)),
        TypeError,
        "fun of along(fun, axis_name, *operands) should be a function, but got 'i'",
    ),
    "a named shape of names": (
        lambda: NamedShape("batch"),
        TypeError,
        "The sizes of a NamedShape should be integers, as in NamedShape(2, batch=8), but got ['batch']",
    ),
    "assignments of names without sizes": (
        lambda: assignments(["i"], {"x": 4}),
        TypeError,
        "assignments expects the sizes of the named axes, such as {'i': 8}, but got ['i']",
    ),
    "no specifications": (
        lambda: xmap(identity),
        TypeError,
        "xmap() is missing in_axes and out_axes, which name the dimensions of arguments and results. Write xmap(fun, "
        "['batch', ...], ['batch', ...]), or, as a decorator, @xmap(in_axes=['batch', ...], out_axes=['batch', ...])",
    ),
    "a decorator with specifications by position": (
        lambda: xmap(I, I),
        TypeError,
        "The first argument of xmap should be a function, but got ['i', ...]. Write xmap(fun, in_axes, out_axes), "
        "or the decorator @xmap(in_axes=..., out_axes=...)",
    ),
    "the same name twice in psum": (
        lambda: over_i(lambda v: lax.psum(v, ("i", "i")), out_axes={}),
        ValueError,
        "psum at HERE names an axis more than once: `i`, `i`. Name each axis once",
    ),
    "the same name twice in jnp.sum": (
        lambda: over_i(lambda v: jnp.sum(v, axis=("i", "i")), out_axes={}),
        ValueError,
        "duplicate value in 'axis': ('i', 'i')",
    ),
    "a vmapped axis around a placed xmap": (
        lambda: in_mesh(
            DEVICES,
            "x",
            lambda: jax.vmap(
                lambda v: xmap(lambda u: lax.psum(u, "o"), ["j"], ["j"], axis_resources={"j": "x"})(
                    v
                ),
                axis_name="o",
            )(ones((3, 8))),
        ),
        NotImplementedError,
        "The function uses the axes `o` of a transformation around the xmap (such as vmap with an axis_name), which "
        "cannot be reached while its own axes have mesh resources. Make them axes of the xmap",
    ),
    "a vmap around, whose axis has the name of a mesh axis": (
        lambda: in_mesh(DEVICES, "x", lambda: jax.vmap(split_on_x, axis_name="x")(ones((3, 8)))),
        ValueError,
        "The xmap is split over mesh axes {'x'}, but a transformation around it (such as vmap with an axis_name) has "
        "axes of the same names, which JAX would take for those of the mesh. Rename one of them",
    ),
    # --------------------------------------------------------------------------------------------------- collectives
    "a looped axis in a function of JAX that is jitted": (
        lambda: over_i(lambda v: v - jnp.var(v, axis="i"), resources={"i": SerialLoop(2)}),
        RuntimeError,
        "The function refers to `i` at HERE, but axis_resources assign a serial loop to `i`. Remove "
        "the loop, or the collective"
        f"{LEGACY}Named axes with loop resources assigned to them cannot be referenced inside the xmapped "
        "computation (e.g. in collectives), but `i` violates that rule",
    ),
    "a destination twice": (
        lambda: over_i(lambda v: lax.ppermute(v, "i", [(0, 1), (2, 1)])),
        ValueError,
        "The destination index 1 of ppermute at HERE should be in one pair only, but got ((0, 1), (2, 1)). Leave one "
        "of these pairs out",
    ),
    "an integer for the name in a permutation": (
        lambda: xmap(lambda v: lax.ppermute(v, 0, [(0, 1)]), {0: 0}, {0: 0})(np.ones(8)),
        NameError,
        "ppermute at HERE got 0 for an axis name. Collectives read 0 as a position (dimension), and do "
        "not support axes that are named by integers. Name the axis by a string",
    ),
    "a permutation that leaves the axis": (
        lambda: over_i(lambda v: lax.ppermute(v, "i", [(0, 8)])),
        ValueError,
        "The permutation of ppermute at HERE has the index 8, but the indices are 0 to 7. Use these only",
    ),
    "a permutation of triples": (
        lambda: over_i(lambda v: lax.ppermute(v, "i", [(0, 1, 2)])),
        ValueError,
        "The permutation of ppermute at HERE should be pairs of integers, [(source, destination), ...], but got "
        "((0, 1, 2),)",
    ),
    "a gather along an axis without elements": (
        lambda: xmap(lambda v: lax.all_gather(v, "i"), ["i"], [...])(np.ones(0)),
        ValueError,
        "Axis i has size 0, so that nothing can move along it at HERE. Leave the call out there",
    ),
    "a permutation of fractions": (
        lambda: over_i(lambda v: lax.ppermute(v, "i", [(0.5, 1)])),
        ValueError,
        "The permutation of ppermute at HERE should be pairs of integers, [(source, destination), ...], but got "
        "((0.5, 1),)",
    ),
    "a broadcast from beyond the axis": (
        lambda: over_i(lambda v: lax.pbroadcast(v, "i", 9)),
        ValueError,
        "The source of pbroadcast at HERE has the index 9, but the indices are 0 to 7. Use these only",
    ),
    "groups that leave elements out": (
        lambda: over_i(lambda v: lax.psum(v, "i", axis_index_groups=[[0, 1], [2, 3]])),
        ValueError,
        "axis_index_groups of `psum` at HERE should be groups of one size that have all indices of one named axis "
        "exactly once, 0 to 7, but got ((0, 1), (2, 3)). Put the remaining indices into such groups",
    ),
    "psum_scatter over a dimension of another size": (
        lambda: over_i(lambda v: lax.psum_scatter(v, "i")),
        ValueError,
        "reduce_scatter operand scatter dimension size 3 must match shard count 8",
    ),
    "a shard_map with collectives in a placed body": (
        lambda: over_i(shard_map_with_psum_in_body, shape=(4,), resources={"i": "x"}),
        NotImplementedError,
        "The shard_map at HERE cannot be evaluated inside an xmapped function, which uses the mesh. Name the axes of "
        "the shard_map in xmap, and assign their mesh axes in axis_resources",
    ),
    "a shard_map in a placed body": (
        lambda: over_i(shard_map_in_body, shape=(4,), resources={"i": "x"}),
        NotImplementedError,
        "The shard_map at HERE cannot be evaluated inside an xmapped function, which uses the mesh. Name the axes of "
        "the shard_map in xmap, and assign their mesh axes in axis_resources",
    ),
    # --------------------------------------------------------------------------------------- the restored vocabulary
    "pdot over None": (
        lambda: over_i(lambda v: lax.pdot(v, v, None)),
        TypeError,
        "An axis name of pdot should be hashable, and not None, but got None. Use a string",
    ),
    "pdot over a name twice": (
        lambda: over_i(lambda v: lax.pdot(v, v, ("i", "i"))),
        ValueError,
        "pdot names an axis more than once: `i`, `i`. Name each axis once",
    ),
    "pdot of dimensions of two sizes": (
        lambda: over_i(lambda v: lax.pdot(v, jnp.ones(4), "i", ((0,), (0,)))),
        TypeError,
        "pos_contract of pdot pairs dimension 0 of x (shape (3,)) with dimension 0 of y (shape (4,)), but they "
        "have different sizes. Pair dimensions of one size",
    ),
    "pdot of a batch dimension that y lacks": (
        lambda: over_i(lambda v: lax.pdot(v, 2.0, "i", ((), ()), ((0,), (-1,)))),
        ValueError,
        "pdot was given the positional dimension -1 of y, which has shape (). Count without the named axes, which "
        "are not part of that shape",
    ),
    "pdot of one dimension with none": (
        lambda: over_i(lambda v: lax.pdot(v, v, "i", ((0,), ()))),
        TypeError,
        "pos_contract of pdot should be a pair of sequences of as many dimensions of x as of y, e.g. "
        "((0,), (1,)), but got ((0,), ())",
    ),
    "pdot of plain numbers as dimensions": (
        lambda: over_i(lambda v: lax.pdot(v, v, "i", (0, 0))),
        TypeError,
        "pos_contract of pdot should be a pair of sequences of as many dimensions of x as of y, e.g. "
        "((0,), (1,)), but got (0, 0)",
    ),
    "pdot of a dimension that is contracted and kept": (
        lambda: over_i(lambda v: lax.pdot(v, v, "i", ((0,), (0,)), ((0,), (0,)))),
        TypeError,
        "pos_contract and pos_batch of pdot have dimension 0 of x twice. Name it once",
    ),
    "pdot with an unknown precision": (
        lambda: over_i(lambda v: lax.pdot(v, v, "i", precision="double")),
        ValueError,
        "The precision should be None, 'default', 'high', 'highest', or a value that jax.lax.dot_general takes, but "
        "got 'double'",
    ),
    "pgather along a dimension that is not there": (
        lambda: over_i(lambda v: lax.pgather(v, 0, ("i", 1))),
        ValueError,
        "pgather was given the positional dimension 1 of src, which has shape (3,). Count without the named axes, "
        "which are not part of that shape",
    ),
    "an einsum whose first argument is no string": (
        lambda: over_i(lambda v: lax.xeinsum(v, "n{i}->{i}")),
        TypeError,
        "The first argument of a named einsum should be a string like 'n{b,k},{k}->n{b}', but got an array of shape "
        "(3,)",
    ),
    "an einsum over an unbound name": (
        lambda: over_i(lambda v: einsum("n{nope}->n", v)),
        NameError,
        "Found an unbound axis name: nope in the einsum 'n{nope}->n'. Named axes in scope: i: 8. Name "
        "one of them, or add the axis to in_axes or axis_sizes",
    ),
    "an einsum for fewer operands": (
        lambda: over_i(lambda v: einsum("n{i},n->", v)),
        ValueError,
        "The einsum 'n{i},n->' describes 2 operands, but got 1. Pass one for each part",
    ),
    "an einsum for another rank": (
        lambda: over_i(lambda v: einsum("nm{i}->n", v)),
        ValueError,
        "Operand 0 of the einsum 'nm{i}->n' is described by 'nm{i}', which has 2 positional dimensions, but its "
        "positional shape is (3,). Write named axes in braces",
    ),
    "an einsum with two sizes of a letter": (
        lambda: over_i(lambda v: einsum("n{i},n->{i}", v, jnp.ones(4))),
        ValueError,
        "In 'n{i},n->{i}', the dimension n has size 3 and, in operand 1, 4. Pass arrays of one size",
    ),
    "an einsum over a diagonal that is not square": (
        lambda: over_i(lambda v: einsum("nn{i}->{i}", jnp.outer(v, jnp.ones(4)))),
        ValueError,
        "In 'nn{i}->{i}', the dimension n has size 3 and, in operand 0, 4. Pass arrays of one size",
    ),
    "an einsum that skips an axis": (
        lambda: over_i(lambda v: einsum("n{i},n->", v, v)),
        TypeError,
        "The einsum 'n{i},n->' at HERE mentions the named axis `i` in operand 0 ('n{i}') and skips "
        "it in operand 1 ('n'), which varies over it too. Name the axis in both operands, or reduce "
        "it in this one first",
    ),
    "an einsum with an unknown strategy": (
        lambda: over_i(
            lambda v: einsum("n{i},n,n->", v, jnp.ones(3), jnp.ones(3), optimize="best"),
            out_axes={},
        ),
        ValueError,
        "optimize of einsum should be a strategy of opt_einsum, such as 'auto', 'greedy' or 'optimal', but got 'best'",
    ),
    "a function that loses the axis it should keep": (
        lambda: over_i(lambda v: xnp.along(lambda u: u.sum(0), "i", v, keep=True)),
        ValueError,
        "<lambda> was applied along the named axis `i` of size 8 with keep=True, but returned an "
        "array of shape (3,): its first dimension should be that axis. Use keep=False if it reduces "
        "the axis",
    ),
    "sorting along a name and a position": (
        lambda: over_i(lambda v: xnp.sort(v, axis=("i", 0))),
        TypeError,
        "The axis of sort should be one, named or positional, but got ('i', 0)",
    ),
    "any over a set": (
        lambda: over_i(lambda v: xnp.any(v, axis={"i"})),
        TypeError,
        "An axis name of any should be hashable, and not None, but got {'i'}. Use a string",
    ),
    # ---------------------------------------------------------------------------------------- named shapes and types
    "named_shape of a pytree": (
        lambda: over_i(lambda v: named_shape({"w": v})),
        TypeError,
        "The argument of named_shape should be an array or a scalar, but got {'w': an array of shape (3,)}",
    ),
    "named_shape of a type": (
        lambda: over_i(lambda v: v * len(v.aval.named_shape)),
        TypeError,
        "x.aval.named_shape is not known inside an xmapped function: the type float32[3] does not tell which named "
        "axes a value varies over. Write x.named_shape, or xmap_compat.named_shape(x)",
    ),
    "named_shape of an argument of a jitted function": (
        lambda: over_i(jax.jit(lambda v: v * len(named_shape(v)))),
        ValueError,
        "named_shape cannot tell which named axes this value varies over: it depends on an argument of a function "
        "that is traced by itself (under jit, in a loop, in a nested xmap). Ask outside of that function, for the "
        "value that is passed to it",
    ),
    # -------------------------------------------------------------------------------------------------------- meshes
    "more names than dimensions": (
        lambda: Mesh(DEVICES, ("x", "y")),
        ValueError,
        "A mesh needs one axis name for each dimension of its device array, but got devices of shape (8,) and the "
        "names ('x', 'y'). Write the names in one tuple, ('x', 'y'), or reshape the devices",
    ),
    "the same name twice in a mesh": (
        lambda: Mesh(DEVICES.reshape(4, 2), ("x", "x")),
        ValueError,
        "The axis names of a mesh should be different, but got ('x', 'x'). Give each dimension its own name",
    ),
    "None as the name of a mesh axis": (
        lambda: Mesh(DEVICES, (None,)),
        TypeError,
        "The axis names of a mesh should be strings (or hashable, and not None), but got (None,). Write "
        "mesh(devices, ('x', 'y'))",
    ),
    "an unhashable name of a mesh axis": (
        lambda: Mesh(DEVICES, (["x"],)),
        TypeError,
        "The axis names of a mesh should be strings (or hashable, and not None), but got (['x'],). Write "
        "mesh(devices, ('x', 'y'))",
    ),
    "the name of a mesh before a list of devices": (
        lambda: mesh(("x",), list(DEVICES[:1])),
        TypeError,
        f"The axis names of a mesh should be strings (or hashable, and not None), but got [{DEVICES[0]!r}]. Devices "
        "and names are swapped: write mesh(devices, ('x', 'y'))",
    ),
    "a misspelt keyword": (
        lambda: xmap(identity, I, I, axis_resource={"i": "x"}),
        TypeError,
        "xmap() got an unexpected keyword argument: `axis_resource`. Did you mean `axis_resources`?",
    ),
    "a static argument": (
        lambda: xmap(identity, I, I, static_argnums=(1,)),
        TypeError,
        "xmap() got an unexpected keyword argument: `static_argnums`. Bind static values with functools.partial before "
        "xmap",
    ),
    "a function without a return": (
        lambda: xmap(lambda x: None, I, I)(ones(8)),
        ValueError,
        "The function returned None (is a `return` missing?), but out_axes have names. The out_axes "
        "here: ['i', ...]"
        f"{LEGACY}xmap out_axes specification must be a tree prefix of the corresponding value, got "
        "specification ['i', ...] for value tree PyTreeDef(None).",
    ),
    "nothing, without a spec": (
        lambda: xmap(lambda x: None, I, None)(ones(8)),
        ValueError,
        "The function returned None (is a `return` missing?), and out_axes is None. Return an array, or write {} as "
        "out_axes of a function that is called for its effects",
    ),
    "a number without a spec": (
        lambda: xmap(add, (I, None), I)(ones(8), 2.0),
        ValueError,
        "args[1] is a Python scalar, but in_axes has None for it. Write {} for what is not mapped. The "
        "in_axes here: (['i', ...], None)"
        f"{LEGACY}xmap in_axes specification must be a tree prefix of the corresponding value, got "
        "specification (['i', ...], None) for value tree PyTreeDef((*, *)). Note that xmap in_axes that are "
        "non-trivial pytrees should always be wrapped in a tuple representing the argument list.",
    ),
    "a mesh of lists of different length": (
        lambda: Mesh([[*DEVICES[:1]], [*DEVICES[:2]]], ("x", "y")),
        TypeError,
        "The first argument of a mesh should be a rectangular array (or a list) of JAX devices, but it contains "
        "[CpuDevice(id=0)] of type list. Write mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))",
    ),
    "a mesh with a device twice": (
        lambda: Mesh([DEVICES[0], DEVICES[0]], "x"),
        ValueError,
        "A mesh should have each device once, but CpuDevice(id=0) appears more than once. Leave one out",
    ),
    "a mesh without devices": (
        lambda: Mesh([], "x"),
        ValueError,
        "mesh needs at least one device, but got none for the axis names ('x',). Pass jax.devices()",
    ),
    "a mesh entered in a body": (
        lambda: over_i(lambda v: in_mesh(DEVICES, "x", lambda: split_on_x(v)), shape=(8,)),
        RuntimeError,
        "The body of an xmap enters another mesh. Enter one mesh around the outermost xmapped call"
        f"{LEGACY}Changing the physical mesh is not allowed inside xmap.",
    ),
    "spmd_axis_name": (
        lambda: in_grid(lambda: jax.vmap(split_on_x, spmd_axis_name="y")(ones((2, 8)))),
        NotImplementedError,
        "A vmap with spmd_axis_name={'y'} is around an xmapped function with mesh resources. Leave spmd_axis_name "
        "out, or name the mapped dimension in in_axes and give it a mesh axis in axis_resources",
    ),
    # ----------------------------------------------------------------------------------- donation, backends, helpers
    "a fraction in donate_argnums": (
        lambda: xmap(identity, I, I, donate_argnums=(0, 1.5)),
        TypeError,
        "donate_argnums should be the position of an argument, or a tuple of positions, but got (0, 1.5)",
    ),
    "a device as the backend": (
        lambda: xmap(identity, I, I, backend=0),
        TypeError,
        "backend should be None or the name of a platform, such as 'cpu', but got 0",
    ),
    "an unknown backend": (
        lambda: xmap(identity, I, I, backend="nonesuch"),
        RuntimeError,
        "xmap backend 'nonesuch' is not available. Use cpu, or leave it out",
    ),
}

if jax.__version_info__ == (0, 9, 0):
    del MISUSES["a token as a result"]  # there jax.make_jaxpr refuses it, in other words


def lines_of(code):
    """The lines of a function and of those defined in it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {line for *_, line in code.co_lines() if line}.union(*map(lines_of, inner))


HELPERS = (
    ordered_callback,
    split_on_x,
    closing_over,
    shard_map_in_body,
    shard_map_with_psum_in_body,
)
HELPER_LINES = set().union(*(lines_of(f.__code__) for f in HELPERS))

# A place as messages show it: file, line, perhaps a column, and the function.
PLACE = re.compile(re.escape(__file__) + r":(\d+)(?::\d+)? \([^)]*\)")


def files_of(error):
    """The files of a traceback, as a user sees it."""
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


@pytest.mark.parametrize(("misuse", "error", "message"), MISUSES.values(), ids=MISUSES.keys())
def test_misuse(misuse, error, message):
    with pytest.raises(error) as caught:
        misuse()
    assert type(caught.value) is error
    assert PLACE.sub("HERE", str(caught.value)) == message
    assert files_of(caught.value) == {__file__}
    assert (
        caught.value.__suppress_context__ or not caught.value.__context__
    )  # of JAX, which tries other ways first
    assert {int(line) for line in PLACE.findall(str(caught.value))} <= lines_of(
        misuse.__code__
    ) | HELPER_LINES


# What to do: a sentence that begins with a verb, the form that was required, an example, or a caret below the mistake.
CURE = re.compile(
    r"(?:[.:;,] (?:[Oo]r )?|\? |without names )(?:[Aa]dd|Apply|Ask|Assign|Bind|Call|Count|Enter|[Gg]ive|Include"
    r"|[Ll]eave|Make|Map|Name|Pad|Pair|[Pp]ass|Put|Reduce|[Rr]emove|Rename|Return|Take|Use|[Ww]rite)\b"
    r"|should be |such as |expects |Did you mean|a `return` missing|\^$"
)
# Python or functions of JAX refuse these; notes help where a name is in the place of a position: see NOTED.
OF_OTHERS = {
    "the same name twice in jnp.sum",
    "psum_scatter over a dimension of another size",
}


def test_every_message_says_what_to_do():
    ours = {name: message.split(LEGACY)[0] for name, (_, _, message) in MISUSES.items()}
    assert {name for name, message in ours.items() if not CURE.search(message)} == OF_OTHERS


def test_legacys_words_are_the_last_line():
    quoting = [message.split(LEGACY) for *_, message in MISUSES.values() if LEGACY in message]
    assert len(quoting) >= 30
    assert [legacy for _, legacy in quoting if "\n" in legacy] == []


@pytest.mark.parametrize("repeat", [lambda f: f, jax.jit], ids=["a call", "jit"])
def test_a_donated_array_that_is_used_again(repeat):
    fun = xmap(identity, I, I, donate_argnums=0)
    array = jnp.ones((8, 3))
    fun(array)
    # Before 0.11, JAX refuses it within its compiled call, in its own words.
    ours = re.escape("args[0] was donated by an earlier call (donate_argnums=(0,))")
    error, words = (
        (RuntimeError, ours)
        if jax.__version_info__ >= (0, 11)
        else (ValueError, "deleted or donated")
    )
    with pytest.raises(error, match=words):
        fun(array)
    np.testing.assert_array_equal(repeat(fun)(jnp.ones((8, 3))), ones((8, 3)))


# ------------------------------------------------------------------------ notes on what JAX refuses

ROWS = "`v` has the positional shape (3,) here; its named axes are {i: 8}."
NO_ROWS = "`v` has no positional dimensions here; its named axes are {i: 8}."
SIZE = " The size of a named axis is lax.axis_size('i')"
PRODUCT = " The sum of products over an axis of both operands is pdot(x, y, 'i')"
ALONG = " Along a named axis it is {}"
NAMED = "{0} takes no axis names here; xmap_compat.numpy.{0} does"
TRACED = "xmap traces this function once, for all elements of its named axes: "
NO_TRUTH = (
    f"{TRACED}a condition has no truth value here. Write jnp.where(condition, x, y) or lax.cond in the place of `if`, "
    "`and`, `or`, `not`, `max` and `min`"
)
NO_NUMPY = (
    f"{TRACED}NumPy cannot read them. Call jax.numpy's function: jnp.sin, not np.sin; index an array of its: "
    "jnp.asarray(w)[v], not w[v]"
)
NO_VALUE = (
    f"{TRACED}their values are not known here. Bind what must be known with functools.partial before xmap; the size of "
    "a named axis is lax.axis_size(name)"
)
NO_INDEX = f"{NO_VALUE}. To index a list write jnp.asarray(values)[v]"
NO_MASK = f"{TRACED}what a mask selects is not known here. Write jnp.where(mask, x, 0)"
NO_LOOP = " The function computes one element of `i`: it needs no loop over them"
NO_ARRAY = (
    "xmap takes arrays, scalars, or pytrees of them as results, and out_axes name their dimensions. Let a function "
    "around the xmapped one return anything else"
)


def of_other_values(v):
    return jnp.ones(3).sum(1)


def condition_in_forward(x):
    return x if x > 0 else -x, None


def condition_in_backward(_, ct):
    return (ct if ct > 0 else -ct,)


def condition_in_jvp(primals, tangents):
    return primals[0], tangents[0] if tangents[0] > 0 else -tangents[0]


def in_a_rule(rule):
    """The identity, with a condition in one of its rules."""
    if rule == "jvp":
        fun = jax.custom_jvp(lambda x: x)
        fun.defjvp(condition_in_jvp)
        return fun
    fun = jax.custom_vjp(lambda x: x)
    forward = condition_in_forward if rule == "forward" else lambda x: (x, None)
    backward = condition_in_backward if rule == "backward" else lambda _, ct: (ct,)
    fun.defvjp(forward, backward)
    return fun


# The function, the positional shape of its argument, and the note: it fits the operation.
NOTED = {
    "a reduction over a dimension that is named": (
        lambda v: v.mean(axis=0), (), NO_ROWS + ALONG.format("jnp.mean(v, axis='i')")
    ),
    "another reduction": (lambda v: jnp.sum(v, axis=1), (3,), ROWS + ALONG.format("jnp.sum(v, axis='i')")),
    "one that takes no names": (
        lambda v: jnp.prod(v, 0), (), NO_ROWS + ALONG.format("xmap_compat.numpy.prod(v, axis='i')")
    ),
    "a norm": (
        lambda v: jnp.linalg.norm(v, axis=0), (), NO_ROWS + ALONG.format("xmap_compat.numpy.norm(v, axis='i')")
    ),
    "an index into an array of NumPy": (lambda v: np.ones(3)[v.astype(int)], (), NO_NUMPY),
    "an index into a list": (lambda v: [1.0, 2.0][v.astype(int)], (), NO_INDEX),
    "softmax": (lambda v: jax.nn.softmax(v), (), NO_ROWS + ALONG.format("jax.nn.softmax(v, axis='i')")),
    "the size of a dimension that is named": (lambda v: v.shape[1], (3,), ROWS + SIZE),
    "the length of a value without dimensions": (lambda v: len(v), (), NO_ROWS + SIZE),
    "an index of a dimension that is named": (
        lambda v: v[0, 0], (3,), ROWS + ALONG.format("xmap_compat.numpy.take(v, index, axis='i')")
    ),
    "an update at an index": (lambda v: v.at[0].set(1), (), NO_ROWS),
    "a loop": (lambda v: list(v), (), NO_ROWS + NO_LOOP),
    "a reshape": (lambda v: v.reshape(8, 3), (3,), ROWS),
    "a transposition": (lambda v: jnp.transpose(v, (1, 0)), (3,), ROWS),
    "a stack": (lambda v: jnp.stack([v, v], axis=2), (3,), ROWS),
    "a product over a dimension that is named": (lambda v: v.T @ np.ones(8), (3,), ROWS + PRODUCT),
    "a product from the right": (lambda v: np.ones((3, 8)) @ v, (), NO_ROWS + PRODUCT),
    "dot_general": (lambda v: lax.dot_general(v, v, (((0,), (0,)), ((), ()))), (), NO_ROWS + PRODUCT),
    "an einsum": (lambda v: jnp.einsum("k,k->", v, np.ones(8)), (), NO_ROWS + PRODUCT),
    "NumPy's function": (lambda v: np.sum(v, axis=1), (3,), ROWS + ALONG.format("jnp.sum(v, axis='i')")),
    "in an inner function": (
        lambda v: jax.jit(lambda w: w.sum(1))(v), (3,), ROWS + ALONG.format("jnp.sum(v, axis='i')")
    ),
    "in an xmap inside": (lambda v: xmap(lambda w: w.shape[1], J, {})(v), (3,), ROWS + SIZE),
    "in a gradient": (
        lambda v: jax.grad(lambda v: v.sum(1))(v), (3,), ROWS + ALONG.format("jnp.sum(v, axis='i')")
    ),
    "argmax over a named axis": (lambda v: jnp.argmax(v, "i"), (3,), NAMED.format("argmax")),
    "the method": (lambda v: v.cumsum(axis="i"), (3,), NAMED.format("cumsum")),
    "NumPy's prod over a named axis": (lambda v: np.prod(v, axis="i"), (3,), NAMED.format("prod")),
    "a name where a collective takes a position": (lambda v: lax.all_gather(v, "i", axis="i"), (3,), None),
    "a condition": (lambda v: 1 if v > 0 else 2, (), NO_TRUTH),
    "a condition of several values": (lambda v: 1 if v > 0 else 2, (3,), NO_TRUTH),
    "a function of NumPy": (lambda v: np.sin(v), (), NO_NUMPY),
    "a Python number": (lambda v: float(v), (), NO_VALUE),
    "a number of iterations": (lambda v: range(v), (), NO_VALUE),
    "a method that makes lists": (lambda v: v.tolist(), (3,), NO_VALUE),
    "a mask": (lambda v: v[v > 0], (3,), NO_MASK),
    "a string as the result": (lambda v: "v", (), NO_ARRAY),
    "a string in the result": (lambda v: {"v": v, "name": "v"}, (), NO_ARRAY),
    "nothing of dimensions": (lambda v: int("v"), (3,), None),
    "an error of ours": (lambda v: xmap(identity, ["j", "k"], {})(v), (3,), None),
    "a permutation of sources": (lambda v: lax.ppermute(v, "i", [0, 1]), (3,), notes.PERMUTATION),
    "an argument that is missing": (lambda v: lax.psum(v), (3,), None),
    "a condition in a forward rule": (lambda v: jax.grad(in_a_rule("forward"))(v), (), NO_TRUTH),
    "a condition in a backward rule": (lambda v: jax.grad(in_a_rule("backward"))(v), (), NO_TRUTH),
    "a condition in a rule of custom_jvp": (lambda v: jax.grad(in_a_rule("jvp"))(v), (), NO_TRUTH),
    "no variable": (of_other_values, (3,), None),
}  # fmt: skip


def notes_of(error):
    """Those of ours."""
    return [note for note in getattr(error, "__notes__", ()) if not note.startswith("-----")]


@pytest.mark.parametrize(("fun", "shape", "note"), NOTED.values(), ids=NOTED.keys())
def test_errors_of_jax_are_noted_with_named_axes(fun, shape, note):
    with pytest.raises((IndexError, NotImplementedError, TypeError, ValueError)) as caught:
        over_i(fun, shape=shape)
    assert notes_of(caught.value) == ([note] if note else [])


@pytest.mark.parametrize("rule", ["forward", "backward", "jvp"])
def test_a_condition_in_a_rule_is_said_to_be_in_the_rule(rule):
    """The rule is traced late, for a gradient from outside."""
    fun = xmap(in_a_rule(rule), ["i"], ["i"])
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.grad(lambda v: fun(v).sum())(ones(8))
    line = f"condition_in_{rule} at {__file__}:"
    assert line in str(caught.value)
    assert "callables.py" not in str(caught.value)
    assert notes_of(caught.value) == [NO_TRUTH]


@pytest.mark.parametrize(
    "collective",
    [
        lambda v: lax.psum(v, 5),
        lambda v: lax.pmin(v, 5),
        lambda v: lax.pmean(v, (5,)),
        lambda v: lax.all_gather(v, 5),
        lambda v: lax.axis_size(5),
        lambda v: lax.ppermute(v, 5, [(0, 1)]),
        lambda v: lax.axis_index(5),
    ],
    ids=["psum", "pmin", "pmean", "all_gather", "axis_size", "ppermute", "axis_index"],
)
def test_a_collective_over_an_axis_that_is_named_by_an_integer(collective):
    with pytest.raises((NameError, ValueError)) as caught:
        xmap(collective, [5], [5, ...])(ones(8))
    words = [str(caught.value), *notes_of(caught.value)][-1]
    assert words.endswith(
        "Collectives read 5 as a position (dimension), and do not support axes that are named by integers. Name the "
        "axis by a string"
    )


@jax.custom_jvp
def moved(x):
    return x


@moved.defjvp
def moved_rule(primals, tangents):
    return primals[0], lax.all_gather(tangents[0], "i").sum(0)


def test_a_rule_without_a_line_is_said_to_be_at_the_call():
    fun = xmap(moved, ["i"], ["i"])
    with pytest.raises(ValueError) as caught:
        jax.grad(lambda v: fun(v).sum())(ones(0))
    message = (
        "Axis i has size 0, so that nothing can move along it at HERE. Leave the call out there"
    )
    assert PLACE.sub("HERE", str(caught.value)) == message


def test_specs_are_shown_as_they_were_written():
    """Two that are equal are not the same to read."""

    def fun(x):
        return x

    for spec in (["i"], ("i",)):
        shown = "['i']" if isinstance(spec, list) else "('i',)"
        with pytest.raises(ValueError, match=re.escape(f"but {shown} names exactly one dimension")):
            xmap(fun, spec, ["i"])(ones((5, 2)))
    with pytest.raises(ValueError, match=re.escape("The in_axes here: [['i']]\n")):
        xmap(add, [["i"]], ["i"])(ones(5), ones(5))


def swapped(u, v):
    return v @ u


@pytest.mark.parametrize(
    ("fun", "note"),
    [
        (lambda u, v: u @ v, "The sum of products over `k` is pdot(u, v, 'k')"),
        (swapped, "The sum of products over `k` is pdot(v, u, 'k')"),
        (lambda u, v: jnp.einsum("k,k->", u, v), "The sum of products over `k` is pdot(u, v, 'k')"),
        (
            lambda u, v: jnp.tensordot(u, 2 * v, 1),
            "The sum of products over `k` is pdot(u, v, 'k')",
        ),
    ],
    ids=["u @ v", "v @ u", "einsum", "tensordot"],
)
def test_a_product_is_noted_with_the_axis_that_its_operands_share(fun, note):
    with pytest.raises((TypeError, ValueError)) as caught:
        xmap(fun, (["i", "k"], ["k", "j"]), ["i", "j"])(ones((8, 3)), ones((3, 4)))
    (found,) = notes_of(caught.value)
    assert found.endswith(f" {note}")
    product = xmap(lambda u, v: pdot(u, v, "k"), (["i", "k"], ["k", "j"]), ["i", "j"])
    np.testing.assert_array_equal(product(ones((8, 3)), ones((3, 4))), 3 * ones((8, 4)))


def test_the_functions_that_a_note_speaks_of_take_axis_names():
    assert {*xnp.__all__} - {"along", "einsum"} == notes.NAMED_FUNCTIONS
    for name in notes.NAMED_FUNCTIONS:
        other = [1] if name in ("roll", "take") else [0.5] if name == "quantile" else []
        jax.eval_shape(xmap(lambda v: getattr(xnp, name)(v, *other, axis="i"), I, I), ones((8, 3)))  # noqa: B023


def test_a_source_that_cannot_be_read_does_not_hide_the_note():
    made = {}
    exec("def fun(v):\n    w = 2 * v\n    return w.shape[1]", made)
    with pytest.raises(IndexError) as caught:
        over_i(made["fun"])
    assert notes_of(caught.value) == [f"{ROWS} {ROWS.replace('v', 'w', 1)}{SIZE}"]


@pytest.mark.parametrize(
    ("resources", "advice"),
    [
        ({"bacth": "x"}, "Did you mean `batch`?"),
        ({"x": "batch"}, "Did you mean the other way round, {'batch': 'x'}?"),
        ({"zz": "x"}, "Name one of these, or leave the entry out"),
        ({"zz": ()}, "Name one of these, or leave the entry out"),
    ],
    ids=["a typing error", "the other way round", "another name", "without resources"],
)
def test_resources_of_an_axis_that_is_not_there(resources, advice):
    """An error; only programs that run unmodified, as older releases took them, are warned."""
    with pytest.raises(
        ValueError, match=re.escape(f"are `batch`. {advice}{LEGACY}All axes that")
    ) as raised:
        xmap(identity, BATCH, BATCH, axis_resources=resources)
    with pytest.warns(UserWarning) as caught:
        fun = maps.xmap(identity, BATCH, BATCH, axis_resources=resources)
    (warning,) = caught
    assert (str(warning.message), warning.filename) == (f"Ignored: {raised.value}", __file__)
    np.testing.assert_array_equal(fun(np.arange(3.0)), np.arange(3.0))


# -------------------------------------------------------------------------------- numbers that are none


def logarithm(v):
    return jnp.log(v)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=["vectorized", "split"])
@pytest.mark.parametrize(
    "use",
    [
        lambda f: f,
        lambda f: jax.jit(lambda v: 2 * f(v)),
        lambda f: jax.grad(lambda v: f(v).sum()),
        lambda f: jax.vmap(f, in_axes=1),
    ],
    ids=["a call", "jit", "grad", "vmap"],
)
def test_a_number_that_is_none_is_found_in_the_xmapped_function(use, resources):
    f = use(xmap(logarithm, I, I, axis_resources=resources))
    with grid(), jax.debug_nans(True):
        f(ones((8, 3)))
        with pytest.raises(
            FloatingPointError,
            match=r"^[iI]nvalid value \(nan\) encountered in xmap\(logarithm\): ",
        ):
            f(-ones((8, 3)))
    with (
        grid(),
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match=r"\(inf\) encountered in xmap\(logarithm\)"),
    ):
        f(0 * ones((8, 3)))


# ------------------------------------------------------------------------------- where errors end

FAILING = {
    "at xmap": lambda: xmap(identity, 0, I),
    "at legacy's xmap": lambda: maps.xmap(identity, 0, I),
    "at the decorator": lambda: xmap(in_axes=I, out_axes=0)(identity),
    "at the call": lambda: xmap(identity, I, I)(np.float32(1)),
    "in the function": lambda: xmap(lambda v: v.shape[9], I, I)(ones(3)),
    "at the plan": lambda: xmap(identity, I, I).plan(np.float32(1)),
    "at the mesh": lambda: Mesh([1, 2], "x"),
}


@pytest.mark.parametrize(
    "mode", ["quiet_remove_frames", "tracebackhide"], ids=["Python", "IPython"]
)
@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING.keys())
def test_tracebacks_end_in_the_users_file(failing, mode):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(Exception) as caught:
            failing()
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert files_of(caught.value) == {__file__}


STAGED = {
    "lower": lambda: xmap(identity, I, I).lower(np.float32(1)),
    "trace": lambda: xmap(identity, I, I).trace(np.float32(1)),
    "eval_shape": lambda: xmap(identity, I, I).eval_shape(np.float32(1)),
    "a sample": lambda: random.normal(jax.random.key(0), random.NamedShape(i=2)),
    "keys": lambda: random.fold_in_names(jax.random.key(0), random.NamedShape(i=2)),
    "an einsum in opt_einsum": lambda: xmap(lambda v: jnp.einsum("ij,jk", v, v), I, I)(
        ones((8, 3))
    ),
    "a picture": lambda: xmap(identity, I, I).plan(ones((8, 3))).save_svg("/nonexistent/a.svg"),
    "one device": lambda: check_assignments(
        xmap(identity, I, I), ones((8, 3)), mesh=Mesh(jax.devices()[:1], "x")
    ),
}


@pytest.mark.parametrize("failing", STAGED.values(), ids=STAGED.keys())
def test_tracebacks_of_other_functions_end_in_the_users_file(failing):
    with pytest.raises(Exception) as caught:
        failing()
    assert files_of(caught.value) == {__file__}


# ----------------------------------------------------------------------- what JAX refuses before us


def without_addresses(error):
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


STATIC = (
    "{} is {}, but the arguments of xmapped functions are arrays, scalars, or pytrees of them. Bind a static value "
    "with functools.partial before xmap"
)
FOREIGN_ARGUMENTS = {
    "a string": ("abc", "args[0]", "'abc' of type str"),
    "a function": (len, "args[0]", "<built-in function len> of type builtin_function_or_method"),
    "an array of strings": (np.array(["a", "b"]), "args[0]", "an array of dtype <U1"),
    "an array of objects": (np.array([object()]), "args[0]", "an array of dtype object"),
    "dates": (
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        "args[0]",
        "an array of dtype datetime64[D]",
    ),
    "a string in a tree": ({"w": [1.0, "abc"]}, "args[0]['w'][1]", "'abc' of type str"),
}


@pytest.mark.parametrize("in_axes", [I, {}], ids=["mapped", "not mapped"])
@pytest.mark.parametrize(
    ("argument", "path", "found"), FOREIGN_ARGUMENTS.values(), ids=FOREIGN_ARGUMENTS.keys()
)
def test_arguments_that_are_no_arrays_are_refused(argument, path, found, in_axes):
    with pytest.raises(TypeError) as caught:
        xmap(lambda x: x, in_axes, in_axes)(argument)
    assert str(caught.value) == STATIC.format(path, found)


def test_what_is_static_is_bound_before_xmap():
    def body(v, how):
        return {"id": v, "double": 2 * v}[how]

    with pytest.raises(TypeError) as caught:
        xmap(body, (I, {}), I)(ones(3), "double")
    assert str(caught.value) == STATIC.format("args[1]", "'double' of type str")
    np.testing.assert_array_equal(
        xmap(functools.partial(body, how="double"), I, I)(ones(3)), 2 * np.ones(3)
    )


STAGES = {
    "plan": lambda f: f.plan,
    "lower": lambda f: f.lower,
    "trace": lambda f: f.trace,
    "eval_shape": lambda f: f.eval_shape,
}


def test_the_stages_of_a_gradient_are_not_those_of_the_function():
    """What JAX's transformations copy from a function must not stage that function in their place."""
    gradient = jax.grad(xmap(lambda v: lax.psum(v**2, "i"), I, []))
    assert [hasattr(gradient, stage) for stage in ("lower", "trace", "eval_shape")] == [
        False,
        False,
        False,
    ]


def test_a_plan_refuses_the_arguments_that_a_call_refuses():
    staged = xmap(lambda v, how: v, (I, {}), I).plan
    with pytest.raises(TypeError) as caught:
        staged(ones(3), "double")
    assert str(caught.value) == STATIC.format("args[1]", "'double' of type str")
    with pytest.raises(
        TypeError, match="take positional arguments only, but got the keyword arguments: how"
    ):
        staged(ones(3), how="double")
    staged(jax.ShapeDtypeStruct((3,), np.float32), 1.0)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_errors_of_the_function_stand_where_a_call_is_not_executed(stage):
    def body(v):
        raise TypeError("the function's own")

    with pytest.raises(TypeError, match="the function's own"):
        stage(xmap(body, I, I))(jax.ShapeDtypeStruct((3,), np.float32))


@pytest.mark.parametrize("positional", ["abc", np.ones(3)], ids=["a string", "an array"])
@pytest.mark.parametrize(
    "keyword", ["abc", len, np.ones(3), jnp.ones(3)], ids=["str", "function", "numpy", "jax"]
)
def test_keyword_arguments_are_refused_before_arguments_are_read(positional, keyword):
    with pytest.raises(TypeError) as caught:
        xmap(lambda v, how: v, (I, {}), I)(positional, how=keyword)
    assert str(caught.value) == (
        "xmapped functions take positional arguments only, but got the keyword arguments: how. Pass them by position, "
        "or bind them with functools.partial before xmap"
    )


def test_a_type_of_an_array_is_refused_as_by_jit():
    def fun(x):
        return x

    argument = jax.ShapeDtypeStruct((3,), np.float32)
    with pytest.raises(TypeError) as by_jit:
        jax.jit(fun)(argument)
    with pytest.raises(TypeError) as by_xmap:
        xmap(fun, I, I)(argument)
    assert without_addresses(by_xmap.value) == without_addresses(by_jit.value)


FOREIGN_RESULTS = {"a string": "abc", "an object in a tree": {"a": [1.0, object()]}}


@pytest.mark.parametrize("result", FOREIGN_RESULTS.values(), ids=FOREIGN_RESULTS.keys())
def test_results_that_are_no_arrays_are_refused_as_by_jit(result):
    def fun(x):
        return result

    with pytest.raises(TypeError) as by_jit:
        jax.jit(fun)(ones(3))
    with pytest.raises(TypeError) as by_xmap:
        xmap(fun, I, {})(ones(3))
    assert without_addresses(by_xmap.value) == without_addresses(by_jit.value)


@pytest.mark.parametrize("resources", [{}, {0: "x"}], ids=["vectorized", "split"])
def test_collectives_read_integers_of_numpy_as_names_as_jax_does(resources):
    def body(v):
        return v * lax.psum(v, np.int64(0)) + lax.axis_index(np.int64(0))

    v = np.arange(8.0)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        found = xmap(body, [0], [0], axis_resources=resources)(v)
    np.testing.assert_allclose(found, v * v.sum() + np.arange(8))


def test_collectives_read_truth_values_as_positions_as_jax_does():
    v = np.arange(6.0).reshape(2, 3)
    found = xmap(lambda v: lax.psum(v, ("i", False)), ["i", ...], {})(v)
    np.testing.assert_allclose(found, v.sum())


# Einsums that cannot be read: where the caret stands, and what is wrong there.
MALFORMED = {
    "n{i->n": (1, "this brace is never closed"),
    "ni}->n": (2, "a closing brace without an opening one"),
    "n{{i}}->n": (2, "a brace within braces"),
    "n{i}{j}->n": (4, "a second pair of braces in one operand"),
    "n{i,,j}->n": (4, "an axis name is missing here"),
    "n{i,i}->n": (4, "the axis i is named twice in one operand"),
    "n{i}->n->n": (7, "a second '->'"),
    "n{i}-n": (4, "'-' is neither a letter, a brace, '...' nor '->'"),
    "n{i}->n,n": (7, "a comma in the output"),
    "n{i}->n{j}": (8, "j appears in no input"),
    "n{i}->nn": (7, "n appears twice in the output"),
    "......{i}->{}": (3, "a second ellipsis in one operand"),
}


@pytest.mark.parametrize("spec", MALFORMED)
def test_an_einsum_that_cannot_be_read_is_shown_with_a_caret(spec):
    column, wrong = MALFORMED[spec]
    with pytest.raises(ValueError, match=r"^Malformed einsum specification") as caught:
        over_i(lambda v: jnp.einsum(spec, v))
    assert (
        str(caught.value) == f"Malformed einsum specification: {wrong}\n  {spec}\n  {' ' * column}^"
    )
    assert files_of(caught.value) == {__file__}


UNBOUND = {
    "psum": lambda v: lax.psum(v, "k"),
    "jnp.sum": lambda v: jnp.sum(v, axis="k"),
    "axis_index": lambda v: v * lax.axis_index("k"),
    "all_gather": lambda v: lax.all_gather(v, "k"),
    "ppermute": lambda v: lax.ppermute(v, "k", [(0, 1)]),
    "pshuffle": lambda v: lax.pshuffle(v, "k", [1, 0]),
    "all_to_all": lambda v: lax.all_to_all(v, "k", 0, 0),
    "pdot": lambda v: lax.pdot(v, v, "k"),
    "pargmax": lambda v: lax.pargmax(v, "k"),
    "pgather": lambda v: lax.pgather(v, jnp.array([0]), "k"),
    "along": lambda v: xnp.along(jnp.sort, "k", v),
    "psum of a constant": lambda v: lax.psum(1, "k") * v,
    "in a scan": lambda v: lax.scan(lambda c, _: (lax.psum(c, "k"), None), v, None, length=2)[0],
    "in a gradient": lambda v: jax.grad(lambda w: lax.psum(w, "k").sum())(v),
}


@pytest.mark.parametrize("call", UNBOUND.values(), ids=UNBOUND.keys())
def test_an_unbound_name_is_refused_in_the_same_words(call):
    with pytest.raises(NameError) as caught:
        over_i(call)
    assert str(caught.value) == (
        "Found an unbound axis name: k. Named axes in scope: i: 8. Name one of them, or add the axis to in_axes or "
        "axis_sizes"
    )


MORE_ARGUMENTS = {"quantile": (0.5,), "roll": (1,), "take": (np.zeros(1, int),)}


@pytest.mark.parametrize("name", [name for name in xnp.__all__ if name not in ("along", "einsum")])
def test_functions_of_arrays_refuse_an_unbound_name_in_the_same_words(name):
    call = lambda v: getattr(xnp, name)(v, *MORE_ARGUMENTS.get(name, ()), axis="k")
    unbound = "Found an unbound axis name: k. Named axes in scope: "
    for misuse, more in (
        (lambda: call(np.ones(3)), "none. Call it in a function for xmap"),
        (lambda: over_i(call), "i: 8. Name one of them, or add the axis to in_axes or axis_sizes"),
    ):
        with pytest.raises(NameError) as caught:
            misuse()
        assert str(caught.value) == unbound + more
