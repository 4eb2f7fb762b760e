"""Record what jax 0.4.30 gives for undeclared results: ``PYTHONPATH=../helpers python record_undeclared.py``, with it.

Writes ``undeclared_0_4_30.json`` and ``undeclared_chains_0_4_30.json``.
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
import undeclared_chains
import undeclared_hostile
import undeclared_programs
from jax.experimental.maps import xmap


def written(name, rows):
    lines = [f"{json.dumps(row)}: {json.dumps(value)}" for row, value in rows.items()]
    (pathlib.Path(__file__).parent / f"{name}_0_4_30.json").write_text(
        "{\n" + ",\n".join(lines) + "\n}\n"
    )


def recorded(run, *args):
    """What the devices hold of each result (once, if it is the same on all), or the kind of the error."""
    try:
        buffers = undeclared_chains.buffers(run(*args))
    except Exception as error:
        return type(error).__name__
    short = [[np.round(x.astype(float), 4).tolist() for x in own] for own in buffers]
    return [own[:1] if all(x == own[0] for x in own) else own for own in short]


if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    with jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        outcomes = {n: undeclared_programs.outcome(n, xmap) for n in undeclared_programs.PROGRAMS}
        written("undeclared", outcomes)
        rows = {}
        for name in undeclared_chains.CHAINS:
            rows[name] = {}
            for collective in undeclared_chains.COLLECTIVES:
                rows[name][collective] = recorded(undeclared_chains.chain, name, xmap, [collective])
        for name in undeclared_hostile.PROGRAMS:
            rows[name] = recorded(undeclared_hostile.run, name, xmap)
        written("undeclared_chains", rows)
