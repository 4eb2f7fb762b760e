"""Ten programs whose assignments ``python -m benchmarks search`` prices and measures: a training step each, or a scan.

Sizes and seeds were fixed before anything was tuned, but for the GPT block, which was cut to one layer for time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.programs import arrays, block_loss, named_loss, named_pair
from xmap_compat import pdot, xmap


class Priced(NamedTuple):
    """A program: ``make(axis_resources)`` gives the step; ``loops`` says whether it has any (XLA counts them once)."""

    name: str
    make: Callable[[Any], Callable[..., Any]]
    args: tuple[Any, ...]
    loops: bool = False


def programs() -> Iterator[Priced]:
    for name, (body, in_axes, args, trained, loops) in PROGRAMS.items():
        yield Priced(name, functools.partial(_training, body, in_axes, trained), args(), loops)


def _training(body, in_axes, trained, resources):
    """A step of gradient descent on the first arguments; with ``trained = 0`` the loss alone."""
    loss = xmap(body, in_axes, {}, axis_resources=resources)
    if not trained:
        return loss

    def step(*args):
        value, gradients = jax.value_and_grad(loss, argnums=tuple(range(trained)))(*args)
        return jax.tree.map(lambda p, g: p - 0.1 * g, args[:trained], gradients), value

    return step


def _network_arguments():
    labels = np.arange(1024, dtype=np.int32) % 10
    return (*arrays((512, 512), (512, 10), (1024, 512)), labels)


def _block(layers, x, y):
    return lax.pmean(block_loss(named_pair, layers, x, y), "batch")


def _block_arguments():
    heads, width, sequence = 32, 128, 64
    into, back = (8, width, heads), (8, heads, width)
    shapes = {"q": into, "k": into, "v": into, "out": back, "up": into, "down": back}
    layers = [dict(zip(shapes, arrays(*shapes.values())))]
    return (layers, *arrays((8, 1, sequence, width), (8, 1, sequence, width)))


def _convolution(filters, weights, image):
    out = jax.nn.relu(lax.conv(image[None], filters, (1, 1), "SAME")[0])
    return lax.pmean(jnp.mean(lax.psum(jnp.tanh(out.mean((1, 2)) @ weights), "group") ** 2), "batch")


def _normalized(scale, shift, weights, x):
    mean = lax.pmean(x, "batch")
    deviation = x - mean
    seen = scale * deviation * lax.rsqrt(lax.pmean(deviation**2, "batch") + 1e-5) + shift
    return lax.pmean(jnp.sum(jnp.tanh(pdot(seen, weights, "features")) ** 2), "batch")


def _kmeans(centres, point):
    def distances(centres):
        return lax.psum((point - centres) ** 2, "features")

    def turn(centres, _):
        weight = jax.nn.softmax(-distances(centres), axis="clusters")
        total = pdot(weight, point, "points")
        return total / lax.psum(weight, "points"), None

    centres, _ = lax.scan(turn, centres, None, length=3)
    d = distances(centres)
    return lax.pmean(lax.psum(d * jax.nn.softmax(-d, axis="clusters"), "clusters"), "points")


def _stencil(block):
    """Blocks of a field, which exchange the edges of their neighbours in each turn."""

    def edge(u, axis, by):
        n = lax.psum(1, axis)
        return lax.ppermute(u, axis, [(k, (k + by) % n) for k in range(n)])

    def turn(u, _):
        rows = jnp.concatenate([edge(u[-1:], "rows", 1), u, edge(u[:1], "rows", -1)])
        columns = jnp.concatenate([edge(u[:, -1:], "columns", 1), u, edge(u[:, :1], "columns", -1)], 1)
        return u + 0.1 * (rows[2:] + rows[:-2] + columns[:, 2:] + columns[:, :-2] - 4 * u), None

    block, _ = lax.scan(turn, block, None, length=8)
    return lax.pmean(jnp.mean(block**2), ("rows", "columns"))


def _gathered(up, down, x):
    """Each device holds parts of the weights, which are gathered where they are used (ZeRO)."""
    up, down = lax.all_gather(up, "part", tiled=True), lax.all_gather(down, "part", tiled=True)
    return lax.pmean(jnp.mean((jax.nn.relu(x @ up.T) @ down - x) ** 2), "batch")


def _experts(w, v, tokens):
    """Each group of tokens sends to each expert its share, and gets it back."""
    there = lax.all_to_all(tokens, "expert", 0, 0)
    back = lax.all_to_all(pdot(jax.nn.relu(there @ w), v, "hidden"), "expert", 0, 0)
    return lax.pmean(jnp.mean((back - tokens) ** 2), "expert")


def _principal(vector, data):
    def turn(v, _):
        v = pdot(pdot(data, v, "features"), data, "points")
        return v * lax.rsqrt(lax.psum(v**2, "features")), None

    vector, _ = lax.scan(turn, vector, None, length=6)
    return lax.pmean(pdot(data, vector, "features") ** 2, "points")


def _clip(towers, image, text):
    """Every image against every text: those of other devices are gathered."""
    embed = lambda w, x: (lambda e: e / jnp.linalg.norm(e))(pdot(x, w, "features"))  # noqa: E731
    images, texts = embed(towers[0], image), embed(towers[1], text)
    scores = [lax.all_gather(b, "batch") @ a for a, b in ((images, texts), (texts, images))]
    matching = jnp.dot(images, texts)
    return lax.pmean(sum(jax.nn.logsumexp(10 * s) - 10 * matching for s in scores) / 2, "batch")


PROGRAMS: dict[str, tuple[Callable, Any, Callable[[], tuple[Any, ...]], int, bool]] = {
    "network": (
        named_loss,
        (["inputs", "hidden"], ["hidden", "classes"], ["batch", "inputs"], ["batch"]),
        _network_arguments,
        2,
        False,
    ),
    "GPT block": (_block, (["shard", ...], ["batch", ...], ["batch", ...]), _block_arguments, 1, False),
    "convolution": (
        _convolution,
        (["group", ...], ["group", ...], ["batch", ...]),
        lambda: arrays((8, 8, 16, 3, 3), (8, 8, 10), (16, 16, 24, 24)),
        2,
        False,
    ),
    "batch norm": (
        _normalized,
        (["features"], ["features"], ["features", ...], ["batch", "features"]),
        lambda: arrays((256,), (256,), (256, 64), (2048, 256)),
        3,
        False,
    ),
    "k-means": (
        _kmeans,
        (["clusters", "features"], ["points", "features"]),
        lambda: arrays((16, 32), (4096, 32)),
        1,
        True,
    ),
    "stencil": (_stencil, (["rows", "columns", ...],), lambda: arrays((8, 8, 128, 128)), 0, True),
    "ZeRO": (
        _gathered,
        ({0: "part"}, {0: "part"}, ["batch", ...]),
        lambda: arrays((8, 128, 256), (8, 128, 256), (64, 16, 256)),
        2,
        False,
    ),
    "experts": (
        _experts,
        ({0: "expert", 2: "hidden"}, ["expert", "hidden", ...], {0: "expert"}),
        lambda: arrays((8, 128, 256), (8, 256, 128), (8, 8, 32, 128)),
        2,
        False,
    ),
    "principal component": (
        _principal,
        (["features"], ["points", "features"]),
        lambda: arrays((512,), (4096, 512)),
        0,
        True,
    ),
    "CLIP": (
        _clip,
        (["features", ...], ["batch", "features"], ["batch", "features"]),
        lambda: (list(arrays((256, 64), (256, 64))), *arrays((512, 256), (512, 256))),
        1,
        False,
    ),
}
