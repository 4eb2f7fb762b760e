"""A Fourier transform in two dimensions: rows on the devices, then columns, by all_to_all."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import maps


def fft2_of_rows(row):
    row = jnp.fft.fft(row)
    column = lax.all_to_all(row, "i", split_axis=0, concat_axis=0)  # the transpose
    return jnp.fft.fft(column)


def power(row):
    spectrum = jnp.abs(fft2_of_rows(row)) ** 2
    return spectrum / lax.psum(spectrum.sum(), "i")


fft2 = maps.xmap(fft2_of_rows, in_axes={0: "i"}, out_axes={1: "i"}, axis_resources={"i": "rows"})
density = maps.xmap(power, in_axes={0: "i"}, out_axes={1: "i"}, axis_resources={"i": "rows"})

if __name__ == "__main__":
    image = np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)
    with maps.Mesh(np.array(jax.devices()), ("rows",)):
        spectrum, share = fft2(image.astype(np.complex64)), density(image.astype(np.complex64))
    expected = np.fft.fft2(image)
    np.testing.assert_allclose(spectrum, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        share, np.abs(expected) ** 2 / (np.abs(expected) ** 2).sum(), rtol=1e-3, atol=1e-6
    )
    print("largest coefficient", np.abs(spectrum).max())
