"""Functions that a written program defines for itself: collectives that JAX lacks, or does otherwise than xmap.

Each is inserted as it stands here, with what it needs of the others.  Their axes are axes of the mesh and of
``jax.vmap``, in the order in which they count elements, the major one first.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# In a written program: the axes of its mesh, and what executes each named axis.
MESH_AXES: tuple[str, ...] = ()
AXES: dict = {}


def axes_of(names):
    """What executes a named axis, or several of them."""
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(axis for name in names for axis in AXES.get(name, (name,)))


def split_axes(axes):
    """The axes of the mesh and those of jax.vmap."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    across = tuple(axis for axis in axes if axis in MESH_AXES)
    return across, tuple(axis for axis in axes if axis not in MESH_AXES)


def gathered(x, local):
    """An array with a dimension for each axis of jax.vmap: gathering over one moves a dimension and nothing else."""
    for name in reversed(local):
        x = lax.all_gather(x, name)
    return x


def pdot(x, y, axis_name, pos_contract=((), ()), pos_batch=((), ()), precision=None, preferred_element_type=None):
    """Contract two arrays over axes and positions (see lax.dot_general): one dot, and one sum over the mesh."""
    across, local = split_axes(axis_name)
    x, y = jnp.asarray(x), jnp.asarray(y)
    if preferred_element_type is None:
        x, y = x.astype(jnp.result_type(x, y)), y.astype(jnp.result_type(x, y))
    n = len(local)
    contract = [(*range(n), *(d % z.ndim + n for d in dims)) for dims, z in zip(pos_contract, (x, y))]
    batch = [tuple(d % z.ndim + n for d in dims) for dims, z in zip(pos_batch, (x, y))]
    product = lax.dot_general(
        gathered(x, local), gathered(y, local), (contract, batch), precision, preferred_element_type
    )
    return lax.psum(product, across) if across else product


def einsum_over(subscripts, *operands, local={}, across=(), **options):  # noqa: B006
    """jnp.einsum with letters for axes of jax.vmap, and a sum over axes of the mesh at the end."""
    inputs, output = subscripts.split("->")
    terms, arrays = [], []
    for term, x in zip(inputs.split(","), operands, strict=True):
        letters = [letter for letter in local if letter in term]
        terms.append("".join([*letters, *(letter for letter in term if letter not in letters)]))
        arrays.append(gathered(x, [local[letter] for letter in letters]))
    result = jnp.einsum(f"{','.join(terms)}->{output}", *arrays, **options)
    return lax.psum(result, across) if across else result


def pdot_inside(x, y, axis_name, *args, **options):
    """pdot as a gradient that is taken inside sees it: each element has its own cotangent, and none are summed."""
    return with_own_cotangents(
        lambda x, y: pdot(x, y, axis_name, *args, **options), functools.partial(pdot, axis_name=()), x, y
    )


