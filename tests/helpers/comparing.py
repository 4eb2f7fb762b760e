"""How results are compared with those of an oracle."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_same(result, expected, tolerance=3e-4):
    """Equal trees, shapes and dtypes, and nearly equal values; what differs is named by its path."""

    def compare(path, got, want):
        place = jax.tree_util.keystr(path)
        assert (jnp.shape(got), jnp.result_type(got)) == (jnp.shape(want), jnp.result_type(want)), (
            place
        )
        if jnp.result_type(got) != jax.dtypes.float0:
            np.testing.assert_allclose(
                got, want, rtol=tolerance, atol=tolerance / 10, err_msg=place
            )

    jax.tree_util.tree_map_with_path(compare, result, expected)


def assert_close(result, expected, rtol=1e-4, atol=1e-5):
    """Equal trees and nearly equal values, whatever their dtypes."""
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=rtol, atol=atol),
        result,
        expected,
    )
