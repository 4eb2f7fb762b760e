"""k-means over points on the devices; the points of a device are vectorized."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import mesh, xmap


def assign_point(point, centres):
    return jnp.argmin(((point - centres) ** 2).sum(-1))


def update(point, centres):
    member = jax.nn.one_hot(assign_point(point, centres), len(centres))
    counts = lax.psum(member, "points")
    sums = lax.psum(member[:, None] * point, "points")
    return jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], centres)


class KMeans:
    def __init__(self, k, resources):
        self.k = k
        self.update = xmap(
            update, in_axes=(["points", ...], [...]), out_axes=[...], axis_resources=resources
        )
        self.predict = xmap(
            assign_point,
            in_axes=(["points", ...], [...]),
            out_axes=["points"],
            axis_resources=resources,
        )

    def fit(self, points, rounds):
        centres = points[: self.k]
        for _ in range(rounds):
            centres = self.update(points, centres)
        return centres, self.predict(points, centres)


if __name__ == "__main__":
    points = np.random.default_rng(5).normal(size=(32, 2)).astype(np.float32)
    with mesh(np.array(jax.devices()[:4]), ("p",)):
        centres, labels = KMeans(3, {"points": "p"}).fit(points, 5)
    own = points[:3]
    for _ in range(5):
        nearest = ((points[:, None] - own) ** 2).sum(-1).argmin(1)
        own = np.stack([points[nearest == j].mean(0) for j in range(3)])
    np.testing.assert_allclose(centres, own, rtol=1e-4, atol=1e-5)
    assert (np.asarray(labels) == ((points[:, None] - own) ** 2).sum(-1).argmin(1)).all()
    print("centres", centres)