def einsum_inside(subscripts, *operands, local={}, across=(), **options):  # noqa: B006
    """einsum_over as a gradient that is taken inside sees it: each element has its own cotangent, none are summed."""
    own = "".join(letter for letter in subscripts if letter not in local)
    return with_own_cotangents(
        lambda *xs: einsum_over(subscripts, *xs, local=local, across=across, **options),
        lambda *xs: jnp.einsum(own, *xs, **options),
        *operands,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_own_cotangents(contract, own, *operands):
    """A contraction over axes with the derivative of one that is over none."""
    return contract(*operands)


def with_own_cotangents_fwd(contract, own, *operands):
    return contract(*operands), operands


def with_own_cotangents_bwd(contract, own, operands, cotangent):
    return jax.vjp(own, *operands)[1](cotangent)


with_own_cotangents.defvjp(with_own_cotangents_fwd, with_own_cotangents_bwd)


def values_only(function):
    """A function whose derivative is refused: collectives inside are made for the gradients that it takes itself."""
    held = jax.custom_jvp(function)

    @held.defjvp
    def refuse(primals, tangents):
        raise TypeError("this program is written for its values: it takes gradients of collectives itself")

    return held


class NamedShape:
    """The shape of an array with positional dimensions and named ones: NamedShape(2, 3, batch=8)."""

    def __init__(self, *positional, **named):
        self.positional, self.named = positional, named


def sample(function, key, *args, **options):
    """A function of jax.random, with a key of its own for each element along the names of a shape."""
    shape = next((x for x in (*args, *options.values()) if isinstance(x, NamedShape)), NamedShape())
    for name in shape.named:
        key = jax.random.fold_in(key, lax.axis_index(axes_of(name)))
    plain = lambda x: x.positional if x is shape else x  # noqa: E731
    return function(key, *map(plain, args), **{k: plain(x) for k, x in options.items()})


def safe_zip(*sequences):
    """zip of sequences of one length, as a list."""
    return list(zip(*sequences, strict=True))


def safe_map(function, *sequences):
    """map over sequences of one length, as a list."""
    return [function(*xs) for xs in zip(*sequences, strict=True)]


def unzip2(pairs):
    """The first elements of pairs, and the second ones."""
    return tuple(zip(*pairs, strict=True)) or ((), ())


def in_loop(function, in_axes=0, out_axes=0, turns=None, axis_size=None):
    """jax.vmap over a part of the elements at a time, in so many turns, or over one after another."""

    def mapped(*args):
        leaves, tree = jax.tree.flatten(args)
        places = broadcast(in_axes, args)

        def element(given):
            rest = iter(given[1])
            return function(*tree.unflatten([x if k is None else next(rest) for x, k in zip(leaves, places)]))

        cut = [jnp.moveaxis(x, k, 0) for x, k in zip(leaves, places) if k is not None]
        size = len(cut[0]) if axis_size is None else axis_size
        batch = None if turns in (None, size) else size // turns
        results = lax.map(element, (jnp.arange(size), cut), batch_size=batch)
        found, tree_out = jax.tree.flatten(results)
        places_out = broadcast(out_axes, results)
        return tree_out.unflatten([x[0] if k is None else jnp.moveaxis(x, 0, k) for x, k in zip(found, places_out)])

    return mapped


def on_devices(function, axes, in_axes=0, out_axes=0):
    """A function that each device calls with its part of arrays, cut over axes of the mesh; results are gathered."""

    def mapped(*args):
        leaves, tree = jax.tree.flatten(args)
        here, devices = lax.axis_index(axes), lax.psum(1, axes)

        def part(x, k):
            size = jnp.shape(x)[k] // devices
            return lax.dynamic_slice_in_dim(x, here * size, size, k)

        parts = [x if k is None else part(x, k) for x, k in zip(leaves, broadcast(in_axes, args))]
        results = function(*tree.unflatten(parts))
        found, tree_out = jax.tree.flatten(results)
        whole = lambda x, k: x if k is None else lax.all_gather(x, axes, axis=k, tiled=True)  # noqa: E731
        return tree_out.unflatten(map(whole, found, broadcast(out_axes, results)))

    return mapped


def broadcast(prefix, tree):
    """The entries of a prefix of a pytree, one for each leaf."""
    is_none = lambda x: x is None  # noqa: E731
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_none), is_leaf=is_none)


def all_gather(x, axis_name, axis=0, tiled=False):
    """lax.all_gather over axes of the mesh and of jax.vmap together: those of one kind that are neighbours at once."""
    for on_mesh, group in reversed([(k, tuple(g)) for k, g in itertools.groupby(axis_name, MESH_AXES.__contains__)]):
        for names in [group] if on_mesh else [(name,) for name in reversed(group)]:
            x = lax.all_gather(x, names, axis=axis, tiled=tiled)
            tiled = True
    return x


def ppermute(x, axis_name, perm):
    """lax.ppermute over axes of the mesh and of jax.vmap; zeros where nothing is sent to.

    Only what changes device travels: one lax.ppermute for each distance between devices.
    """
    across, local = split_axes(axis_name)
    devices, slots = (lax.psum(1, names) if names else 1 for names in (across, local))
    here = lax.axis_index(across) if across else 0
    moves = [(*divmod(source, slots), *divmod(target, slots)) for source, target in perm]
    return jax.tree.map(functools.partial(moved, across, local, devices, slots, here, moves), x)


