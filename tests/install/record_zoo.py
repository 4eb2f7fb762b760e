"""Run the programs of the zoo under the JAX of their time, and record what they print: ``python record_zoo.py``.

Each run records the programs of the JAX that runs (and of the optax beside it) in ``zoo.json``, and keeps the others:
the hash of the source, and the last line, which is JSON.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
RELEASE = "0.4.30"
OTHER_RELEASES = {"placement": "0.4.13"}  # what jax 0.4.30 had removed


def run(path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "ignore", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("\n")[-2])


if __name__ == "__main__":
    jax = importlib.metadata.version("jax")
    recorded = json.loads((HERE / "zoo.json").read_text())
    paths = sorted((HERE / "zoo").glob("*.py"))
    for path in paths:
        if OTHER_RELEASES.get(path.stem, RELEASE) != jax:
            continue
        source = path.read_bytes()
        recorded[path.stem] = {
            "jax": jax,
            "sha256": hashlib.sha256(source).hexdigest(),
            "printed": run(path),
        }
        if b"import optax" in source:
            recorded[path.stem]["optax"] = importlib.metadata.version("optax")
    lines = [f"{json.dumps(path.stem)}: {json.dumps(recorded[path.stem])}" for path in paths]
    (HERE / "zoo.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
