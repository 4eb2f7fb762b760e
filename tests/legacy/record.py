"""Record what jax 0.4.30's xmap makes of the programs: ``python record.py``, in an environment with that jax.

Writes ``recorded.json`` (for each program and assignment: the error, or the structure, types and shardings of the
result, and what was noted) and ``recorded.npz`` (the values, once for assignments that agree bit for bit).
"""

import json
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from outcomes import checksum, outcome_of
from programs import PROGRAMS

HERE = pathlib.Path(__file__).parent


def record(program):
    """The outcomes of one program under its assignments, and the values by name."""
    entry, arrays = {}, {}
    args = program.make_args()
    for assignment in program.on:
        difference = program.difference(assignment)
        if difference is not None and difference.hangs:
            entry[assignment] = {"skipped": difference.why}
            continue
        outcome, values = outcome_of(program, assignment)
        for k, value in enumerate(values):
            same = [
                n
                for n, a in arrays.items()
                if a.dtype == value.dtype
                and a.tobytes() == value.tobytes()
                and a.shape == value.shape
            ]
            name = same[0] if same else f"{program.name}/{len(arrays)}"
            arrays[name] = value
            outcome["leaves"][k]["value"] = int(name.rpartition("/")[2])
        entry[assignment] = outcome
    return {"arguments": checksum(args), "under": entry}, arrays


def main():
    assert jax.__version__ == "0.4.30", jax.__version__
    jax.config.update("jax_threefry_partitionable", True)
    recorded, arrays = {}, {}
    for name, program in PROGRAMS.items():
        recorded[name], values = record(program)
        arrays.update(values)
        if "-v" in sys.argv:
            print(
                name,
                {a: o.get("error", "ok") for a, o in recorded[name]["under"].items()},
                flush=True,
            )
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items()]
    (HERE / "recorded.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(HERE / "recorded.npz", **arrays)


if __name__ == "__main__":
    main()
