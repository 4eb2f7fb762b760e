"""xmap in plain JAX: `mapped(fun, in_axes, out_axes, ...)`, and collectives over its named axes.

`mapped` is a `jax.jit` of a `jax.shard_map` of nested `jax.vmap`s.  Each call takes the mesh of
`jax.set_mesh(mesh)` or `with mesh:`.  The other functions are JAX's of the same name.  While JAX
traces them, `axes_of` finds what executes an axis: its mesh axes, and the elements of a device,
which are an axis of `jax.vmap` with a name such as "batch over ('x', 'y')".  JAX caches what it
traces by the names that are bound, so this name must tell placements apart.  Under
`jax.vmap(axis_name=...)`, `jax.pmap` or `jax.shard_map` alone, a name means what it means in JAX.

JAX does not say:

- Its types (check_vma=True) refuse most collectives over several axes, and are off.  So gradients
  taken *outside* of a mapped function fail where a `custom_vjp` has a collective in a rule.
- A branch or loop that devices take or leave apart, with a collective over their axis inside,
  hangs.
- Over an axis that its operand lacks, a collective may reduce another axis on the same mesh axis.
"""

import functools
import math
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# A resource: a device computes an axis in so many chunks.
SerialLoop = namedtuple("SerialLoop", "length")
# An axis, the mesh axes that split it, its name for `jax.vmap`, and the chunks on a device.
Axis = namedtuple("Axis", "name across local chunks")
# {name for `jax.vmap`: Axis}, of those that all calls of `mapped` have entered under another name.
ENTERED: dict = {}


class _Spec(dict):
    """{name of an axis: its dimension} of an array.  For JAX, a dict is a pytree; this is a leaf."""


