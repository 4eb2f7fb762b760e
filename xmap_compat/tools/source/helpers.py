"""Functions that a written program defines for itself: collectives that JAX lacks, or does otherwise than xmap.

Each is inserted as it stands here, with what it needs of the others.  Their axes are axes of the mesh and of
``jax.vmap``, in the order in which they count elements, the major one first.  A device holds a slot for each element
along the latter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# In a written program: what executes each named axis.
AXES: dict = {}


def axes_of(names):
    """What executes a named axis, or several of them; a position stays, and None, which stands for all of them."""
    if names is None or isinstance(names, int):
        return names
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(axis for name in names for axis in AXES.get(name, (name,)))


def split_axes(axes):
    """The axes of the mesh, in its order, and those of jax.vmap."""
    axes, across = axes if isinstance(axes, tuple) else (axes,), jax.sharding.get_abstract_mesh().axis_names
    return tuple(a for a in across if a in axes), tuple(a for a in axes if a not in across)


def gathered(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and nothing else."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def slots(x, local):
    """An array with one dimension for all axes of jax.vmap."""
    return jnp.asarray(gathered(x, local)).reshape(lax.axis_size(local), *jnp.shape(x))


def by_place(x, axes, back=False):
    """The first dimension, in which parts count elements, so that they count devices and the slots on each; or back."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    places = sum(split_axes(axes), ())
    axes, order = (places, axes) if back else (axes, places)
    parts = x.reshape(*map(lax.axis_size, axes), len(x) // lax.axis_size(axes), *x.shape[1:])
    return parts.transpose(*map(axes.index, order), *range(len(axes), parts.ndim)).reshape(x.shape)


def own_slot(x, local):
    """The part of an element's slot, of a first dimension in which parts count slots."""
    size = len(x) // lax.axis_size(local)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(local) * size, size)


def of_trees(collective):
    """A collective over arrays as one over pytrees of them."""

    @functools.wraps(collective)
    def call(x, *args, **options):
        return jax.tree.map(lambda leaf: collective(leaf, *args, **options), x)

    return call


@of_trees
def all_gather(x, axis_name, axis=0, tiled=False):
    """lax.all_gather over axes of the mesh and of jax.vmap."""
    across, local = split_axes(axis_name)
    found = by_place(lax.all_gather(slots(x, local), across, tiled=True), axis_name, back=True)
    return jnp.concatenate(found, axis) if tiled else jnp.moveaxis(found, 0, axis)


@of_trees
def psum_scatter(x, axis_name, scatter_dimension=0, tiled=False):
    """lax.psum_scatter over axes of the mesh and of jax.vmap."""
    across, local = split_axes(axis_name)
    parts = by_place(jnp.moveaxis(lax.psum(x, local), scatter_dimension, 0), axis_name)
    own = own_slot(lax.psum_scatter(parts, across, tiled=True), local)
    return jnp.moveaxis(own, 0, scatter_dimension) if tiled else own.squeeze(0)


@of_trees
def all_to_all(x, axis_name, split_axis, concat_axis, tiled=False):
    """lax.all_to_all over axes of the mesh and of jax.vmap, with the right derivative."""
    across, local = split_axes(axis_name)
    parts = by_place(jnp.moveaxis(slots(x, local), split_axis + 1, 0), axis_name)
    own = own_slot(lax.all_to_all(parts, across, 0, 1, tiled=True) if across else parts, local)
    found = by_place(jnp.moveaxis(own, 1, 0), axis_name, back=True)
    if tiled:
        return jnp.concatenate(jnp.moveaxis(found, 1, split_axis + 1), concat_axis)
    return jnp.moveaxis(found.squeeze(1), 0, concat_axis)


def pswapaxes(x, axis_name, axis):
    """Swap a positional dimension with axes."""
    return all_to_all(x, axis_name, axis, axis)


def ppermute(x, axis_name, perm):
    """lax.ppermute over axes of the mesh and of jax.vmap; zeros where nothing is sent to.

    Only what changes device travels: one lax.ppermute for each distance between devices.
    """
    across, local = split_axes(axis_name)
    devices, size = lax.axis_size(across), lax.axis_size(local)
    elements = by_place(np.arange(devices * size), axis_name)
    places = {element: divmod(at, size) for at, element in enumerate(elements)}
    order = np.argsort(elements[::size])  # of the devices, as the axes count them
    rank = np.argsort(order)
    rounds: dict = {}
    for source, target in perm:
        (device, slot), (other, place) = places[source], places[target]
        rows = rounds.setdefault((rank[other] - rank[device]) % devices, [[] for _ in range(devices)])
        rows[device].append((slot, place))

    def moved(x):
        block, here = slots(x, local), lax.axis_index(across)
        result = jnp.zeros_like(block)
        for distance, rows in rounds.items():
            # Rows are filled up with moves to a place that does not exist.
            width = max(map(len, rows))
            table = np.array([row + [(0, size)] * (width - len(row)) for row in rows])
            senders = order[(rank - distance) % devices]
            sent = block[jnp.array(table[..., 0])[here]]
            if distance:
                sent = lax.ppermute(sent, across, [(k, to) for to, k in enumerate(senders.tolist()) if rows[k]])
            result = result.at[jnp.array(table[senders, :, 1])[here]].set(sent, mode="drop")
        return result[lax.axis_index(local)]

    return jax.tree.map(moved, x)


def pshuffle(x, axis_name, perm):
    """Element i of the result is element perm[i]."""
    return ppermute(x, axis_name, list(zip(perm, range(len(perm)))))


@of_trees
def pbroadcast(x, axis_name, source):
    """The element at an index, at every index."""
    return lax.psum(jnp.where(lax.axis_index(axis_name) == source, x, jnp.zeros_like(x)), axis_name)


def pargmax(x, axis_name, extremum=lax.pmax):
    """The smallest index over axes at which x is largest, or NaN."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    found = jnp.where(x == extremum(lax.stop_gradient(x), axis_name), index, size)
    return lax.pmin(jnp.where(x != x, index - size, found), axis_name) % size


def pargmin(x, axis_name):
    """The smallest index over axes at which x is smallest, or NaN."""
    return pargmax(x, axis_name, lax.pmin)


def pgather(src, idx, axes):
    """Elements of src at indices that count row-major through axes and positions; those out of range clip."""
    axes = [a % jnp.ndim(src) if isinstance(a, int) else a for a in (axes if isinstance(axes, tuple) else (axes,))]
    order = [*(a for a in axes if not isinstance(a, int)), *range(jnp.ndim(src))]
    table = gathered(src, order[: len(order) - jnp.ndim(src)])
    table = jnp.moveaxis(table, [order.index(a) for a in axes], range(len(axes)))
    return jnp.take(table.reshape(-1, *table.shape[len(axes) :]), idx, axis=0, mode="clip")


def pdot(x, y, axis_name, pos_contract=((), ()), pos_batch=((), ()), precision=None, preferred_element_type=None):
    """Contract two arrays over axes and positions (see lax.dot_general): one dot, and one sum over the mesh."""
    across, local = split_axes(axis_name)
    x, y = jnp.asarray(x), jnp.asarray(y)
    if preferred_element_type is None:
        x, y = x.astype(jnp.result_type(x, y)), y.astype(jnp.result_type(x, y))
    n = len(local)
    contract = [(*range(n), *(d % z.ndim + n for d in dims)) for dims, z in zip(pos_contract, (x, y))]
    batch = [[d % z.ndim + n for d in dims] for dims, z in zip(pos_batch, (x, y))]
    x, y = gathered(x, local), gathered(y, local)
    product = lax.dot_general(x, y, (contract, batch), precision, preferred_element_type)
    return lax.psum(product, across) if across else product


def einsum_over(subscripts, *operands, local=(), across=(), **options):
    """jnp.einsum whose terms start with letters for axes of jax.vmap, and a sum over axes of the mesh at the end."""
    terms = subscripts.split("->")[0].split(",")
    arrays = [gathered(x, [local[k] for k in term if k in local]) for term, x in zip(terms, operands, strict=True)]
    result = jnp.einsum(subscripts, *arrays, **options)
    return lax.psum(result, across) if across else result


def pdot_inside(
    x, y, axis_name, pos_contract=((), ()), pos_batch=((), ()), precision=None, preferred_element_type=None
):
    """pdot as a gradient that is taken inside sees it: each element has its own cotangent, and none are summed."""
    more = pos_contract, pos_batch, precision, preferred_element_type
    return with_own_cotangents(lambda x, y: pdot(x, y, axis_name, *more), lambda x, y: pdot(x, y, (), *more), x, y)


def einsum_inside(subscripts, *operands, local=(), across=(), **options):
    """einsum_over as a gradient that is taken inside sees it: each element has its own cotangent, none are summed."""
    over = functools.partial(einsum_over, subscripts, local=local, across=across, **options)
    own = functools.partial(jnp.einsum, "".join(k for k in subscripts if k not in local), **options)
    return with_own_cotangents(over, own, *operands)


def with_own_cotangents(over, own, *operands):
    """A contraction over axes with the derivative of one that is over none."""
    function = jax.custom_vjp(over)
    function.defvjp(lambda *xs: (over(*xs), xs), lambda xs, cotangent: jax.vjp(own, *xs)[1](cotangent))
    return function(*operands)


def split_positions(x, axes):
    """The positions among axes, and the rest; None stands for all dimensions of an array."""
    axes = tuple(range(jnp.ndim(x))) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return tuple(a for a in axes if isinstance(a, int)), tuple(a for a in axes if not isinstance(a, int))


def reduced(x, axes, over=(jnp.sum, lax.psum)):
    """The sum over positions and axes, or another reduction; positions stay as dimensions of one element."""
    positions, names = split_positions(x, axes)
    return over[1](over[0](x, positions, keepdims=True), names)


def top_over(x, axes):
    """The maximum over axes and positions as a constant: JAX has no derivative of lax.pmax."""
    return reduced(lax.stop_gradient(x), axes, (jnp.max, lax.pmax))


def max_over(x, axes, *, over=(jnp.max, lax.pmax)):
    """The maximum over axes and positions, with a derivative, which lax.pmax does not have: ties share it."""

    @jax.custom_jvp
    def extremum(x):
        is_nan = reduced(jnp.isnan(x).astype(x.dtype), axes) > 0  # of several devices, XLA may lose it
        return jnp.where(is_nan, jnp.nan, reduced(x, axes, over))

    @extremum.defjvp
    def derivative(primals, tangents):
        (x,), (dx,) = primals, tangents
        found = extremum(x)
        ties = (x == found).astype(x.dtype)
        return found, reduced(ties * dx, axes) / reduced(ties, axes)

    def one(x):
        found = extremum(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else reduced(x, axes, over)
        return found.squeeze(split_positions(x, axes)[0])

    return jax.tree.map(one, x)


def min_over(x, axes):
    """The minimum over axes and positions, with a derivative, which lax.pmin does not have: ties share it."""
    return max_over(x, axes, over=(jnp.min, lax.pmin))


def logsumexp_over(x, axes):
    """logsumexp over axes and positions."""
    top = top_over(x, axes)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return (jnp.log(reduced(jnp.exp(x - top), axes)) + top).squeeze(split_positions(x, axes)[0])


def softmax_over(x, axes):
    """softmax over axes and positions."""
    unnormalized = jnp.exp(x - top_over(x, axes))
    return unnormalized / reduced(unnormalized, axes)


def log_softmax_over(x, axes):
    """log_softmax over axes and positions."""
    shifted = x - top_over(x, axes)
    return shifted - jnp.log(reduced(jnp.exp(shifted), axes))


def backward_over(rule, axes, cotangents=None, results=None):
    """A backward rule that sums over axes by itself, for cotangents that stand for all elements of an axis.

    Args:
      axes: or a function of the arguments that are not differentiated.
      cotangents: what is made of the rule's cotangents and the axes first.
      results: what is made of its results and the axes.
    """

    def backward(*args):
        *nondiff, residuals, given = args
        names = axes(*nondiff) if callable(axes) else axes
        found = rule(*nondiff, residuals, cotangents(given, names) if cotangents else given)
        return results(found, names) if results else found

    return backward


def summed_across(tree, axes):
    """Cotangents of which each device has a part."""
    return lax.psum(tree, split_axes(axes)[0])


def at_first(tree, axes):
    """Arrays that are zero but for the first element along axes."""
    first = sum(map(lax.axis_index, axes)) == 0
    return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), tree)


def as_varying(tree, axes):
    """Arrays that are equal along axes of the mesh, of the type of those that differ."""
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), tree)


def varying_over(function, axes):
    """A function whose arguments differ, to jax.vmap, along its axes, so that each element has its own cotangent.

    Args:
      axes: or a function of the arguments that are not differentiated.
    """
    nondiff = function.nondiff_argnums

    @functools.wraps(function)
    def call(*args):
        _, local = split_axes(axes(*(args[k] for k in nondiff)) if callable(axes) else axes)
        own = sum(map(lax.axis_index, local)) >= 0
        given = [a if k in nondiff else jax.tree.map(lambda x: jnp.where(own, x, x), a) for k, a in enumerate(args)]
        return function(*given)

    return call


def values_only(function):
    """A function whose derivative is refused: collectives inside are made for the gradients that it takes itself."""
    held = jax.custom_jvp(function)

    @held.defjvp
    def refuse(primals, tangents):
        raise TypeError("this program is written for its values: it takes gradients of collectives itself")

    return held


def at_leaves(function, entries, tree):
    """A function of each leaf of a pytree, and of its entry in a prefix of this: a dimension, or None."""
    full = jax.tree.broadcast(entries, tree, is_leaf=lambda x: x is None)
    return jax.tree.map(lambda k, x: function(x, k), full, tree, is_leaf=lambda x: x is None)


def one_element(function, in_axes=0, out_axes=0):
    """jax.vmap over axes that fill axes of the mesh, so that a device has one element, whose dimension is removed."""

    def mapped(*args):
        found = function(*at_leaves(lambda x, k: x if k is None else jnp.squeeze(x, k), in_axes, args))
        return at_leaves(lambda x, k: x if k is None else jnp.expand_dims(x, k), out_axes, found)

    return mapped


def in_loop(function, in_axes=0, out_axes=0, turns=None, axis_size=None):
    """jax.vmap over a part of the elements at a time, in so many turns, or over one after another."""

    def mapped(*args):
        rows = at_leaves(lambda x, k: None if k is None else jnp.moveaxis(x, k, 0), in_axes, args)
        size = axis_size or len(jax.tree.leaves(rows)[0])

        def element(given):
            return function(*at_leaves(lambda x, row: x if row is None else row, given[1], args))

        batch = None if turns in (None, size) else size // turns
        results = lax.map(element, (jnp.arange(size), rows), batch_size=batch)
        return at_leaves(lambda x, k: x[0] if k is None else jnp.moveaxis(x, 0, k), out_axes, results)

    return mapped


def on_devices(function, axes, in_axes=0, out_axes=0):
    """A function that each device calls with its part of arrays, cut over axes of the mesh; results are gathered."""

    def part(x, k):
        size = 0 if k is None else x.shape[k] // lax.axis_size(axes)
        return x if k is None else lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, k)

    def whole(x, k):
        return x if k is None else lax.all_gather(x, axes, axis=k, tiled=True)

    return lambda *args: at_leaves(whole, out_axes, function(*at_leaves(part, in_axes, args)))


class NamedShape:
    """The shape of an array with positional dimensions and named ones: NamedShape(2, 3, batch=8)."""

    def __init__(self, *positional, **named):
        self.positional, self.named = positional, named


def sample(function, key, *args, **options):
    """A function of jax.random, with a key of its own for each element along the names of a shape."""
    shape = next((x for x in (*args, *options.values()) if isinstance(x, NamedShape)), NamedShape())
    for name in shape.named:
        key = jax.random.fold_in(key, lax.axis_index(axes_of(name)))
    options = {k: x.positional if x is shape else x for k, x in options.items()}
    return function(key, *(x.positional if x is shape else x for x in args), **options)


def safe_zip(*sequences):
    """zip of sequences of one length, as a list."""
    return list(zip(*sequences, strict=True))


def safe_map(function, *sequences):
    """map over sequences of one length, as a list."""
    return [function(*xs) for xs in zip(*sequences, strict=True)]


def unzip2(pairs):
    """The first elements of pairs, and the second ones."""
    return tuple(zip(*pairs, strict=True)) or ((), ())
