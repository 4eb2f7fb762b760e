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
- Nothing has a derivative through a maximum or minimum over an axis, and `lax.ppermute` over the
  elements of a device needs a whole permutation, as in JAX.
- An exchange (all_to_all, ppermute, pshuffle, psum_scatter) over an axis that several mesh axes or
  elements of a device share gathers the axis: give each device one element if it is large.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

# A resource: a device computes an axis in so many chunks.
SerialLoop = namedtuple("SerialLoop", "length")

# An axis, its size, the mesh axes that split it, its name for `jax.vmap`, and the lengths of its
# SerialLoops.
Axis = namedtuple("Axis", "name size across local loops")

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
        on_device = element
        for k in reversed(range(len(axes))):
            on_device = _over(axes[k], axes[:k], on_device, arg_specs, result_specs)

        def inside(*args):
            blocks = _at_arrays(_own_block, in_specs, args)
            return _at_arrays(_whole, out_specs, on_device(*blocks))

        if all(_is_manual(axis.across) for axis in axes):
            return inside(*args)
        mesh = context_mesh()
        if not undeclared:
            _check_declared(inside, mesh, args)
        args = jax.device_put(args, tree.map(partial(NamedSharding, mesh), in_specs))
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*args)

    return call


def _specs_of(axes):
    """The pytree `axes`, with a `_Spec` for each list or dictionary that names dimensions."""
    specs = tree.map(_spec_of, axes, is_leaf=_is_spec)
    return tuple(specs) if isinstance(specs, list) else specs


def _is_spec(x):
    parts = tree.structure(x, is_leaf=lambda part: part is None)
    return parts.num_nodes == parts.num_leaves + 1


def _spec_of(x):
    entries = x if isinstance(x, dict) else dict(enumerate(x))
    spec = _Spec()
    for k, name in entries.items():
        if name not in (None, ...):
            spec[name] = k
    return spec


def _at_arrays(function, specs, *trees):
    """`function(spec, array, ...)` of each array of pytrees, of which `specs` is a prefix."""

    def at(spec, *parts):
        return tree.map(partial(function, spec), *parts)

    return tree.map(at, specs, *trees)


def _note_sizes(sizes, spec, x):
    for name, k in spec.items():
        sizes[name] = jnp.shape(x)[k]


def _entered(sizes, resources):
    """The axes of a call."""
    placed = [*get_abstract_mesh().manual_axes]
    for entries in resources.values():
        placed += _tuple(entries)
    axes = []
    for name, size in sizes.items():
        entries = _tuple(resources.get(name, ()))
        across = tuple(entry for entry in entries if not hasattr(entry, "length"))
        loops = [entry.length for entry in entries if entry not in across]
        _check_free(name, across)
        local = name
        if entries or name in placed:
            local = f"{name} over {entries}"
        axis = Axis(name, size, across, local, loops)
        if local != name:
            ENTERED[local] = axis
        axes.append(axis)
    return axes


def _check_free(name, across):
    """Refuse names that are bound around already: collectives could not tell which one is meant."""
    bound = [*_entered_as(name), *filter(_is_vmapped, (name, *across))]
    if bound:
        raise ValueError(f"the axis {name!r} is mapped where {bound[0]!r} is bound: rename one")


def _entered_as(name):
    """The names for `jax.vmap` under which a `mapped` around has entered an axis."""
    return [local for local, axis in ENTERED.items() if axis.name == name and is_bound(local)]


def _tuple(x):
    if type(x) in (tuple, list):
        return tuple(x)
    return (x,)


def is_bound(name):
    try:
        lax.axis_size(name)
        return True
    except NameError:
        return False


def _is_manual(axes):
    """Whether these are mesh axes of a `jax.shard_map` around, which no `jax.vmap` binds again."""
    mesh = get_abstract_mesh()
    manual = mesh.manual_axes
    return all(name in manual and lax.axis_size(name) == mesh.shape[name] for name in axes)


def _is_vmapped(name):
    return is_bound(name) and not _is_manual([name])


def context_mesh():
    """The mesh of `jax.set_mesh(mesh)`, or of `with mesh:`, which JAX does not show."""
    mesh = get_abstract_mesh()
    if mesh.axis_names:
        return mesh
    with jax.ensure_compile_time_eval():
        return lax.with_sharding_constraint(jnp.zeros(()), PartitionSpec()).sharding.mesh


def _partition_spec(axes, spec):
    across = {}
    for axis in axes:
        if axis.name in spec:
            across[spec[axis.name]] = axis.across
    length = 1 + np.max([-1, *across])
    return PartitionSpec(*map(across.get, range(length)))


def _own_block(spec, x):
    """The block of this device, of an array that all devices have."""
    for k, axes in enumerate(spec):
        axes = axes or ()
        size = x.shape[k] // lax.axis_size(axes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, k)
    return x


def _whole(spec, x):
    """An array of which each device has a block, on all devices."""
    for k, axes in enumerate(spec):
        x = _gather(x, axes or (), axis=k, tiled=True)
    return x


def _gather(x, axes, *, axis=0, tiled=False, **options):
    """lax.all_gather over several axes, of a mesh and of `jax.vmap`."""
    for name in reversed(_tuple(axes)):
        x = lax.all_gather(x, name, axis=axis, tiled=tiled, **options)
        tiled = True
    return x


