"""Python processes that tests start."""

import os
import subprocess
import sys


def run(*arguments, cwd, **variables):
    """A Python process with warnings as errors; the tests' own settings of JAX do not reach it."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))
    }
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
