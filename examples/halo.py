"""Heat flows over a plate that is cut into blocks: a stencil with halo exchange on a mesh of 4 x 2 devices.

The plate is cut into rows and columns of blocks, which are named axes.  The program is written for one block:
``ppermute`` brings the edges of its four neighbours, and the update is the textbook's.  Upper and lower border
of the plate are kept at zero; left and right border are one seam, so that the plate is a tube.
``axis_resources`` says which blocks lie on which device, and the result must be that of NumPy on the whole plate.

    python examples/halo.py [--steps 400]
"""

import argparse
import os
import sys
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import mesh, xmap

# Eight fake devices share few cores: every program is waited for before the next begins.
jax.config.update("jax_cpu_enable_async_dispatch", False)

HEIGHT, WIDTH = 64, 96
ROWS, COLUMNS = 8, 4  # of blocks
RATE = 0.2  # diffusivity * time step / spacing**2; stable up to 0.25
MAX_DIFFERENCE = 1e-5

# The only thing that changes between the runs.
RUNS = {
    "one device": {},
    "rows of blocks over 4 devices": {"row": "x"},
    "rows over 4, columns over 2": {"row": "x", "column": "y"},
    "rows over 8": {"row": ("x", "y")},
}

# f32[ROWS, COLUMNS, height of a block, width of a block]
BLOCKS = ["row", "column", ...]


def from_previous(edge, axis, ring=False):
    """What the block before this one on an axis has for an edge; the first block gets the last's, or zeros."""
    size = lax.psum(1, axis)
    return lax.ppermute(
        edge, axis, [(k, (k + 1) % size) for k in range(size if ring else size - 1)]
    )


def from_next(edge, axis, ring=False):
    """What the block after this one has; the last block gets the first's, or zeros."""
    size = lax.psum(1, axis)
    return lax.ppermute(
        edge, axis, [((k + 1) % size, k) for k in range(size if ring else size - 1)]
    )


def named_step(block):
    """One explicit step of the heat equation for f32[height, width]."""
    above = from_previous(block[-1:], "row")
    below = from_next(block[:1], "row")
    left = from_previous(block[:, -1:], "column", ring=True)
    right = from_next(block[:, :1], "column", ring=True)
    tall = jnp.concatenate([above, block, below], axis=0)
    wide = jnp.concatenate([left, block, right], axis=1)
    return block + RATE * (tall[:-2] + tall[2:] + wide[:, :-2] + wide[:, 2:] - 4 * block)


def named_advance(block, steps):
    """Several steps, and the heat that is left on the whole plate."""
    block = lax.fori_loop(0, steps, lambda _, b: named_step(b), block)
    return block, lax.psum(block.sum(), ("row", "column"))


def numpy_step(plate):
    """The same step on the whole plate, in float64."""
    vertical = np.pad(plate, ((1, 1), (0, 0)))
    return plate + RATE * (
        vertical[:-2]
        + vertical[2:]
        + np.roll(plate, 1, axis=1)
        + np.roll(plate, -1, axis=1)
        - 4 * plate
    )


def cut(plate):
    """f32[HEIGHT, WIDTH] as blocks."""
    return plate.reshape(ROWS, HEIGHT // ROWS, COLUMNS, WIDTH // COLUMNS).swapaxes(1, 2)


def join(blocks):
    return np.asarray(blocks).swapaxes(1, 2).reshape(HEIGHT, WIDTH)


def first_plate():
    """Two hot spots, one of them on the seam."""
    plate = np.zeros((HEIGHT, WIDTH), np.float32)
    plate[20:30, 30:42] = 1
    plate[40:52, -6:] = plate[40:52, :6] = 2
    return plate


def picture(plate):
    """Small, in characters."""
    coarse = plate.reshape(8, HEIGHT // 8, 48, WIDTH // 48).mean((1, 3))
    shades = np.array(list(" .:-=+*#"))
    return ["    " + "".join(row) for row in shades[(coarse / coarse.max() * 7).astype(int)]]


def simulate(resources, steps):
    """The plate after some steps, and the blocks as the devices hold them."""
    advance = xmap(named_advance, (BLOCKS, {}), (BLOCKS, {}), axis_resources=resources)
    blocks = cut(first_plate())
    for done, now in zip([0, steps // 2], [steps // 2, steps]):
        blocks, heat = jax.block_until_ready(advance(blocks, now - done))
        print(f"  step {now:4d}  heat {float(heat):.2f}")
    return join(blocks), blocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    steps = max(parser.parse_args().steps, 2)
    expected = first_plate().astype(np.float64)
    for _ in range(steps):
        expected = numpy_step(expected)
    print(
        f"NumPy: heat {first_plate().sum():.2f} at first, {expected.sum():.2f} after {steps} steps"
    )
    differences = []
    with mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        for title, resources in RUNS.items():
            print(f"{title}: axis_resources={resources}")
            begin = time.perf_counter()
            plate, blocks = simulate(resources, steps)
            differences.append(np.abs(plate - expected).max())
            part = blocks.addressable_shards[0].data.shape
            print(
                f"  on each device {part[0]} x {part[1]} blocks  ({time.perf_counter() - begin:.1f} s)"
            )
    print(*picture(plate), sep="\n")
    print(f"largest difference from NumPy: {max(differences):.1e}")
    if max(differences) <= MAX_DIFFERENCE:
        print(f"passed: {max(differences):.1e} <= {MAX_DIFFERENCE}")
        return 0
    print(f"FAILED: want a difference of at most {MAX_DIFFERENCE}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
