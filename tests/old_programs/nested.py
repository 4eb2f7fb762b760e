"""An ensemble over one mesh axis, each member of which is evaluated on rows over another, by an xmap of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap


def row_loss(w, x, y):
    return lax.pmean((jnp.dot(w, x) - y) ** 2, "rows")


loss_of_member = xmap(
    row_loss, in_axes=([...], ["rows", ...], ["rows"]), out_axes={}, axis_resources={"rows": "data"}
)


def member(w, x, y):
    loss = loss_of_member(w, x, y)
    return loss, loss - lax.pmean(loss, "member")


ensemble = xmap(
    member,
    in_axes=(["member", ...], [...], [...]),
    out_axes=(["member"], ["member"]),
    axis_resources={"member": "models"},
)

if __name__ == "__main__":
    rng = np.random.default_rng(9)
    w, x, y = rng.normal(size=(4, 3)), rng.normal(size=(8, 3)), rng.normal(size=8)
    w, x, y = (a.astype(np.float32) for a in (w, x, y))
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("models", "data")):
        losses, relative = ensemble(w, x, y)
    expected = ((x @ w.T - y[:, None]) ** 2).mean(0)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(relative, expected - expected.mean(), rtol=1e-3, atol=1e-4)
    print("losses", losses)
