"""Functions that a written program defines for itself: collectives that JAX lacks for axes that are partly vmapped."""

from __future__ import annotations


def _extremum(kind: str, found: str) -> str:
    return f'''\
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def {kind}_over(x, axes):
    """lax.p{kind} with a derivative, which JAX does not have: ties share it."""
    return lax.p{kind}(x, axes)


@{kind}_over.defjvp
def {kind}_over_jvp(axes, primals, tangents):
    (x,), (dx,) = primals, tangents
    {found} = {kind}_over(x, axes)
    ties = (x == {found}).astype(x.dtype)
    return {found}, lax.psum(ties * dx, axes) / lax.psum(ties, axes)
'''


HELPERS: dict[str, str] = {
    "pdot": '''\
def pdot(x, y, local=(), across=()):
    """Contract two arrays over vmapped axes and over mesh axes: one dot, one all-reduce.

    Gathering over an axis of jax.vmap moves a dimension and nothing else.
    """
    for name in local:
        x, y = lax.all_gather(x, name), lax.all_gather(y, name)
    contracted = tuple(range(len(local)))
    product = jnp.tensordot(x, y, (contracted, contracted))
    return lax.psum(product, across) if across else product
''',
    "pdot_general": '''\
def pdot_general(
    x,
    y,
    local=(),
    across=(),
    pos_contract=((), ()),
    pos_batch=((), ()),
    precision=None,
    preferred_element_type=None,
):
    """Contract two arrays over vmapped axes, mesh axes and positions; see lax.dot_general."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    if preferred_element_type is None:
        x, y = x.astype(jnp.result_type(x, y)), y.astype(jnp.result_type(x, y))
    n = len(local)

    def positions(dims, ndim):
        return tuple(d % ndim + n for d in dims)

    contract = [positions(dims, z.ndim) for dims, z in zip(pos_contract, (x, y))]
    batch = [positions(dims, z.ndim) for dims, z in zip(pos_batch, (x, y))]
    for name in local:
        x, y = lax.all_gather(x, name), lax.all_gather(y, name)
    product = lax.dot_general(
        x,
        y,
        (tuple((*range(n), *dims) for dims in contract), tuple(batch)),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return lax.psum(product, across) if across else product
''',
    "ppermute": '''\
def ppermute(x, mesh_axes, local, perm):
    """lax.ppermute over an axis that is split over mesh axes and vmapped on each device.

    Only what changes device travels: one lax.ppermute for each distance between devices.
    """
    devices, slots = lax.psum(1, mesh_axes) if mesh_axes else 1, lax.psum(1, local)
    here = lax.axis_index(mesh_axes) if mesh_axes else 0
    moves = [(*divmod(source, slots), *divmod(target, slots)) for source, target in perm]
    block = lax.all_gather(x, local)
    result = jnp.zeros_like(block)
    for distance in sorted({(target - source) % devices for source, _, target, _ in moves}):
        rows = {device: [] for device in range(devices)}
        for source, slot, target, place in moves:
            if (target - source) % devices == distance:
                rows[source].append((slot, place))
        width = max(map(len, rows.values()))
        # Rows are filled up with moves to a place that does not exist.
        rows = [[*row, *[(0, slots)] * (width - len(row))] for row in rows.values()]
        slot, place = np.moveaxis(np.array(rows), -1, 0)
        place = np.roll(place, distance, 0)
        sent = block[jnp.asarray(slot)[here]]
        if distance:
            pairs = [(k, (k + distance) % devices) for k in range(devices)]
            sent = lax.ppermute(sent, mesh_axes, pairs)
        result = result.at[jnp.asarray(place)[here]].set(sent, mode="drop")
    return result[lax.axis_index(local)]
''',
    "psum_scatter": '''\
def psum_scatter(x, mesh_axes, local, scatter_dimension=0, tiled=False):
    """lax.psum_scatter over an axis that is split over mesh axes and vmapped on each device."""
    total = lax.psum(x, local)
    d = scatter_dimension
    total = lax.psum_scatter(total, mesh_axes, scatter_dimension=d, tiled=True)
    size = total.shape[d] // lax.psum(1, local)
    part = lax.dynamic_slice_in_dim(total, lax.axis_index(local) * size, size, d)
    return part if tiled else lax.squeeze(part, (d,))
''',
    "all_to_all": '''\
def all_to_all(x, mesh_axes, local, split_axis, concat_axis, tiled=False):
    """lax.all_to_all over an axis that is split over mesh axes and vmapped on each device."""
    devices, slots = lax.psum(1, mesh_axes), lax.psum(1, local)
    block = lax.all_gather(x, local)
    at, shape = split_axis + 1, block.shape
    pieces = (devices, slots, shape[at] // (devices * slots))
    block = block.reshape(*shape[:at], *pieces, *shape[at + 1 :])
    block = jnp.moveaxis(block, (at, at + 1), (0, 1))
    block = lax.all_to_all(block, mesh_axes, 0, 0, tiled=True)
    mine = lax.dynamic_index_in_dim(block, lax.axis_index(local), 1, keepdims=False)
    mine = mine.reshape(devices * slots, *mine.shape[2:])
    if not tiled:
        return jnp.moveaxis(mine.squeeze(split_axis + 1), 0, concat_axis)
    mine = jnp.moveaxis(mine, 0, concat_axis)
    shape = mine.shape
    return mine.reshape(*shape[:concat_axis], -1, *shape[concat_axis + 2 :])
''',
    "index_of": '''\
def index_of(x, extremum, axes):
    """The smallest index along axes at which x is what extremum (lax.pmax, lax.pmin) says."""
    x = lax.stop_gradient(x)
    found = x == extremum(x, axes)
    return lax.pmin(jnp.where(found, lax.axis_index(axes), lax.psum(1, axes)), axes)
''',
    "max_over": _extremum("max", "top"),
    "min_over": _extremum("min", "low"),
    "logsumexp_over": '''\
def logsumexp_over(x, axes):
    """logsumexp over axis names.  JAX has no derivative of lax.pmax, so it is of constants here."""
    top = lax.pmax(lax.stop_gradient(x), axes)
    top = jnp.where(jnp.isfinite(top), top, 0)
    return jnp.log(lax.psum(jnp.exp(x - top), axes)) + top
''',
    "softmax_over": '''\
def softmax_over(x, axes):
    """softmax over axis names.  JAX has no derivative of lax.pmax, so it is of constants here."""
    unnormalized = jnp.exp(x - lax.pmax(lax.stop_gradient(x), axes))
    return unnormalized / lax.psum(unnormalized, axes)
''',
    "log_softmax_over": '''\
def log_softmax_over(x, axes):
    """log_softmax over axis names.  JAX has no derivative of lax.pmax, so it is of constants here."""
    shifted = x - lax.pmax(lax.stop_gradient(x), axes)
    return shifted - jnp.log(lax.psum(jnp.exp(shifted), axes))
''',
}
