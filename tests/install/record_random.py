"""Record what jax 0.4.30 samples of named shapes: ``python record_random.py``, with that jax.

Writes ``random_0_4_30.npz``.  ``jax_threefry_partitionable`` is set, as it is by default today.
"""

import os
import pathlib
import types
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
warnings.simplefilter("ignore")

import jax
import named_random
import numpy as np
from jax.core import NamedShape
from jax.experimental.maps import xmap

if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    jax.config.update("jax_threefry_partitionable", True)
    n = types.SimpleNamespace(
        random=jax.random, initializers=jax.nn.initializers, NamedShape=NamedShape
    )
    values = {}
    for case in named_random.cases():
        jax.clear_caches()  # its shapes are equal, and so share programs, whatever the order of their names
        values[case] = np.asarray(named_random.run(case, n, xmap))
    np.savez_compressed(pathlib.Path(__file__).parent / "random_0_4_30.npz", **values)
    print(len(values), "cases")
