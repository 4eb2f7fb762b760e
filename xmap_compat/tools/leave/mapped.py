"""xmap in plain JAX: `mapped(fun, in_axes, out_axes, ...)` is a `jax.jit` of a `jax.shard_map` of
nested `jax.vmap`s.

Each call takes the mesh of `jax.set_mesh(mesh)` or `with mesh:`.  A collective in `fun` names what
executes its axis `a`: "a" without resources; ("x", "a_local") with the resource "x", the mesh axis
and then a device's elements along `a`; ("x", "y", "a_local") with ("x", "y").  Over a SerialLoop(n)
there are no collectives.  JAX does not say:

- Its types (check_vma=True) refuse most collectives over a pair, and are off.  So gradients taken
  *outside* of the mapped function are wrong where a `custom_vjp` has a collective in a rule: take
  it out of the rule.
- A branch or loop that devices take or leave apart, with a collective over their axis inside,
hangs.
- "x" alone reduces only a part, and over an axis that its operand lacks a collective may reduce
another, silently.
"""

import functools
import math
from collections import namedtuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

SerialLoop = namedtuple(
    "SerialLoop", "length"
)  # a resource: a device computes an axis in so many chunks
Axis = namedtuple(
    "Axis", "name across local chunks"
)  # mesh axes that split an axis, its elements on a device, chunks
# {name of an axis: what executes it, in each way for which collectives are written}
AXES: dict = {}


class _Spec(dict):
    """{name of an axis: its dimension} of an array.  For JAX a dict is a pytree, and this class is
    a leaf of one.
    """


def mapped(
    fun, in_axes, out_axes, *, axis_sizes=None, axis_resources=None, undeclared=False, **options
):
    """A function of whole arrays, with options of `jax.jit`, from `fun`, which computes one element
    along each axis.

      in_axes, out_axes: pytrees of specs, prefixes of the arguments and results.  A spec names
        dimensions: `["a", ...]` or `{0: "a"}`.  All elements share an array with the spec `[...]`
        or `{}`.
      axis_sizes, axis_resources: {name: size} of axes that no argument has; {name: mesh axis,
      SerialLoop, or both}.

    The function raises ValueError if a result varies over a mesh axis and its spec names no axis
    that lies there; with `undeclared`, each device keeps its own element.  In the body of another
    one, each device computes its part.
    """
    given, gives, sizes, axes = _specs_of(in_axes), _specs_of(out_axes), dict(axis_sizes or {}), []
    for name in dict.fromkeys(
        [*(name for spec in jax.tree.leaves(given) for name in spec), *sizes]
    ):
        entries = (axis_resources or {}).get(name, ())
        entries = entries if type(entries) in (tuple, list) else (entries,)
        across = tuple(entry for entry in entries if not hasattr(entry, "length"))
        ways = AXES.get(
            name,
            [(*across, f"{name}_local") if across else (name,)] * (not AXES or name not in across),
        )
        if not (
            local := [way[-1] for way in ways if way[:-1] == across]
        ):  # collectives might reduce a part, silently
            raise ValueError(
                f"collectives over {name!r} are written for {ways or (name,)}, not for mesh axes {across}"
            )
        axes.append(
            Axis(
                name, across, local[0], math.prod(e.length for e in entries if hasattr(e, "length"))
            )
        )
    axes.sort(
        key=lambda axis: axis.chunks == 1
    )  # outermost first: those with chunks are around the others
    element = (
        fun if type(gives) is not tuple else lambda *args: tuple(fun(*args))
    )  # which may return a list
    device = functools.partial(_on_device, element, given, gives, axes, sizes)
    in_specs, out_specs = (
        jax.tree.map(functools.partial(_partition_spec, axes), specs) for specs in (given, gives)
    )

    @functools.partial(jax.jit, **options)
    @functools.wraps(fun, updated=())
    def call(*args):
        across = tuple(dict.fromkeys(name for axis in axes for name in axis.across))
        if is_bound(across):
            return _at_arrays(_gathered, out_specs, device(*_at_arrays(_own_part, in_specs, args)))
        mesh = of_all if (of_all := jax.sharding.get_abstract_mesh()).axis_names else context_mesh()
        args = _at_arrays(
            lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)), in_specs, args
        )
        if not undeclared:
            _check_declared(device, axes, mesh, across, given, gives, args)
        return jax.shard_map(
            device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*args)

    return call


def _partition_spec(axes, spec):
    split = {spec[axis.name]: axis.across or None for axis in axes if axis.name in spec}
    return PartitionSpec(*(split.get(k) for k in range(max(split, default=-1) + 1)))


def is_bound(axes):
    try:
        return lax.axis_size(axes) > 0
    except NameError:
        return False


def _own_part(spec, x):
    """The block of this device, of an array that all devices have."""
    for k, axes in enumerate(spec):
        size = jnp.shape(x)[k] // lax.axis_size(axes or ())
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, k) if axes else x
    return x


