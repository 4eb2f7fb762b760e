"""Record what jax 0.4.30 gives for undeclared results: ``python record_undeclared.py``, with that jax.

Writes ``undeclared_0_4_30.json``.
"""

import json
import os
import pathlib
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
warnings.simplefilter("ignore")

import jax
import numpy as np
import undeclared_programs
from jax.experimental.maps import xmap

if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    with jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        found = {name: undeclared_programs.outcome(name, xmap) for name in undeclared_programs.PROGRAMS}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    path = pathlib.Path(__file__).parent / "undeclared_0_4_30.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
