"""xmap in plain JAX: `mapped(fun, in_axes, out_axes, ...)`, and collectives over its named axes.

`mapped` is a `jax.jit` of a `jax.shard_map` of nested `jax.vmap`s.  Each call takes the mesh of
`jax.set_mesh(mesh)` or `with mesh:`.  The other functions are JAX's of the same name.  While JAX
traces them, `axes_of` finds what executes an axis: its mesh axes, and the elements of a device,
which are an axis of `jax.vmap` with a name such as "batch over ('x', 'y')".  JAX caches what it
traces by the names that are bound, so this name must tell placements apart.  Under
`jax.vmap(axis_name=...)`, `jax.pmap` or `jax.shard_map` alone, a name means what it means in JAX.

Limits:

- JAX's types (check_vma=True) refuse most collectives over several axes, so they are off.
  Therefore gradients taken *outside* of a mapped function fail where a `custom_vjp` has a
  collective in a rule.
- JAX does not report it if some devices take a branch, or stay in a loop, and others do not, and a
  collective over their axis is inside: the program hangs.
- JAX does not report it if an operand lacks the axis of a collective: the collective may then
  reduce another axis on the same mesh axis.
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

# The axes that calls of `mapped` have entered under another name than the user's, by that name.
# None is ever removed: `is_bound` says which are in scope.
ENTERED = dict[str, Axis]()


class _Spec(dict):
    """{name of an axis: its dimension} of an array.  For JAX, this is a leaf."""


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
    arg_specs = _specs_of(in_axes)
    result_specs = _specs_of(out_axes)

    def element(*args):
        results = fun(*args)
        return tuple(results) if type(result_specs) is tuple else results

    @partial(jax.jit, **options)
    @wraps(fun, updated=())
    def call(*args):
        sizes = dict(axis_sizes or {})
        _at_arrays(partial(_note_sizes, sizes), arg_specs, args)
        axes = _entered(sizes, axis_resources or {})
        in_specs = tree.map(partial(_partition_spec, axes), arg_specs)
        out_specs = tree.map(partial(_partition_spec, axes), result_specs)

        def on_device(*blocks):
            body = element
            for axis in reversed(axes):
                body = _over(axis, body, arg_specs, result_specs, sizes[axis.name])
            results = body(*_at_arrays(partial(_named_first, sizes), arg_specs, blocks))
            return _at_arrays(partial(_named_back, sizes), result_specs, results)

        def inside(*args):
            blocks = _at_arrays(_own_block, in_specs, args)
            return _at_arrays(_whole, out_specs, on_device(*blocks))

        if all(_is_manual(axis.across) for axis in axes):
            return inside(*args)
        mesh = context_mesh()
        if not undeclared:
            _check_declared(inside, mesh, args)
        args = _at_arrays(partial(_placed, mesh), in_specs, args)
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*args)

    return call


def _specs_of(axes):
    """The pytree `axes`, with a `_Spec` for each list or dictionary that names dimensions."""

    def entries(x):
        return x if isinstance(x, dict) else dict(enumerate(x))

    def is_spec(x):
        if type(x) not in (dict, list, tuple):
            return False
        return jax.tree_util.all_leaves(entries(x).values(), is_leaf=lambda e: e is None)

    def spec_of(x):
        spec = _Spec()
        for k, name in entries(x).items():
            if name not in (None, ...):
                spec[name] = k
        return spec

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
        chunks = math.prod(entry.length for entry in entries if entry not in across)
        _check_free(name, across)
        local = name
        if across or chunks > 1 or name in mesh_axes:
            local = f"{name} over {across}" + " in chunks" * (chunks > 1)
            ENTERED[local] = Axis(name, across, local, chunks)
        axes.append(Axis(name, across, local, chunks))
    return axes


def _check_free(name, across):
    """Refuse names that are bound around already: collectives could not tell which one is meant."""
    bound = _bound_locals(name)
    bound += filter(_is_vmapped, (name, *across))
    if bound:
        raise ValueError(f"the axis {name!r} is mapped where {bound[0]!r} is bound: rename one")


def _bound_locals(name):
    """The names for `jax.vmap` under which a `mapped` around has entered an axis."""
    found = []
    for local, axis in ENTERED.items():
        if axis.name == name and is_bound(local):
            found.append(local)
    return found


def _tuple(x):
    if type(x) in (tuple, list):
        return tuple(x)
    return (x,)


def is_bound(name):
    try:
        return lax.axis_size(name) > 0
    except NameError:
        return False


def _is_manual(axes):
    """Whether these are mesh axes of a `jax.shard_map` around, which no `jax.vmap` binds again."""
    mesh = get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        return False
    return all(lax.axis_size(name) == mesh.shape[name] for name in axes)


def _is_vmapped(name):
    return is_bound(name) and not _is_manual([name])


def context_mesh():
    """The mesh of `jax.set_mesh(mesh)`, or of `with mesh:`, which JAX does not show."""
    mesh = get_abstract_mesh()
    return mesh if mesh.axis_names else _concrete_mesh()


def _concrete_mesh():
    with jax.ensure_compile_time_eval():
        return lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()).sharding.mesh


def _partition_spec(axes, spec):
    across = {}
    for axis in axes:
        if axis.across and axis.name in spec:
            across[spec[axis.name]] = axis.across
    length = 1 + np.max([-1, *across])
    return PartitionSpec(*map(across.get, range(length)))


def _placed(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def _own_block(spec, x):
    """The block of this device, of an array that all devices have."""
    for k, axes in enumerate(spec):
        for name in _tuple(axes or ()):
            x = _own_part(x, name, k)
    return x


def _own_part(x, name, k):
    size = x.shape[k] // lax.axis_size(name)
    start = lax.axis_index(name) * size
    return lax.dynamic_slice_in_dim(x, start, size, k)


def _whole(spec, x):
    """An array of which each device has a block, on all devices."""
    for k, axes in enumerate(spec):
        x = _gather(x, _tuple(axes or ()), k)
    return x


def _gather(x, axes, k, **options):
    """The parts of an array that the elements along axes have, one after the other."""
    for name in reversed(axes):
        x = lax.all_gather(x, name, axis=k, tiled=True, **options)
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
    except Exception as error:
        # Other errors are about what jax.vmap cannot do; jax.shard_map may be able to.
        if "mapped output" in str(error):
            raise ValueError(
                f"a result varies over {names}: name the axis in out_axes, or reduce over it"
            ) from error


def _named_first(names, spec, x):
    """The array with the named dimensions first, in the order of the names."""
    named = _dimensions(names, spec)
    return jnp.moveaxis(x, named, range(len(named)))


def _named_back(names, spec, x):
    named = _dimensions(names, spec)
    return jnp.moveaxis(x, range(len(named)), named)


def _dimensions(names, spec):
    return [spec[name] for name in names if name in spec]


def _over(axis, fun, arg_specs, result_specs, size):
    """`fun` over the elements that a device has along an axis: the first dimension of arrays."""
    held = size // lax.axis_size(axis.across)
    length = held // axis.chunks

    def first(spec):
        return 0 if axis.name in spec else None

    def vmapped(in_axes, count):
        out_axes = tree.map(first, result_specs)
        return jax.vmap(fun, in_axes, out_axes, axis_name=axis.local, axis_size=count)

    def element(k, *args):
        def own(spec, x):
            return x[k] if axis.name in spec else x

        return vmapped(None, 1)(*_at_arrays(own, arg_specs, args))

    def in_chunks(*args):
        def joined(spec, x):
            return x[:, 0] if axis.name in spec else x[0]

        results = lax.map(lambda k: element(k, *args), jnp.arange(held), batch_size=length)
        return _at_arrays(joined, result_specs, results)

    if axis.chunks > 1:
        return in_chunks
    if axis.across and held == 1:
        return partial(element, 0)
    return vmapped(tree.map(first, arg_specs), held)


def axes_of(names):
    """What executes a named axis, or several, if a `mapped` around binds them; or the name itself.

    Positions stay, and None.
    """
    if isinstance(names, (tuple, list)):
        parts = []
        for name in names:
            parts += _tuple(axes_of(name))
        return tuple(parts)
    bound = _bound_locals(names)
    # The innermost binder wins, as in JAX: perhaps a `jax.vmap` in the body.
    if not bound or _is_vmapped(names):
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
    """Raise for what may be a rule that JAX traces late: its mesh axes are manual, and no axis is
    bound.
    """
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
    # lax.pmax has no derivative: here, ties share it equally.  And XLA may lose NaN over devices.
    ties = (a == top) | (a != a)
    finite = jnp.where(ties & ~jnp.isinf(a), a, 0) * 1.0
    changes = finite - lax.stop_gradient(finite)
    change = jnp.sum(changes, axes, keepdims=keepdims)
    change /= jnp.sum(ties, axes, keepdims=keepdims)
    return top.reshape(change.shape) + change.astype(top.dtype)


def min(a, axis=None, *, keepdims=False):
    return max(a, axis, keepdims=keepdims, extremum=jnp.min)


def pmax(x, axis_name):
    axes = _tuple(axis_name)
    return tree.map(lambda leaf: max(leaf, axes), x)


def pmin(x, axis_name):
    axes = _tuple(axis_name)
    return tree.map(lambda leaf: min(leaf, axes), x)


def _top(x, axis):
    """The largest element, which exponentials are relative to."""
    axes = axes_of(axis)
    top = jnp.max(lax.stop_gradient(x), axes, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, 0)


def logsumexp(a, axis=None, *, keepdims=False):
    top = _top(a, axis)
    total = sum(jnp.exp(a - top), axis, keepdims=keepdims)
    return jnp.log(total) + top.reshape(total.shape)


def softmax(x, axis=-1):
    exponentials = jnp.exp(x - _top(x, axis))
    return exponentials / sum(exponentials, axis, keepdims=True)


def log_softmax(x, axis=-1):
    x = x - _top(x, axis)
    return x - logsumexp(x, axis, keepdims=True)


def _of_trees(collective):
    """A collective of arrays as one of pytrees.  The parts of axes come one after the other."""

    @wraps(collective)
    def call(x, axis_name, *args, **options):
        axes = axes_of(_tuple(axis_name))
        return tree.map(lambda leaf: collective(leaf, axes, *args, **options), x)

    return call


@_of_trees
def all_gather(x, axes, *, axis=0, tiled=False, **options):
    if not tiled:
        x = jnp.expand_dims(x, axis)
    return _gather(x, axes, axis, **options)


@_of_trees
def psum_scatter(x, axes, *, scatter_dimension=0, tiled=False, **options):
    k = scatter_dimension
    _, local = _split(axes)
    x = lax.psum(x, local)
    for name in axes:
        if name in local:
            x = _own_part(x, name, k)
        else:
            x = lax.psum_scatter(x, name, scatter_dimension=k, tiled=True, **options)
    if tiled:
        return x
    return jnp.squeeze(x, k)


@_of_trees
def all_to_all(x, axes, split_axis, concat_axis, *, tiled=False):
    sizes = map(lax.axis_size, axes)
    x = jnp.moveaxis(x, split_axis, 0)
    rest = x.shape[1:]
    x = x.reshape(*sizes, -1, *rest)
    for k, name in enumerate(axes):
        x = lax.all_to_all(x, name, k, k)
    parts = x.reshape(lax.axis_size(axes), -1, *rest)
    if not tiled:
        return jnp.moveaxis(parts.squeeze(1), 0, concat_axis)
    parts = jnp.moveaxis(parts, 1, split_axis + 1)
    return jnp.concatenate(parts, concat_axis)


def pswapaxes(x, axis_name, axis):
    return all_to_all(x, axis_name, axis, axis)


def _split(axes):
    """Those that are mesh axes, in the order of the mesh, and those of `jax.vmap`."""
    mesh_axes = get_abstract_mesh().axis_names
    local = tuple(name for name in axes if not _is_manual([name]))
    across = set(axes).difference(local)
    return tuple(filter(across.__contains__, mesh_axes)), local


def _elements(x, local):
    """The array with a first dimension for the elements on a device: no data moves."""
    return _gather(jnp.expand_dims(x, 0), local, 0)


def ppermute(x, axis_name, perm):
    """lax.ppermute: for each distance between devices, it sends the elements that go so far."""
    axes = axes_of(_tuple(axis_name))
    across, local = _split(axes)
    source, target = np.array(perm, int).reshape(-1, 2).T
    device = _indices(axes, across)
    if not local:
        return lax.ppermute(x, across, [*zip(device[source], device[target])])
    slot = _indices(axes, local)
    devices = lax.axis_size(across)
    distances = (device[target] - device[source]) % devices

    def moved(x):
        block = _elements(x, local)
        result = jnp.zeros_like(x)
        for distance in np.unique(distances):
            far = distances == distance
            slots = slot[source[far]]
            sent = np.unique(slots)
            came = block[sent]
            if distance:
                ring = [(k, (k + distance) % devices) for k in range(devices)]
                came = lax.ppermute(came, across, ring)
            rows = np.full(slot.size, -1)
            rows[target[far]] = np.searchsorted(sent, slots)
            row = jnp.array(rows)[lax.axis_index(axes)]
            result = jnp.where(row < 0, result, came[row])
        return result

    return tree.map(moved, x)


def _indices(axes, part):
    """For each element along axes, its index along part of them."""
    sizes = [*map(lax.axis_size, axes)]
    elements = np.indices(sizes).reshape(len(axes), -1)
    indices = np.zeros_like(elements[0])
    for name in part:
        indices = indices * lax.axis_size(name) + elements[axes.index(name)]
    return indices


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
    across, local = _split(axes_of(_tuple(axis_name)))
    dtype = jnp.result_type(x, y)
    operands = []
    contract = []
    batch = []
    for k, operand in enumerate((x, y)):
        operands.append(_elements(jnp.asarray(operand, dtype), local))
        rank = jnp.ndim(operand)
        contract.append([0])
        for dimension in pos_contract[k]:
            contract[k].append(dimension % rank + 1)
        batch.append([dimension % rank + 1 for dimension in pos_batch[k]])
    product = lax.dot_general(*operands, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across)
