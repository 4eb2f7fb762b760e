"""Particles that attract each other, as all pairs over two named axes; arrays of single devices, clip by old names,
and an energy that is kept."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.maps import SerialLoop, xmap
from jax.sharding import Mesh

N, DT = 16, 0.05


class System(NamedTuple):
    position: jnp.ndarray
    velocity: jnp.ndarray
    mass: jnp.ndarray


def force(mine, other, mass):
    apart = other - mine
    distance = jnp.clip(jnp.sqrt(jnp.sum(apart**2) + 1e-6), a_min=0.1, a_max=None)
    return lax.psum(mass * apart / distance**3, "source")


def energy(system):
    pairs = xmap(
        lambda a, b, m, n: m * n / jnp.clip(jnp.linalg.norm(a - b) + 1e-6, a_min=0.1, a_max=10.0),
        in_axes=(["i", ...], ["j", ...], ["i"], ["j"]),
        out_axes=["i", "j"],
    )
    kinetic = 0.5 * jnp.sum(system.mass * jnp.sum(system.velocity**2, axis=1))
    each = pairs(system.position, system.position, system.mass, system.mass)
    return kinetic - 0.5 * jnp.sum(each * (1 - jnp.eye(N)))


def move(forces):
    def step(system):
        acceleration = forces(system.position, system.position, system.mass)
        velocity = system.velocity + DT * acceleration
        return System(system.position + DT * velocity, velocity, system.mass)

    return step


def main():
    rng = np.random.default_rng(2)
    system = System(
        *jax.tree_map(
            jnp.asarray, [rng.normal(size=(N, 2)).astype(np.float32), np.zeros((N, 2), np.float32)]
        ),
        jnp.asarray(rng.uniform(0.5, 1.5, size=N).astype(np.float32)),
    )
    assert all(isinstance(x, jax.Array) for x in jax.tree_leaves(system))
    assert isinstance(jax.core.get_aval(system.mass), ShapedArray)
    energies = [float(energy(system))]
    for resources in (
        {},
        {"target": "x"},
        {"target": "x", "source": "y"},
        {"target": SerialLoop(4)},
    ):
        forces = xmap(
            force,
            in_axes=(["target", ...], ["source", ...], ["source"]),
            out_axes=["target", ...],
            axis_resources=resources,
        )
        with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
            new = move(forces)(System(*(np.asarray(x) for x in system)))
        system = System(*(jax.device_put(np.asarray(x), jax.devices()[0]) for x in new))
        energies.append(float(energy(system)))
    flat, treedef = jax.tree_flatten(system)
    restored = jax.tree_unflatten(treedef, flat)
    print(
        json.dumps(
            {
                "energies": energies,
                "centre": np.asarray(restored.position.mean(axis=0)).round(5).tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