def moved(across, local, devices, slots, here, moves, x):
    """An array after moves from a device and a slot to a device and a slot."""
    block = gathered(x, local)
    block = block.reshape(slots, *jnp.shape(x))
    result = jnp.zeros_like(block)
    for distance in sorted({(target - source) % devices for source, _, target, _ in moves}):
        chosen = [move for move in moves if (move[2] - move[0]) % devices == distance]
        rows = {device: [(slot, place) for d, slot, _, place in chosen if d == device] for device in range(devices)}
        # Rows are filled up with moves to a place that does not exist.
        width = max(map(len, rows.values()))
        table = np.array([[*row, *[(0, slots)] * (width - len(row))] for row in rows.values()])
        slot, place = np.moveaxis(table, -1, 0)
        sent = block[jnp.asarray(slot)[here]]
        if distance:
            # lax.ppermute counts devices in the order of the mesh.
            order = sorted(across, key=MESH_AXES.index)
            sizes = [lax.psum(1, name) for name in order]
            places = np.arange(devices).reshape(sizes).transpose([order.index(name) for name in across]).ravel()
            pairs = [(int(places[k]), int(places[(k + distance) % devices])) for k in range(devices)]
            sent = lax.ppermute(sent, tuple(order), pairs)
        result = result.at[jnp.asarray(np.roll(place, distance, 0))[here]].set(sent, mode="drop")
    return result[lax.axis_index(local) if local else 0]


def pshuffle(x, axis_name, perm):
    """Element i of the result is element perm[i]."""
    return ppermute(x, axis_name, list(zip(perm, range(len(perm)))))


def pbroadcast(x, axis_name, source):
    """The element at an index, at every index."""
    return lax.psum(jnp.where(lax.axis_index(axis_name) == source, x, jnp.zeros_like(x)), axis_name)


def psum_scatter(x, axis_name, scatter_dimension=0, tiled=False):
    """lax.psum_scatter over axes of the mesh and then of jax.vmap."""
    across, local = split_axes(axis_name)
    d = scatter_dimension
    total = lax.psum_scatter(lax.psum(x, local), across, scatter_dimension=d, tiled=True)
    size = total.shape[d] // lax.psum(1, local)
    part = lax.dynamic_slice_in_dim(total, lax.axis_index(local) * size, size, d)
    return part if tiled else lax.squeeze(part, (d,))


