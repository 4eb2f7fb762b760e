"""Run the programs of the zoo under jax 0.4.30, and record what they print: ``python record_zoo.py``, with that jax.

Writes ``zoo.json``: for each program the hash of its source, and its last line, which is JSON.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax

HERE = pathlib.Path(__file__).parent

if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    recorded = {}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for path in sorted((HERE / "zoo").glob("*.py")):
        command = [sys.executable, "-W", "ignore", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        recorded[path.stem] = {
            "jax": jax.__version__,
            "sha256": digest,
            "printed": json.loads(done.stdout.split("\n")[-2]),
        }
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded.items()]
    (HERE / "zoo.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
