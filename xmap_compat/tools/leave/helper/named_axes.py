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

import math
from collections import namedtuple
from functools import partial, wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

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

    def element(*args):
        results = fun(*args)
        return tuple(results) if type(gives) is tuple else results

    @partial(jax.jit, **options)
    @wraps(fun, updated=())
    def call(*args):
        sizes = dict(axis_sizes or {})
        _at_arrays(partial(_note_sizes, sizes), given, args)
        axes = _entered(sizes, axis_resources or {})
        in_specs = tree.map(partial(_partition_spec, axes), given)
        out_specs = tree.map(partial(_partition_spec, axes), gives)

        def on_device(*blocks):
            return _over(axes, element, given, gives, sizes)(*blocks)

        def inside(*args):
            blocks = _at_arrays(_own_block, in_specs, args)
            return _at_arrays(_gathered, out_specs, on_device(*blocks))

        if all(_is_manual(axis.across) for axis in axes):
            return inside(*args)
        mesh = context_mesh()
        if not undeclared:
            _check_declared(inside, mesh, args)
        args = _at_arrays(partial(_placed, mesh), in_specs, args)
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*args)

    @wraps(call)
    def moved(*args):
        try:
            return call(*args)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            everywhere = NamedSharding(_concrete_mesh(), PartitionSpec())
            return call(*jax.device_put(args, everywhere))

    # A function of jax.jit can be lowered, and so can this one.
    vars(moved)["lower"] = call.lower
    return moved


def _specs_of(axes):
    """The pytree `axes`, with a `_Spec` for each list or dictionary that names dimensions."""

    def entries(x):
        return x if isinstance(x, dict) else dict(enumerate(x))

    def is_spec(x):
        if type(x) not in (dict, list, tuple):
            return False
        return jax.tree_util.all_leaves(e for e in entries(x).values() if e is not None)

    def spec_of(x):
        return _Spec({e: k for k, e in entries(x).items() if e not in (None, ...)})

    specs = tree.map(spec_of, axes, is_leaf=is_spec)
    return tuple(specs) if isinstance(specs, list) else specs


def _at_arrays(function, specs, *trees):
    """`function(spec, array, ...)` of each array of pytrees, of which `specs` is a prefix."""

    def at(spec, *parts):
        return tree.map(partial(function, spec), *parts)

    return tree.map(at, specs, *trees)


def _note_sizes(sizes, spec, x):
    for name, k in spec.items():
        sizes[name] = jnp.shape(x)[k]


def _entered(names, resources):
    """The axes of a call."""
    mesh_axes = [*get_abstract_mesh().manual_axes]
    for entries in resources.values():
        mesh_axes += _tuple(entries)
    axes = []
    for name in names:
        entries = _tuple(resources.get(name, ()))
        across = tuple(entry for entry in entries if not hasattr(entry, "length"))
        chunks = math.prod(getattr(entry, "length", 1) for entry in entries)
        _check_free(name, across)
        axis = Axis(name, across, name, chunks)
        if across or chunks > 1 or name in mesh_axes:
            local = f"{name} over {across}" + " in chunks" * (chunks > 1)
            axis = axis._replace(local=local)
            ENTERED[local] = axis
        axes.append(axis)
    return axes


def _check_free(name, across):
    """Refuse what is bound around: collectives could not tell later which of the two is meant."""
    bound = _bound_locals(name)
    bound += [n for n in (name, *across) if is_bound(n) and not _is_manual([n])]
    if bound:
        raise ValueError(f"the axis {name!r} is mapped where {bound[0]!r} is bound: rename one")


def _bound_locals(name):
    return [local for local in ENTERED if ENTERED[local].name == name and is_bound(local)]


def _tuple(x):
    return tuple(x) if type(x) in (tuple, list) else (x,)


def is_bound(name):
    try:
        return lax.axis_size(name) > 0
    except NameError:
        return False


def _is_manual(axes):
    """Whether these are mesh axes of a `jax.shard_map` around, which no `jax.vmap` binds again."""
    mesh = get_abstract_mesh()
    return all(a in mesh.manual_axes and lax.axis_size(a) == mesh.shape[a] for a in axes)


def context_mesh():
    """The mesh of `jax.set_mesh(mesh)`, or of `with mesh:`, which JAX does not show."""
    mesh = get_abstract_mesh()
    return mesh if mesh.axis_names else _concrete_mesh()


def _concrete_mesh():
    with jax.ensure_compile_time_eval():
        return lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()).sharding.mesh


def _partition_spec(axes, spec):
    entries = [None] * (1 + np.max([-1, *spec.values()]))
    for axis in axes:
        if axis.across and axis.name in spec:
            entries[spec[axis.name]] = axis.across
    return PartitionSpec(*entries)


