"""A program is lowered to the same text in every process.

Processes of one program on several machines must compile the same module, and a persistent compilation cache finds
what another process has compiled only if the text is the same.
"""

import difflib
import json
import os
import pathlib
import pickle
import subprocess
import sys

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_programs import assignments, programs

HERE = pathlib.Path(__file__).parents[1]
RANDOM_PROGRAMS = 6


def drawn_programs(count):
    pairs = []

    @seed(1)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=HealthCheck,
    )
    @given(st.data())
    def collect(data):
        program = data.draw(programs())
        pairs.append((program, data.draw(assignments(program))))

    collect()
    return pairs


def test_the_text_is_the_same_in_every_process(tmp_path):
    (tmp_path / "pairs").write_bytes(pickle.dumps(drawn_programs(RANDOM_PROGRAMS)))
    command = [sys.executable, str(HERE / "helpers" / "lowered_texts.py"), str(tmp_path / "pairs")]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(k)},
            stdout=subprocess.PIPE,
        )
        for k in range(2)
    ]
    first, second = (json.loads(child.communicate(timeout=300)[0]) for child in children)
    assert len(first) > RANDOM_PROGRAMS
    assert second.keys() == first.keys()
    for name, text in second.items():
        lines = difflib.unified_diff(first[name].splitlines(), text.splitlines(), lineterm="", n=1)
        assert text == first[name], "\n".join([name, *list(lines)[:40]])