def _check_declared(inside, mesh, args):
    """Refuse a result that differs between devices where its spec says that it does not."""
    names = mesh.axis_names
    for name in names:
        inside = jax.vmap(inside, None, None, axis_name=name, axis_size=mesh.shape[name])
    manual = mesh.abstract_mesh.update_axis_types(dict.fromkeys(names, AxisType.Manual))
    try:
        with jax.sharding.use_abstract_mesh(manual):
            jax.eval_shape(inside, *args)
    except Exception as error:
        # Other errors are about what jax.vmap cannot do; jax.shard_map may be able to.
        if "mapped output" in str(error):
            raise ValueError(
                f"a result varies over {names}: name the axis in out_axes, or reduce over it"
            ) from error


def _over(axis, outer, fun, arg_specs, result_specs):
    """`fun` over the elements that a device has along an axis; it has one along the outer axes."""
    dimension = partial(_dimension, axis.name, outer)
    out_axes = tree.map(dimension, result_specs)
    vmapped = partial(jax.vmap, fun, out_axes=out_axes, axis_name=axis.local)

    def element(k, *args):
        def own(spec, x):
            if axis.name not in spec:
                return x
            return lax.dynamic_index_in_dim(x, k, dimension(spec), keepdims=False)

        return vmapped(in_axes=None, axis_size=1)(*_at_arrays(own, arg_specs, args))

    def joined(spec, x):
        if axis.name not in spec:
            return x[0]
        k = dimension(spec)
        return jnp.moveaxis(x.squeeze(k + 1), 0, k)

    def over(*args):
        held = axis.size // lax.axis_size(axis.across)
        if axis.loops:
            chunk = held // math.prod(axis.loops)
            results = lax.map(lambda k: element(k, *args), jnp.arange(held), batch_size=chunk)
            return _at_arrays(joined, result_specs, results)
        if axis.across and held == 1:
            return element(0, *args)
        return vmapped(in_axes=tree.map(dimension, arg_specs), axis_size=held)(*args)

    return over


def _dimension(name, outer, spec):
    """The dimension of an axis, of an array without those of the outer axes; or None."""
    if name not in spec:
        return None
    dimension = spec[name]
    for axis in outer:
        dimension -= spec.get(axis.name, dimension) < spec[name]
    return dimension


def axes_of(names):
    """What executes a named axis, or several, if a `mapped` around binds them; or the name itself.

    Positions stay, and None.
    """
    if isinstance(names, (tuple, list)):
        parts = []
        for name in names:
            parts += _tuple(axes_of(name))
        return tuple(parts)
    entered = _entered_as(names)
    # The innermost binder wins, as in JAX: perhaps a `jax.vmap` in the body.
    if not entered or _is_vmapped(names):
        _check_not_late(names)
        return names
    axis = ENTERED[entered[0]]
    if axis.loops:
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


# ---- functions over named axes


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


def one_hot(x, num_classes, *, axis=-1, **options):
    return jax.nn.one_hot(x, num_classes, axis=axes_of(axis), **options)


def max(a, axis=None, *, keepdims=False, extremum=jnp.max):
    axes = axes_of(axis)
    top = extremum(a, axes, keepdims=keepdims)
    # XLA may lose NaN over devices.
    lost = jnp.sum(jnp.where(a != a, a, 0), axes, keepdims=keepdims)
    return top + lost.astype(top.dtype)


def min(a, axis=None, *, keepdims=False):
    return max(a, axis, keepdims=keepdims, extremum=jnp.min)


def pmax(x, axis_name):
    return tree.map(lambda leaf: max(leaf, [axis_name]), x)


def pmin(x, axis_name):
    return tree.map(lambda leaf: min(leaf, [axis_name]), x)


def _top(x, axis):
    """The largest element, which exponentials are relative to."""
    top = jnp.max(lax.stop_gradient(x), axes_of(axis), keepdims=True)
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


def all_gather(x, axis_name, **options):
    return _gather(x, axes_of(axis_name), **options)


def _exchanged(collective, x, axis_name, **options):
    """JAX exchanges elements along axes of a mesh in their order, or of one `jax.vmap`.  Along
    others, each device gathers all elements, and computes the results of all.
    """
    axes = _tuple(axes_of(axis_name))
    in_order = [name for name in get_abstract_mesh().manual_axes if name in axes]
    if len(axes) == 1 or in_order == [*axes]:
        return collective(x, axes, **options)
    name = "the whole axis"
    along_whole = jax.vmap(partial(collective, axis_name=name, **options), axis_name=name)
    results = along_whole(_gather(x, axes))
    return tree.map(lambda result: result[lax.axis_index(axes)], results)


def psum_scatter(x, axis_name, **options):
    return _exchanged(lax.psum_scatter, x, axis_name, **options)


def all_to_all(x, axis_name, split_axis, concat_axis, **options):
    return _exchanged(
        lax.all_to_all, x, axis_name, split_axis=split_axis, concat_axis=concat_axis, **options
    )


def ppermute(x, axis_name, perm):
    return _exchanged(lax.ppermute, x, axis_name, perm=perm)


def pshuffle(x, axis_name, perm):
    return _exchanged(lax.pshuffle, x, axis_name, perm=perm)


def pdot(x, y, axis_name, pos_contract=((), ()), **options):
    """jnp.tensordot that contracts named axes too."""
    axes = _tuple(axes_of(axis_name))
    local = [*filter(_is_vmapped, axes)]
    across = [name for name in axes if name not in local]

    def elements(operand):
        """With a last dimension for those on this device: no data moves."""
        return _gather(jnp.expand_dims(operand, -1), local, axis=-1, tiled=True)

    dimensions = [(*np.mod(at, jnp.ndim(z)), -1) for at, z in zip(pos_contract, (x, y))]
    return lax.psum(jnp.tensordot(elements(x), elements(y), dimensions, **options), across)
