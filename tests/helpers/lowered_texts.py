"""Lowers many programs and prints the text of each: a script that ``test_determinism.py`` runs in several processes.

``python lowered_texts.py PICKLE`` lowers the programs of this file, and pairs of a random program and an assignment
from a pickle; it prints the texts as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import sys

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import Mesh, SerialLoop, einsum, serial_loop, xmap

# ------------------------------------------------------------------------------- bodies


@jax.jit
def called_often(x):
    return jnp.tanh(x) * x


def many_values(a, b, c):
    """Many values over many combinations of axes, of which several leave each loop."""
    values = [jnp.sin(a * k) + jnp.cos(b * k) for k in range(1, 5)]
    values += [called_often(c * k) * v for k, v in enumerate(values, 1)]
    return [v * w for v, w in zip(values, reversed(values))], [jnp.exp(a), jnp.exp(b), jnp.exp(c)]


def reductions(a, b, c):
    total = lax.psum(a * b * c, ("alpha", "beta", "gamma"))
    mean = lax.pmean(a * b, ("beta", "alpha"))
    largest = lax.pmax(b * c, ("gamma", "beta"))
    gathered = lax.all_gather(a * c, ("gamma", "alpha")).sum()
    return total, (mean, largest), gathered, lax.axis_index(("gamma", "alpha", "beta"))


def exchanges(a, b, c):
    moved = lax.ppermute(a * b, "alpha", [(k, (k + 3) % 8) for k in range(8)])
    shuffled = lax.pshuffle(b * c, "beta", [1, 0, 3, 2])
    return moved, shuffled, lax.psum_scatter(jnp.arange(8.0) * a, "alpha")


def contractions(a, b, c):
    product = einsum("{alpha},{alpha,beta},{beta,gamma}->{gamma}", a, a * b, b * c)
    return product, lax.psum(a * b, "alpha")


@jax.custom_vjp
def scaled(a, b, c):
    return a * b + lax.psum(c, "gamma")


def _scaled_forward(a, b, c):
    return scaled(a, b, c), (a, b, c)


def _scaled_backward(saved, ct):
    a, b, c = saved
    return ct * b, ct * a, lax.psum(ct, "gamma") * jnp.cos(c)


scaled.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_jvp
def squared(a, b, c):
    return a * b * c


squared.defjvp(lambda primals, tangents: (squared(*primals), sum(tangents) * squared(*primals)))


def custom_rules(a, b, c):
    own = jax.grad(lambda a: jnp.sum(scaled(a, b, c) ** 2))(a)
    values = scaled(a, b, c), squared(a, b, c)
    root = lax.custom_root(lambda x: x - a * b, c, _newton, lambda g, y: y / g(1.0))
    return *values, own, root


def _newton(f, x):
    return x - f(x)


def control_flow(a, b, c):
    looped = lax.fori_loop(0, 3, lambda k, x: jnp.sin(x) + a * b, c)
    chosen = lax.cond(jnp.sum(a) > 0, lambda x, y: (x * b, y), lambda x, y: (x, y * c), a, b)

    def unfinished(state):
        return state[0] < lax.pmax(a, "alpha")

    def step(state):
        return state[0] + 1, state[1] * b * c

    until = lax.while_loop(unfinished, step, (a, c))
    return looped, chosen, until, jax.checkpoint(lambda x: jnp.sin(x) * b)(a * c)


def nested(a, b, c):
    def placed(x, y):
        return (x * a + y * b) * c + lax.pmean(x, "delta")

    def summed(x, y):
        return lax.psum(x * a + y * b, ("delta", "epsilon"))

    axes = ["delta"], ["epsilon"]
    resources = {"delta": "x", "epsilon": SerialLoop(2)}
    placed = xmap(placed, axes, ["delta", "epsilon"], axis_resources=resources)
    summed = xmap(summed, axes, {}, axis_resources={"delta": "x"})
    first = placed(jnp.arange(4.0), jnp.arange(2.0))
    return first, summed(jnp.arange(8.0), jnp.arange(3.0))


NAMES = ("alpha", "beta", "gamma")
SIZES = {"alpha": 8, "beta": 4, "gamma": 6}
LOOPS = {"alpha": ("x", SerialLoop(2)), "beta": SerialLoop(2), "gamma": SerialLoop(3)}
SHARED = {"alpha": ("x", "loop"), "gamma": "y"}
SPLIT = {"alpha": ("x", "y"), "beta": "z"}
ASSIGNMENTS = {
    many_values: [{}, LOOPS, SHARED, SPLIT],
    reductions: [SPLIT, {"gamma": "y", "alpha": ("z", "x")}],
    exchanges: [SPLIT, {"beta": "y", "alpha": ("z", "x")}],
    contractions: [SPLIT, {"gamma": "y", "alpha": ("z", "x")}],
    custom_rules: [SPLIT, {"alpha": ("x", SerialLoop(2)), "beta": SerialLoop(4), "gamma": "y"}],
    control_flow: [SPLIT, {"beta": SerialLoop(2), "gamma": ("y", SerialLoop(3))}],
    nested: [{"alpha": "y"}, {"alpha": ("y", SerialLoop(2)), "beta": SerialLoop(2), "gamma": "z"}],
}


# --------------------------------------------------------------------------------- texts


def own_texts():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    args = [np.ones(SIZES[name], np.float32) for name in NAMES]
    for body, assignments in ASSIGNMENTS.items():
        for k, resources in enumerate(assignments):
            # Every result is broadcast along the axes that it does not vary over.
            mapped = xmap(body, tuple([n] for n in NAMES), [*NAMES, ...], axis_resources=resources)
            with mesh, serial_loop("loop", 2):
                yield f"{body.__name__} {k}", mapped.lower(*args).as_text()
                if body is not control_flow:  # a while loop has no backward derivative
                    yield f"gradient of {body.__name__} {k}", gradient_text(mapped, args)


def gradient_text(mapped, args):
    def total(results):
        floats = [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.floating)]
        return sum(map(jnp.sum, floats))

    gradient = jax.grad(lambda *args: total(mapped(*args)), argnums=(0, 1, 2))
    return jax.jit(gradient).lower(*args).as_text()


def random_texts(pairs):
    for k, (program, assignment) in enumerate(pairs):
        with assignment.context():
            mapped = program.xmapped(assignment)
            yield f"random program {k}", jax.jit(mapped).lower(*program.arrays()).as_text()


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        pairs = pickle.load(file)
    # Objects lie at other addresses in every process.
    kept = [object() for _ in range(hash("some string") % 10_000)]
    json.dump(dict(own_texts()) | dict(random_texts(pairs)), sys.stdout)
