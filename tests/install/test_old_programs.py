"""Whole programs in the manner of 2021 to 2023 run unmodified, and give what they gave under the JAX of their time.

``old_programs/README.md`` lists them; ``recorded.json`` was written by ``record_old_programs.py``.  What ``check`` says
of a program is what happens when it runs.
"""

import contextlib
import functools
import hashlib
import io
import json
import re
from pathlib import Path

import forks
import numpy as np
import old_programs
import pytest

from xmap_compat.__main__ import main

RECORDED = json.loads((old_programs.FOLDER / "recorded.json").read_text())
FAILING = {"debugging"}


@functools.cache
def by_hand():
    """The uses of each program that need a hand, as check prints them: the line and the name."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["check", "--diff", *map(str, old_programs.RECORDED)])
    uses = {path: [] for path in old_programs.RECORDED}
    for path, line, name in re.findall(r"(?m)^(/.+?):(\d+):\d+: (\S+): ", printed.getvalue()):
        uses[Path(path)].append((line, name))
    return uses


def assert_close(found, recorded):
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys()
        for key, value in recorded.items():
            assert_close(found[key], value)
    elif isinstance(recorded, (list, float)):
        np.testing.assert_allclose(found, recorded, rtol=1e-4, atol=1e-5)
    else:
        assert found == recorded


def test_each_program_stands_in_the_table_and_is_what_was_recorded():
    names = {path.name for path in old_programs.FOLDER.iterdir()}
    assert names - {"README.md", "recorded.json", "__pycache__"} == old_programs.PROGRAMS.keys()
    assert list(RECORDED) == [path.stem for path in old_programs.RECORDED]
    for name, entry in RECORDED.items():
        program = old_programs.PROGRAMS[f"{name}.py"]
        assert entry["sha256"] == hashlib.sha256(program.path.read_bytes()).hexdigest()
        assert entry["jax"] == program.recorded_with


@pytest.mark.parametrize("path", old_programs.RECORDED, ids=lambda path: path.stem)
def test_a_program_runs_unmodified_and_check_agrees(path, tmp_path):
    done = forks.run(path, cwd=tmp_path, warn="ignore", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    hands = by_hand()[path]
    assert (done.returncode == 0) == (hands == []) == (path.stem not in FAILING), done.stderr
    if done.returncode == 0:
        assert_close(json.loads(done.stdout.splitlines()[-1]), RECORDED[path.stem]["printed"])
        return
    ((line, name),) = hands
    assert f'File "{path}", line {line}, in' in done.stderr
    assert f"NotImplementedError: {name} is no longer in JAX" in done.stderr
