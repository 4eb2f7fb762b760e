"""Programs in the manner of 2021 to 2023 run unmodified, and give what they gave under the JAX of their time.

``zoo/README.md`` lists them; ``zoo.json`` was recorded by ``record_zoo.py``.  What ``check`` says of a program is what
happens when it runs.
"""

import functools
import hashlib
import json
import re
from pathlib import Path

import forks
import numpy as np
import pytest

from xmap_compat.tools.check import findings

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "zoo").glob("*.py"))
RECORDED = json.loads((HERE / "zoo.json").read_text())
FAILING = {"debugging"}

programs = pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)


@functools.cache
def by_hand():
    """The uses of each program that need a hand."""
    dying = [finding for finding in findings.check(PROGRAMS).unguarded if finding.fails]
    return {path.stem: [finding for finding in dying if finding.path == path] for path in PROGRAMS}


def assert_close(found, recorded):
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys()
        for key in recorded:
            assert_close(found[key], recorded[key])
    elif isinstance(recorded, (list, float)):
        np.testing.assert_allclose(flat(found), flat(recorded), rtol=1e-4, atol=1e-5)
    else:
        assert found == recorded


def flat(value):
    return [x for each in value for x in flat(each)] if isinstance(value, list) else [value]


def test_the_zoo_is_what_was_recorded():
    assert {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in PROGRAMS} == {
        name: entry["sha256"] for name, entry in RECORDED.items()
    }
    assert {entry["jax"] for entry in RECORDED.values()} == {"0.4.30", "0.4.13"}
    readme = (HERE / "zoo" / "README.md").read_text()
    assert [path.name for path in PROGRAMS] == sorted(re.findall(r"`(\w+\.py)`", readme))


@programs
def test_a_program_runs_unmodified_and_check_agrees(path, tmp_path):
    done = forks.run(path, cwd=tmp_path, warn="ignore", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    hands = by_hand()[path.stem]
    assert (done.returncode == 0) == (hands == []) == (path.stem not in FAILING), done.stderr
    if done.returncode == 0:
        assert_close(json.loads(done.stdout.splitlines()[-1]), RECORDED[path.stem]["printed"])
    else:
        (use,) = hands
        assert f'File "{path}", line {use.line}, in' in done.stderr
        assert f"NotImplementedError: {use.gone.name} is no longer in JAX" in done.stderr
