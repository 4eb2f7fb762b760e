"""Attention in which keys and values travel in a ring, and no device holds all of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap


def ring_attention(q, k, v):
    size = lax.psum(1, "seq")
    ring = [(i, (i + 1) % size) for i in range(size)]

    def turn(_, carry):
        out, denominator, largest, k, v = carry
        scores = q @ k.T / jnp.sqrt(q.shape[-1])
        new = jnp.maximum(largest, scores.max(-1, keepdims=True))
        p, correction = jnp.exp(scores - new), jnp.exp(largest - new)
        out, denominator = (
            out * correction + p @ v,
            denominator * correction + p.sum(-1, keepdims=True),
        )
        return out, denominator, new, lax.ppermute(k, "seq", ring), lax.ppermute(v, "seq", ring)

    start = jnp.zeros_like(q), jnp.zeros_like(q[:, :1]), jnp.full_like(q[:, :1], -1e30), k, v
    out, denominator, *_ = lax.fori_loop(0, size, turn, start)
    return out / denominator


attend = xmap(
    ring_attention,
    in_axes=({0: "batch", 1: "seq", 3: "heads"},) * 3,
    out_axes={0: "batch", 1: "seq", 3: "heads"},
    axis_resources={"seq": "ring", "heads": "tensor"},
)

if __name__ == "__main__":
    q, k, v = np.random.default_rng(4).normal(size=(3, 2, 4, 3, 2, 5)).astype(np.float32)
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("ring", "tensor")):
        out = attend(q, k, v)
    flat = lambda x: x.reshape(2, 12, 2, 5).astype(np.float64)
    scores = np.einsum("bqhd,bkhd->bhqk", flat(q), flat(k)) / np.sqrt(5)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        flat(np.array(out)), np.einsum("bhqk,bkhd->bqhd", weights, flat(v)), rtol=1e-4, atol=1e-5
    )
    print("attention", np.abs(out).mean())