def all_to_all(x, axis_name, split_axis, concat_axis, tiled=False):
    """lax.all_to_all over axes of the mesh and then of jax.vmap, with the right derivative."""
    across, local = split_axes(axis_name)
    if tiled and not local:
        return lax.all_to_all(x, across, split_axis, concat_axis, tiled=True)
    block = gathered(x, local)
    devices, slots = (lax.psum(1, names) if names else 1 for names in (across, local))
    block = block.reshape(slots, *jnp.shape(x))
    at, shape = split_axis + 1, block.shape
    pieces = (devices, slots, shape[at] // (devices * slots))
    block = jnp.moveaxis(block.reshape(*shape[:at], *pieces, *shape[at + 1 :]), (at, at + 1), (0, 1))
    block = lax.all_to_all(block, across, 0, 0, tiled=True) if across else block
    mine = lax.dynamic_index_in_dim(block, lax.axis_index(local) if local else 0, 1, keepdims=False)
    mine = mine.reshape(devices * slots, *mine.shape[2:])
    if not tiled:
        return jnp.moveaxis(mine.squeeze(split_axis + 1), 0, concat_axis)
    mine = jnp.moveaxis(mine, 0, concat_axis)
    shape = mine.shape
    return mine.reshape(*shape[:concat_axis], -1, *shape[concat_axis + 2 :])


def pswapaxes(x, axis_name, axis):
    """Swap a positional dimension with axes."""
    return all_to_all(x, axis_name, axis, axis)


def pargmax(x, axis_name):
    """The smallest index over axes at which x is largest."""
    return index_of(x, lax.pmax(lax.stop_gradient(x), axis_name), axis_name)


def pargmin(x, axis_name):
    """The smallest index over axes at which x is smallest."""
    return index_of(x, lax.pmin(lax.stop_gradient(x), axis_name), axis_name)


def index_of(x, value, axes):
    """The smallest index over axes at which x is a value."""
    return lax.pmin(jnp.where(x == value, lax.axis_index(axes), lax.psum(1, axes)), axes)


def pgather(src, idx, axes):
    """Elements of src at indices that count row-major through axes and positions; those out of range clip."""
    positions, names = split_positions(axes)
    positions = tuple(p % src.ndim for p in positions)
    order = list(positions)
    table = jnp.moveaxis(jnp.asarray(src), positions, range(len(positions)))
    for name in names:
        table = lax.all_gather(table, name)
        order.insert(0, name)
    places = [order.index(a % src.ndim if isinstance(a, int) else a) for a in axes]
    table = lax.transpose(table, (*places, *range(len(axes), table.ndim)))
    return jnp.take(table.reshape(-1, *table.shape[len(axes) :]), idx, axis=0, mode="clip")


def split_positions(axes):
    """The positions among axes, and the rest."""
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(a for a in axes if isinstance(a, int)), tuple(a for a in axes if not isinstance(a, int))


def max_over(x, axes):
    """The maximum over axes and positions, with a derivative, which lax.pmax does not have."""
    return jax.tree.map(lambda a: extremum(lax.pmax, a, axes), x)


def min_over(x, axes):
    """The minimum over axes and positions, with a derivative, which lax.pmin does not have."""
    return jax.tree.map(lambda a: extremum(lax.pmin, a, axes), x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def extremum(over, x, axes):
    positions, names = split_positions(axes)
    return over(x.max(positions) if over is lax.pmax else x.min(positions), names)


@extremum.defjvp
def extremum_jvp(over, axes, primals, tangents):
    """Ties share the derivative."""
    (x,), (dx,) = primals, tangents
    positions, names = split_positions(axes)
    found = extremum(over, x, axes)
    ties = (x == jnp.expand_dims(found, positions)).astype(x.dtype)
    return found, lax.psum((ties * dx).sum(positions), names) / lax.psum(ties.sum(positions), names)


def logsumexp_over(x, axes):
    """logsumexp over axes and positions.  JAX has no derivative of lax.pmax, so it is of constants here."""
    positions, names = split_positions(axes)
    top = lax.pmax(lax.stop_gradient(x).max(positions), names)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.log(lax.psum(jnp.exp(x - jnp.expand_dims(top, positions)).sum(positions), names)) + top


def softmax_over(x, axes):
    """softmax over axes.  JAX has no derivative of lax.pmax, so it is of constants here."""
    unnormalized = jnp.exp(x - lax.pmax(lax.stop_gradient(x), axes))
    return unnormalized / lax.psum(unnormalized, axes)


def log_softmax_over(x, axes):
    """log_softmax over axes.  JAX has no derivative of lax.pmax, so it is of constants here."""
    shifted = x - lax.pmax(lax.stop_gradient(x), axes)
    return shifted - jnp.log(lax.psum(jnp.exp(shifted), axes))


def backward_over(rule, axes, results="", operands=""):
    """A backward rule that sums over axes by itself, for cotangents that stand for all elements of an axis.

    Args:
      axes: or a function of the arguments that are not differentiated.
      results: "whole" if each element must get such a cotangent, of which each device has a part.
      operands: "equal" if the rule's cotangents stand for all elements again.
    """

    def backward(*args):
        *nondiff, residuals, cotangents = args
        names = axes(*nondiff) if callable(axes) else axes
        across, _ = split_axes(names)
        if results == "whole" and across:
            cotangents = jax.tree.map(lambda ct: lax.psum(ct, across), cotangents)
        found = rule(*nondiff, residuals, cotangents)
        return at_first(found, names) if operands == "equal" else found

    return backward


def varying_over(function, axes, nondiff=()):
    """A function whose arguments differ, to jax.vmap, along its axes, so that each element has its own cotangent.

    Args:
      axes: or a function of the arguments that are not differentiated, whose positions are ``nondiff``.
    """

    @functools.wraps(function)
    def call(*args):
        _, local = split_axes(axes(*(args[k] for k in nondiff)) if callable(axes) else axes)
        own = functools.reduce(jnp.logical_and, [lax.axis_index(axis) >= 0 for axis in local], True)
        return function(
            *(a if k in nondiff else jax.tree.map(lambda x: jnp.where(own, x, x), a) for k, a in enumerate(args))
        )

    return call


def typed_backward_over(rule, axes, results="", operands=""):
    """A backward rule that sums over axes by itself, for cotangents that stand for all elements of an axis.

    Args:
      axes: or a function of the arguments that are not differentiated.
      results: "first" gives a cotangent to the first element only, "whole" to each.
      operands: "vary" if the rule's cotangents are equal along the axes, where the operands vary.
    """

    def backward(*args):
        *nondiff, residuals, cotangents = args
        names = axes(*nondiff) if callable(axes) else axes
        if results == "first":
            cotangents = at_first(cotangents, names)
        found = rule(*nondiff, residuals, cotangents)
        return jax.tree.map(lambda ct: lax.pcast(ct, names, to="varying"), found) if operands == "vary" else found

    return backward


def at_first(tree, axes):
    """Arrays that are zero but for the first element along axes."""
    first = functools.reduce(jnp.logical_and, [lax.axis_index(axis) == 0 for axis in axes])
    return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), tree)
