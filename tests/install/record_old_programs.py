"""Run old programs under the JAX of their time, and record what they print: ``python record_old_programs.py``.

Each run records the programs of the JAX that runs (and of the optax beside it) in ``recorded.json``, and keeps the
others: the hash of the source, and the last line, which is JSON.
"""

import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "helpers"))
from old_programs import FOLDER, PROGRAMS

RECORDED = FOLDER / "recorded.json"


def run(path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "ignore", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def record(path, jax):
    source = path.read_bytes()
    entry = {"jax": jax, "sha256": hashlib.sha256(source).hexdigest(), "printed": run(path)}
    if b"import optax" in source:
        entry["optax"] = importlib.metadata.version("optax")
    return entry


if __name__ == "__main__":
    jax = importlib.metadata.version("jax")
    kept = json.loads(RECORDED.read_text())
    lines = []
    for path, recorded_with, _ in PROGRAMS.values():
        if not recorded_with:
            continue
        if recorded_with == jax:
            kept[path.stem] = record(path, jax)
        lines.append(f"{json.dumps(path.stem)}: {json.dumps(kept[path.stem])}")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