def _gathered(spec, x):
    """An array of which each device has a block, on all devices."""
    for k, axes in enumerate(spec):
        x = lax.all_gather(x, axes, axis=k, tiled=True) if axes else x
    return x


def _on_device(fun, given, gives, axes, axis_sizes, *args):
    """What a device computes of its blocks of the arguments: `fun` over the elements that it has
    along each axis.
    """

    def dimensions(spec):
        return [spec[axis.name] for axis in axes if axis.name in spec], range(len(spec))

    sizes = {axis.name: axis_sizes.get(axis.name, 0) // lax.axis_size(axis.across) for axis in axes}
    _at_arrays(
        lambda spec, x: sizes.update((name, jnp.shape(x)[k]) for name, k in spec.items()),
        given,
        args,
    )
    for axis in reversed(axes):
        fun = _over_axis(fun, axis, sizes[axis.name], given, gives)
    args = _at_arrays(lambda spec, x: jnp.moveaxis(x, *dimensions(spec)), given, args)
    return _at_arrays(
        lambda spec, x: jnp.moveaxis(x, *reversed(dimensions(spec))), gives, fun(*args)
    )


def _over_axis(fun, axis, size, given, gives):
    """`fun` over one more axis, which is the first dimension of the arrays that have it."""
    name, across, local, chunks = axis
    first = [
        jax.tree.map(lambda spec: 0 if name in spec else None, specs) for specs in (given, gives)
    ]
    vmapped = jax.vmap(
        fun, *first, axis_name=local if chunks == 1 else None, axis_size=size // chunks
    )

    def one_element(*args):
        args = _at_arrays(lambda spec, x: jnp.squeeze(x, 0) if name in spec else x, given, args)
        results = jax.vmap(lambda: fun(*args), axis_name=local, axis_size=1)()
        return _at_arrays(lambda spec, x: x if name in spec else x[0], gives, results)

    def in_chunks(*args):
        def part(spec, x):
            return (
                x.reshape(chunks, size // chunks, *x.shape[1:])
                if name in spec
                else jnp.arange(chunks)
            )

        def chunk(parts):
            return vmapped(
                *_at_arrays(lambda spec, part, x: part if name in spec else x, given, parts, args)
            )

        results = lax.map(chunk, _at_arrays(part, given, args))
        return _at_arrays(
            lambda spec, x: x.reshape(size, *x.shape[2:]) if name in spec else x[0], gives, results
        )

    return in_chunks if chunks > 1 else one_element if across and size == 1 else vmapped


def _check_declared(device, axes, mesh, across, given, gives, args):
    """Refuse a result that differs between devices where its spec says that it does not: `jax.vmap`
    of blocks tells.
    """

    def blocks(spec, x):
        split = {name for axis in axes if axis.name in spec for name in axis.across}
        block = NamedSharding(mesh, _partition_spec(axes, spec)).shard_shape(jnp.shape(x))
        return jax.ShapeDtypeStruct(
            (*(mesh.shape[m] for m in across if m in split), *block), jnp.result_type(x)
        )

    for name in reversed(across):
        there = {axis.name for axis in axes if name in axis.across}
        first = [
            jax.tree.map(lambda spec, there=there: 0 if there & {*spec} else None, s)
            for s in (given, gives)
        ]
        device = jax.vmap(device, *first, axis_name=name, axis_size=mesh.shape[name])
    try:
        jax.eval_shape(device, *_at_arrays(blocks, given, args))
    except Exception as error:  # others are of what jax.vmap cannot do, and shard_map can
        if "mapped output" in str(error):
            raise ValueError(
                f"a result varies over {across}: name the axis in out_axes, or reduce over it"
            ) from error


def _specs_of(axes):
    """The pytree `axes`, with a `_Spec` in the place of each list or dictionary that stands for
    arrays.
    """

    def is_spec(x):
        entries = x.values() if isinstance(x, dict) else x
        return type(x) in (dict, list, tuple) and jax.tree_util.all_leaves(
            e for e in entries if e is not None
        )

    def spec_of(x):
        named = x.items() if isinstance(x, dict) else enumerate(x)
        return _Spec({name: k for k, name in named if name is not None and name is not ...})

    specs = jax.tree.map(spec_of, axes, is_leaf=is_spec)
    return tuple(specs) if type(specs) is list else specs


def _at_arrays(function, specs, *trees):
    """`function(spec, array, ...)` of each array of pytrees, of which `specs` is a prefix."""
    return jax.tree.map(
        lambda spec, *parts: jax.tree.map(functools.partial(function, spec), *parts), specs, *trees
    )


def context_mesh():
    """The mesh of `jax.set_mesh(mesh)`, or of `with mesh:`, which `jax.sharding.get_mesh()` does
    not see.
    """
    inside = jax.sharding.get_abstract_mesh()  # of a function that is mapped
    if inside.axis_names and is_bound(inside.axis_names):
        return inside
    with jax.ensure_compile_time_eval():
        return lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()).sharding.mesh
