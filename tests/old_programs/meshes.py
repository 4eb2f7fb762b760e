"""A class whose instances have meshes of their own: a table of features, looked up on each mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap


def look_up(table, query):
    scores = query @ table.T
    best, where = scores.max(), scores.argmax()
    overall = lax.pmax(best, "shards")
    offset = lax.axis_index("shards") * table.shape[0]
    return lax.pmin(jnp.where(best == overall, offset + where, 1 << 20), "shards")


class Index:
    """Features on a mesh of ``n`` devices."""

    def __init__(self, features, devices):
        self.mesh = Mesh(np.array(devices), ("s",))
        self.table = features.reshape(8, -1, features.shape[-1])
        self.look_up = xmap(
            look_up,
            in_axes=(["shards", ...], ["queries", ...]),
            out_axes=["queries"],
            axis_resources={"shards": "s"},
        )

    def __call__(self, queries):
        with self.mesh:
            return self.look_up(self.table, queries)


if __name__ == "__main__":
    rng = np.random.default_rng(7)
    features, queries = (
        rng.normal(size=(24, 4)).astype(np.float32),
        rng.normal(size=(5, 4)).astype(np.float32),
    )
    expected = (queries @ features.T).argmax(1)
    for devices in (jax.devices()[:2], jax.devices()[:4], jax.devices()[4:6]):
        found = Index(features, devices)(queries)
        assert (np.asarray(found) == expected).all(), (found, expected)
    print("found", found)