def mapped(
    fun, in_axes, out_axes, *, axis_sizes=None, axis_resources=None, undeclared=False, **options
):
    """A function of whole arrays, from `fun`, which computes one element along each axis.

      in_axes, out_axes: pytrees of specs, prefixes of the arguments and results.  A spec names
        dimensions: `["a", ...]` or `{0: "a"}`.  All elements share an array with the spec `[...]`
        or `{}`.
      axis_sizes: {name: size} of axes that no argument has.
      axis_resources: {name: mesh axis, SerialLoop, or a tuple of them}.
      options: options of `jax.jit`.

    The function raises ValueError if a result varies over a mesh axis and its spec names no axis
    that lies there; with `undeclared`, each device keeps its own element.  In the body of another
    one, each device computes its part.
    """
    given = _specs_of(in_axes)
    gives = _specs_of(out_axes)
    resources = axis_resources or {}

    def element(*args):
        results = fun(*args)
        return tuple(results) if type(gives) is tuple else results

    @functools.partial(jax.jit, **options)
    @functools.wraps(fun, updated=())
    def call(*args):
        sizes = dict(axis_sizes or {})
        _at_arrays(lambda spec, x: sizes.update(_sizes(spec, x)), given, args)
        axes = [_entered(name, resources) for name in sizes]
        axes.sort(key=lambda axis: axis.chunks == 1)
        device = functools.partial(_on_device, element, given, gives, axes, sizes)
        in_specs = jax.tree.map(functools.partial(_partition_spec, axes), given)
        out_specs = jax.tree.map(functools.partial(_partition_spec, axes), gives)

        def inside(*args):
            blocks = _at_arrays(_own_block, in_specs, args)
            return _at_arrays(_gathered, out_specs, device(*blocks))

        if all(_is_manual(axis.across) for axis in axes):
            return inside(*args)
        mesh = context_mesh()
        if not undeclared:
            _check_declared(inside, mesh, args)
        args = _at_arrays(
            lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)), in_specs, args
        )
        on_all = jax.shard_map(
            device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return on_all(*args)

    return call


def _specs_of(axes):
    """The pytree `axes`, with a `_Spec` for each list or dictionary that names dimensions."""

    def is_spec(x):
        entries = x.values() if isinstance(x, dict) else x
        is_container = type(x) in (dict, list, tuple)
        return is_container and jax.tree_util.all_leaves(e for e in entries if e is not None)

    def spec_of(x):
        entries = x.items() if isinstance(x, dict) else enumerate(x)
        return _Spec({name: k for k, name in entries if name not in (None, ...)})

    specs = jax.tree.map(spec_of, axes, is_leaf=is_spec)
    return tuple(specs) if type(specs) is list else specs


def _at_arrays(function, specs, *trees):
    """`function(spec, array, ...)` of each array of pytrees, of which `specs` is a prefix."""

    def at(spec, *parts):
        return jax.tree.map(functools.partial(function, spec), *parts)

    return jax.tree.map(at, specs, *trees)


def _sizes(spec, x):
    return {name: jnp.shape(x)[k] for name, k in spec.items()}


def _entered(name, resources):
    """An axis of a call.  Names that are bound around could not be told from it later."""
    entries = _entries(resources.get(name, ()))
    across = tuple(entry for entry in entries if not hasattr(entry, "length"))
    chunks = math.prod(entry.length for entry in entries if hasattr(entry, "length"))
    around = [local for local in ENTERED if ENTERED[local].name == name and is_bound(local)]
    around += [n for n in (name, *across) if is_bound(n) and not _is_manual((n,))]
    if around:
        raise ValueError(f"the axis {name!r} is mapped where {around[0]!r} is bound: rename one")
    local = name
    is_mesh_axis = is_bound(name) or any(name in _entries(of) for of in resources.values())
    if across or chunks > 1 or is_mesh_axis:
        local = f"{name} over {across}" + " in chunks" * (chunks > 1)
        ENTERED[local] = Axis(name, across, local, chunks)
    return Axis(name, across, local, chunks)


def _entries(resources):
    return tuple(resources) if type(resources) in (tuple, list) else (resources,)


def is_bound(axes):
    try:
        return lax.axis_size(axes) > 0
    except NameError:
        return False


def _is_manual(axes):
    """Whether these are mesh axes of a `jax.shard_map` around, which no `jax.vmap` binds again."""
    mesh = jax.sharding.get_abstract_mesh()
    known = [axis for axis in axes if axis in mesh.manual_axes]
    return len(known) == len(axes) and all(lax.axis_size(a) == mesh.shape[a] for a in known)


def context_mesh():
    """The mesh of `jax.set_mesh(mesh)`, or of `with mesh:`, which JAX does not show."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh
    with jax.ensure_compile_time_eval():
        return lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()).sharding.mesh


def _partition_spec(axes, spec):
    split = {spec[axis.name]: axis.across or None for axis in axes if axis.name in spec}
    dimensions = range(1 + np.max([-1, *split]))
    return PartitionSpec(*map(split.get, dimensions))


def _own_block(spec, x):
    """The block of this device, of an array that all devices have."""
    for k, axes in enumerate(spec):
        blocks = x.reshape(*x.shape[:k], lax.axis_size(axes or ()), -1, *x.shape[k + 1 :])
        x = lax.dynamic_index_in_dim(blocks, lax.axis_index(axes or ()), k, keepdims=False)
    return x


def _gathered(spec, x):
    """An array of which each device has a block, on all devices."""
    for k, axes in enumerate(spec):
        for name in reversed(axes or ()):
            x = lax.all_gather(x, name, axis=k, tiled=True)
    return x


def _check_declared(inside, mesh, args):
    """Refuse a result that differs between devices where its spec says that it does not."""
    for name in mesh.axis_names:
        inside = jax.vmap(inside, None, None, axis_name=name, axis_size=mesh.shape[name])
    manual = (AxisType.Manual,) * len(mesh.axis_names)
    manual_mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=manual)
    try:
        with jax.sharding.use_abstract_mesh(manual_mesh):
            jax.eval_shape(inside, *args)
    except Exception as error:  # The others are of what jax.vmap cannot do, and jax.shard_map can.
        if "mapped output" in str(error):
            raise ValueError(
                f"a result varies over a mesh axis of {mesh.axis_names}: name the axis in out_axes, "
                "or reduce over it"
            ) from error


def _on_device(fun, given, gives, axes, sizes, *args):
    """`fun` over the elements that a device has along each axis, of its blocks of the arguments."""
    for k in reversed(range(len(axes))):
        size = sizes[axes[k].name] // lax.axis_size(axes[k].across)
        fun = _over_axis(fun, axes[k], size, axes[:k], given, gives)
    return fun(*args)


def _over_axis(fun, axis, size, around, given, gives):
    """`fun` over one more axis, in arrays whose dimensions of the axes around are gone."""

    def dimension(spec):
        if axis.name not in spec:
            return None
        before = [a for a in around if spec.get(a.name, math.inf) < spec[axis.name]]
        return spec[axis.name] - len(before)

    length = size // axis.chunks
    over = functools.partial(jax.vmap, axis_name=axis.local, axis_size=length)
    in_axes = jax.tree.map(dimension, given)
    out_axes = jax.tree.map(dimension, gives)
    if axis.chunks == 1 and not (axis.across and size == 1):
        return over(fun, in_axes, out_axes)

    def one(spec, x):
        return x if dimension(spec) is None else jnp.squeeze(x, dimension(spec))

    def over_one(*args):
        return over(fun, None, out_axes)(*_at_arrays(one, given, args))

    def joined(spec, x):
        k = dimension(spec)
        if k is None:
            return x[0]
        x = jnp.moveaxis(x, 0, k)
        return x.reshape(*x.shape[:k], size, *x.shape[k + 2 :])

    def in_chunks(*args):
        def chunk(start):
            def part(spec, x):
                k = dimension(spec)
                return x if k is None else lax.dynamic_slice_in_dim(x, start, length, k)

            return over(fun, in_axes, out_axes)(*_at_arrays(part, given, args))

        return _at_arrays(joined, gives, lax.map(chunk, jnp.arange(0, size, length)))

    return in_chunks if axis.chunks > 1 else over_one


def axes_of(names):
    """What executes a named axis, or several, if a `mapped` around binds them; or the name itself.

    Positions stay, and None.
    """
    if isinstance(names, (tuple, list)):
        parts = []
        for name in names:
            found = axes_of(name)
            parts += found if isinstance(found, tuple) else (found,)
        return tuple(parts)
    if names is None or isinstance(names, int):
        return names
    inside = [axis for axis in filter(is_bound, ENTERED) if ENTERED[axis].name == names]
    # The innermost binder wins, as in JAX: perhaps a `jax.vmap` in the body.
    is_inner = is_bound(names) and not _is_manual((names,))
    if not inside or is_inner:
        if _is_late(names) or not is_bound(names):
            raise NameError(
                f"unbound axis name: {names}.  If this is a rule of a jax.custom_vjp: JAX traces "
                "it after the mapped function, as the gradient is taken outside.  Take the "
                "gradient inside, or take the collective out of the rule"
            )
        return names
    axis = ENTERED[inside[0]]
    if axis.chunks > 1:
        raise ValueError(f"a collective over {names!r}, which a SerialLoop computes in chunks")
    if not _is_manual(axis.across):
        raise ValueError(f"{names!r} lies on {axis.across}, which a jax.vmap binds here: rename it")
    is_one = lax.axis_size(axis.local) == 1
    return axis.across if is_one and axis.across else (*axis.across, axis.local)


def _is_late(name):
    """Whether this may be a rule that JAX traces after the mapped function: a mesh, and no axis."""
    split = [axis.across for axis in ENTERED.values() if axis.name == name and axis.across]
    return any(map(_is_manual, split)) and not any(map(is_bound, ENTERED))


def psum(x, axis_name, **options):
    return lax.psum(x, axes_of(axis_name), **options)


def pmean(x, axis_name, **options):
    return lax.pmean(x, axes_of(axis_name), **options)


def axis_index(axis_name):
    return lax.axis_index(axes_of(axis_name))


def axis_size(axis_name):
    return lax.axis_size(axes_of(axis_name))


def sum(a, axis=None, **options):
    return jnp.sum(a, axes_of(axis), **options)


def mean(a, axis=None, **options):
    return jnp.mean(a, axes_of(axis), **options)


def var(a, axis=None, **options):
    return jnp.var(a, axes_of(axis), **options)


def std(a, axis=None, **options):
    return jnp.std(a, axes_of(axis), **options)


def one_hot(x, num_classes, *, axis=-1, **options):
    return jax.nn.one_hot(x, num_classes, axis=axes_of(axis), **options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extremum(x, axes, keepdims, largest):
    """jnp.max or jnp.min.  Of several devices, XLA may lose NaN."""
    is_nan = jnp.sum(jnp.isnan(x), axes, keepdims=keepdims) > 0
    return jnp.where(is_nan, jnp.nan, largest(x, axes, keepdims=keepdims))


@_extremum.defjvp
def _derivative(axes, keepdims, largest, primals, tangents):
    """Ties share it.  JAX has no derivative of lax.pmax."""
    ties = (primals[0] == _extremum(*primals, axes, True, largest)) * 1.0
    total = jnp.sum(ties * tangents[0], axes, keepdims=keepdims)
    derivative = total / jnp.sum(ties, axes, keepdims=keepdims)
    found = _extremum(*primals, axes, keepdims, largest)
    return found, derivative.astype(found.dtype)


def max(a, axis=None, *, keepdims=False, largest=jnp.max):
    if jnp.issubdtype(jnp.result_type(a), jnp.inexact):
        return _extremum(a, axes_of(axis), keepdims, largest)
    return largest(a, axes_of(axis), keepdims=keepdims)


def min(a, axis=None, *, keepdims=False):
    return max(a, axis, keepdims=keepdims, largest=jnp.min)


def pmax(x, axis_name):
    return jax.tree.map(lambda leaf: max(leaf, axes_of((axis_name,))), x)


def pmin(x, axis_name):
    return jax.tree.map(lambda leaf: min(leaf, axes_of((axis_name,))), x)


def _shifted(x, axes):
    """An array minus its largest element, and that as a constant."""
    top = max(lax.stop_gradient(x), axes, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return x - top, top


def logsumexp(a, axis=None, *, keepdims=False):
    shifted, top = _shifted(a, axis)
    total = sum(jnp.exp(shifted), axis, keepdims=keepdims)
    return jnp.log(total) + top.reshape(total.shape)


def softmax(x, axis=-1):
    weights = jnp.exp(_shifted(x, axis)[0])
    return weights / sum(weights, axis, keepdims=True)


def log_softmax(x, axis=-1):
    shifted = _shifted(x, axis)[0]
    return shifted - jnp.log(sum(jnp.exp(shifted), axis, keepdims=True))


def _split(axis_name):
    """What executes an axis: mesh axes, in the order of the mesh, and axes of `jax.vmap`."""
    axes = axes_of((axis_name,))
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    across = tuple(axis for axis in mesh_axes if axis in axes and _is_manual((axis,)))
    return axes, across, tuple(axis for axis in axes if axis not in across)


def _of_trees(collective):
    """A collective of arrays as one of pytrees.  Over mesh axes alone it is that of JAX."""

    @functools.wraps(collective)
    def call(x, axis_name, *args, **options):
        axes, _, local = _split(axis_name)
        if not local or "axis_index_groups" in options:
            return getattr(lax, collective.__name__)(x, axes, *args, **options)
        return jax.tree.map(lambda leaf: collective(leaf, axes, *args, **options), x)

    return call


def _elements(x, axes):
    """An array with a first dimension for each axis.  Over one of `jax.vmap`, no data moves."""
    for name in reversed(axes):
        x = lax.all_gather(x, name)
    return x


@_of_trees
def all_gather(x, axes, *, axis=0, tiled=False):
    elements = _elements(x, axes).reshape(-1, *jnp.shape(x))
    return jnp.concatenate(elements, axis) if tiled else jnp.moveaxis(elements, 0, axis)


def _parts(x, axes, dimension):
    """An array with first dimensions for axes, instead of one that counts parts for elements."""
    x = jnp.moveaxis(x, dimension, 0)
    sizes = map(lax.axis_size, axes)
    return x.reshape(*sizes, x.shape[0] // lax.axis_size(axes), *x.shape[1:])


@_of_trees
def psum_scatter(x, axes, *, scatter_dimension=0, tiled=False):
    x = _parts(x, axes, scatter_dimension)
    for k in reversed(range(len(axes))):
        x = lax.psum_scatter(x, axes[k], scatter_dimension=k, tiled=True)
    x = x.reshape(x.shape[len(axes) :])
    return jnp.moveaxis(x, 0, scatter_dimension) if tiled else x.squeeze(0)


@_of_trees
def all_to_all(x, axes, split_axis, concat_axis, *, tiled=False):
    x = _parts(x, axes, split_axis)
    for k, name in enumerate(axes):
        x = lax.all_to_all(x, name, k, k)
    x = x.reshape(-1, *x.shape[len(axes) :])
    if tiled:
        return jnp.concatenate(jnp.moveaxis(x, 1, split_axis + 1), concat_axis)
    return jnp.moveaxis(x.squeeze(1), 0, concat_axis)


def pswapaxes(x, axis_name, axis):
    return all_to_all(x, axis_name, axis, axis)


def ppermute(x, axis_name, perm):
    """lax.ppermute; for each distance between devices, it sends the elements that change device."""
    axes, across, local = _split(axis_name)
    order = [axes.index(axis) for axis in (*across, *local)]
    elements = np.arange(lax.axis_size(axes)).reshape(*map(lax.axis_size, axes))
    places = np.argsort(elements.transpose(order).reshape(-1))
    moves = [(places[source], places[target]) for source, target in perm]
    if not local:
        return lax.ppermute(x, across, moves)
    devices = lax.axis_size(across)
    slots = lax.axis_size(local)

    def distance(source, target):
        return (target // slots - source // slots) % devices

    def moved(x):
        block = _elements(x, local).reshape(slots, *jnp.shape(x))
        pieces = [jnp.zeros_like(block[:1])]
        rows = {}
        for far in {distance(*move) for move in moves}:
            sent = sorted({move[0] % slots for move in moves if distance(*move) == far})
            for slot in sent:
                rows[far, slot] = len(rows) + 1
            piece = block[np.array(sent)]
            if far:
                ring = [(k, (k + far) % devices) for k in range(devices)]
                piece = lax.ppermute(piece, across, ring)
            pieces.append(piece)
        table = np.zeros(devices * slots, int)
        for source, target in moves:
            table[target] = rows[distance(source, target), source % slots]
        here = lax.axis_index(across) * slots + lax.axis_index(local)
        return jnp.concatenate(pieces)[jnp.array(table)[here]]

    return jax.tree.map(moved, x)


def pshuffle(x, axis_name, perm):
    return ppermute(x, axis_name, [*zip(perm, range(len(perm)))])


def pdot(
    x,
    y,
    axis_name,
    pos_contract=((), ()),
    pos_batch=((), ()),
    precision=None,
    preferred_element_type=None,
):
    """lax.dot_general that contracts named axes too: one dot, and one sum over the mesh."""
    _, across, local = _split(axis_name)
    dtype = jnp.result_type(x, y)
    operands = []
    contract = []
    batch = []
    for k, z in enumerate((x, y)):
        dims = range(len(local), len(local) + jnp.ndim(z))
        operands.append(_elements(jnp.asarray(z, dtype), local))
        contract.append([*range(len(local)), *(dims[d] for d in pos_contract[k])])
        batch.append([dims[d] for d in pos_batch[k]])
    product = lax.dot_general(*operands, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across) if across else product