def _placed(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def _own_block(spec, x):
    """The block of this device, of an array that all devices have."""
    for k, axes in enumerate(spec):
        for name in axes or ():
            x = _own_part(x, name, k)
    return x


def _own_part(x, name, k):
    size = x.shape[k] // lax.axis_size(name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * size, size, k)


def _gathered(spec, x):
    """An array of which each device has a block, on all devices."""
    for k, axes in enumerate(spec):
        for name in reversed(axes or ()):
            x = lax.all_gather(x, name, axis=k, tiled=True)
    return x


def _check_declared(inside, mesh, args):
    """Refuse a result that differs between devices where its spec says that it does not."""
    names = mesh.axis_names
    for name in names:
        inside = jax.vmap(inside, None, None, axis_name=name, axis_size=mesh.shape[name])
    manual = (AxisType.Manual,) * len(names)
    manual_mesh = AbstractMesh(mesh.axis_sizes, names, axis_types=manual)
    try:
        with jax.sharding.use_abstract_mesh(manual_mesh):
            jax.eval_shape(inside, *args)
    except Exception as error:  # The others are of what jax.vmap cannot do, and jax.shard_map can.
        if "mapped output" in str(error):
            raise ValueError(
                f"a result varies over {names}: name the axis in out_axes, or reduce over it"
            ) from error


def _over(axes, fun, given, gives, sizes):
    """`fun` over the elements that a device has along axes, the outermost first."""
    if not axes:
        return fun
    axis, *others = axes
    size = sizes[axis.name] // lax.axis_size(axis.across)
    length = size // axis.chunks
    in_axes = tree.map(lambda spec: spec.get(axis.name), given)
    out_axes = tree.map(lambda spec: spec.get(axis.name), gives)
    given_inside = tree.map(partial(_without, axis.name), given)
    gives_inside = tree.map(partial(_without, axis.name), gives)
    fun = _over(others, fun, given_inside, gives_inside, sizes)
    over = partial(jax.vmap, fun, axis_name=axis.local, axis_size=length)

    def parts(function, args):
        """What a function gives of arrays that have the axis, and its dimension."""

        def part(spec, x):
            return function(x, spec[axis.name]) if axis.name in spec else x

        return _at_arrays(part, given, args)

    def over_one(*args):
        return over(None, out_axes)(*parts(jnp.squeeze, args))

    def in_chunks(*args):
        def chunk(start):
            def of_chunk(x, k):
                return lax.dynamic_slice_in_dim(x, start, length, k)

            return over(in_axes, out_axes)(*parts(of_chunk, args))

        def joined(spec, x):
            return jnp.concatenate(x, spec[axis.name]) if axis.name in spec else x[0]

        return _at_arrays(joined, gives, lax.map(chunk, jnp.arange(0, size, length)))

    if axis.chunks > 1:
        return in_chunks
    return over_one if axis.across and size == 1 else over(in_axes, out_axes)


def _without(name, spec):
    """The spec of arrays that have lost the dimension of an axis."""
    lost = spec.get(name, math.inf)
    return _Spec({n: k - (k > lost) for n, k in spec.items() if n != name})


def axes_of(names):
    """What executes a named axis, or several, if a `mapped` around binds them; or the name itself.

    Positions stay, and None.
    """
    if isinstance(names, (tuple, list)):
        parts = []
        for name in names:
            parts += _tuple(axes_of(name))
        return tuple(parts)
    if names is None or isinstance(names, int):
        return names
    bound = _bound_locals(names)
    # The innermost binder wins, as in JAX: perhaps a `jax.vmap` in the body.
    is_inner = is_bound(names) and not _is_manual([names])
    if not bound or is_inner:
        _check_not_late(names)
        return names
    axis = ENTERED[bound[0]]
    if axis.chunks > 1:
        raise ValueError(f"a collective over {names!r}, which a SerialLoop computes in chunks")
    if not _is_manual(axis.across):
        raise ValueError(f"{names!r} lies on {axis.across}, which a jax.vmap binds here: rename it")
    is_one = axis.across and lax.axis_size(axis.local) == 1
    return axis.across if is_one else (*axis.across, axis.local)


def _check_not_late(name):
    """Refuse what may be a rule that JAX traces after the mapped function: a mesh, and no axis."""
    if any(map(is_bound, ENTERED)):
        return
    for axis in ENTERED.values():
        if axis.name == name and axis.across and _is_manual(axis.across):
            raise NameError(
                f"unbound axis name: {name}.  In a rule of a jax.custom_vjp, take the gradient "
                "inside of the mapped function, or the collective out of the rule: JAX traces "
                "the rule later.  In another jax.shard_map, rename the axis"
            )


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


def max(a, axis=None, *, keepdims=False, extremum=jnp.max):
    axes = axes_of(axis)
    top = extremum(lax.stop_gradient(a), axes, keepdims=True)
    # lax.pmax has no derivative: ties share it.  And over several devices, XLA may lose NaN.
    ties = (a == top) | (a != a)
    finite = jnp.where(jnp.isinf(a), 0, a) * 1.0
    changes = jnp.where(ties, finite - lax.stop_gradient(finite), 0)
    change = jnp.sum(changes, axes, keepdims=keepdims) / jnp.sum(ties, axes, keepdims=keepdims)
    return top.reshape(change.shape) + change.astype(top.dtype)


def min(a, axis=None, *, keepdims=False):
    return max(a, axis, keepdims=keepdims, extremum=jnp.min)


def pmax(x, axis_name):
    return tree.map(lambda leaf: max(leaf, _tuple(axis_name)), x)


def pmin(x, axis_name):
    return tree.map(lambda leaf: min(leaf, _tuple(axis_name)), x)


def _exponentials(x, axis, keepdims=True):
    """Of an array minus its largest element: that array, the sum of exponentials, that element."""
    axes = axes_of(axis)
    top = jnp.max(lax.stop_gradient(x), axes, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    shifted = x - top
    return shifted, jnp.sum(jnp.exp(shifted), axes, keepdims=keepdims), top


def logsumexp(a, axis=None, *, keepdims=False):
    _, total, top = _exponentials(a, axis, keepdims)
    return jnp.log(total) + top.reshape(total.shape)


def softmax(x, axis=-1):
    shifted, total, _ = _exponentials(x, axis)
    return jnp.exp(shifted) / total


def log_softmax(x, axis=-1):
    shifted, total, _ = _exponentials(x, axis)
    return shifted - jnp.log(total)


def _of_trees(collective):
    """A collective of arrays as one of pytrees.  The parts of axes come one after the other."""

    @wraps(collective)
    def call(x, axis_name, *args, **options):
        axes = axes_of(_tuple(axis_name))
        return tree.map(lambda leaf: collective(leaf, axes, *args, **options), x)

    return call


@_of_trees
def all_gather(x, axes, *, axis=0, tiled=False, **options):
    x = x if tiled else jnp.expand_dims(x, axis)
    for name in reversed(axes):
        x = lax.all_gather(x, name, axis=axis, tiled=True, **options)
    return x


@_of_trees
def psum_scatter(x, axes, *, scatter_dimension=0, tiled=False, **options):
    k = scatter_dimension
    local = [name for name in axes if not _is_manual([name])]
    x = lax.psum(x, local)
    for name in axes:
        if name in local:
            x = _own_part(x, name, k)
        else:
            x = lax.psum_scatter(x, name, scatter_dimension=k, tiled=True, **options)
    return x if tiled else jnp.squeeze(x, k)


@_of_trees
def all_to_all(x, axes, split_axis, concat_axis, *, tiled=False):
    x = jnp.moveaxis(x, split_axis, 0)
    x = x.reshape(*map(lax.axis_size, axes), -1, *x.shape[1:])
    for k, name in enumerate(axes):
        x = lax.all_to_all(x, name, k, k)
    x = x.reshape(-1, *x.shape[len(axes) :])
    if not tiled:
        return jnp.moveaxis(x.squeeze(1), 0, concat_axis)
    return jnp.concatenate(jnp.moveaxis(x, 1, split_axis + 1), concat_axis)


def pswapaxes(x, axis_name, axis):
    return all_to_all(x, axis_name, axis, axis)


def _split(axis_name):
    """What executes an axis: all, mesh axes in the order of the mesh, and axes of `jax.vmap`."""
    axes = axes_of(_tuple(axis_name))
    mesh_axes = get_abstract_mesh().axis_names
    across = tuple(name for name in mesh_axes if name in axes and _is_manual([name]))
    return axes, across, tuple(name for name in axes if name not in across)


def _elements(x, local):
    """An array with a first dimension for each axis of `jax.vmap`: no data moves."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def ppermute(x, axis_name, perm):
    """lax.ppermute: for each distance between devices, it sends the elements that go so far."""
    axes, across, local = _split(axis_name)
    sizes = [*map(lax.axis_size, axes)]
    order = [axes.index(name) for name in (*across, *local)]
    elements = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    place = np.argsort(elements.reshape(-1))
    moves = place[np.array(perm, int).reshape(-1, 2)]
    if not local:
        return lax.ppermute(x, across, moves.tolist())
    devices = lax.axis_size(across)
    slots = lax.axis_size(local)
    device, slot = np.divmod(moves, slots)
    distances = (device[:, 1] - device[:, 0]) % devices

    def moved(x):
        block = _elements(x, local).reshape(slots, *jnp.shape(x))
        result = jnp.zeros_like(x)
        for distance in np.unique(distances):
            far = distances == distance
            sent = np.unique(slot[far, 0])
            came = block[sent]
            if distance:
                ring = [(k, (k + distance) % devices) for k in range(devices)]
                came = lax.ppermute(came, across, ring)
            table = np.full(place.size, -1)
            table[moves[far, 1]] = np.searchsorted(sent, slot[far, 0])
            row = jnp.array(table)[lax.axis_index((*across, *local))]
            result = jnp.where(row < 0, result, came[row])
        return result

    return tree.map(moved, x)


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
    operands = []
    contract = []
    batch = []
    for k, z in enumerate((x, y)):
        dimensions = range(len(local), len(local) + jnp.ndim(z))
        operands.append(_elements(jnp.asarray(z, jnp.result_type(x, y)), local))
        contract.append([*range(len(local)), *(dimensions[d] for d in pos_contract[k])])
        batch.append([dimensions[d] for d in pos_batch[k]])
    product = lax.dot_general(*operands, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across)
