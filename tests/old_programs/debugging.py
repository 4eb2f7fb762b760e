"""A program that prints from within the device by host_callback: it needs a hand, and fails where check says so."""

import json
import warnings

warnings.simplefilter("ignore")

import jax.numpy as jnp
from jax.experimental import host_callback as hcb
from jax.experimental.maps import xmap


def body(x):
    y = x * 2
    seen = hcb.id_print(y, what="y")
    return seen + 1


def main():
    out = xmap(lambda x: x + 1, in_axes=["i"], out_axes=["i"])(jnp.arange(3.0))
    value = body(out.sum())
    print(json.dumps({"out": out.tolist(), "value": float(value)}))


if __name__ == "__main__":
    main()
