"""check agrees with what happens: a program that it calls clean runs, and one that it does not fails where it said.

``hostile_programs.txt`` has small programs that reach names of JAX in all sorts of ways.  They run in one process.
"""

import json
import re
import textwrap
from pathlib import Path

import forks
import pytest

from xmap_compat.tools.check import resolve
from xmap_compat.tools.check.judge import needing_install
from xmap_compat.tools.check.report import check_files
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.old_check.advice import BY_HAND, UNSEEN

TEXT = (Path(__file__).parent / "hostile_programs.txt").read_text()
PROGRAMS = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^### |\Z)", TEXT))
# They pass a module on, or run a text, and what they say without that is right.
ALSO_UNSEEN = {"mock_object", "comprehension_hides", "eval_string", "unpack_star", "inspect_getmembers", "exec_code"}
# Runs each program as its own main module; prints its end: what it printed, or its error's lines.
DRIVER = """
    import contextlib, io, json, sys, traceback
    ends = {}
    for path in sys.argv[1:]:
        printed = io.StringIO()
        try:
            with open(path) as file, contextlib.redirect_stdout(printed):
                exec(compile(file.read(), path, "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            ends[path] = {"lines": [], "error": str(error)}
            while error is not None:  # what is raised where another is handled
                lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
                ends[path]["lines"] += lines[-1:]
                error = error.__context__
        else:
            ends[path] = {"lines": [], "printed": printed.getvalue()}
    print(json.dumps(ends))
"""


def ends_of(programs, folder, plain=False):
    """How each program ends, under install() or plain Python."""
    folder.mkdir()
    (folder / "driver").write_text(textwrap.dedent(DRIVER))
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    paths = [str(folder / f"{name}.py") for name in programs]
    done = forks.run(folder / "driver", *paths, cwd=folder, plain=plain, warn="ignore")
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    return {name: ends[path] for name, path in zip(programs, paths)}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return ends_of(PROGRAMS, tmp_path_factory.mktemp("programs") / "all")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The lines of each program that need a hand; and those where check cannot follow."""
    folder = tmp_path_factory.mktemp("checked")
    for name, source in PROGRAMS.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "in_another_process", forks.answer)
        uses = check_files(str(folder / f"{name}.py") for name in PROGRAMS).uses
    lines = {name: (set(), set()) for name in PROGRAMS}
    for use in uses:
        by_hand, unseen = lines[Path(use.place.path).stem]
        if use.advice.status in (*BY_HAND, UNSEEN):
            (unseen if use.advice.status == UNSEEN else by_hand).add(use.place.line)
    return lines


@pytest.mark.parametrize("name", PROGRAMS)
def test_clean_means_that_it_runs_and_otherwise_it_fails_where_check_said(name, ends, said):
    failed = set(ends[name]["lines"])
    by_hand, unseen = said[name]
    assert bool(unseen) == (name.startswith("unseen_") or name in ALSO_UNSEEN), unseen
    if name.startswith("unseen_"):
        assert failed and not by_hand, ends[name]
    else:
        assert (failed & by_hand) if failed else by_hand == set(), ends[name]


@pytest.fixture(scope="module")
def fixed():
    return {name: fix.fixed(source.encode(), f"{name}.py").decode() for name, source in PROGRAMS.items()}


def test_what_fix_writes_ends_in_the_same_way(fixed, ends, tmp_path):
    changed = {name: source for name, source in fixed.items() if source != PROGRAMS[name]}
    assert len(changed) > 15
    found = ends_of(changed, tmp_path / "fixed")
    for name in changed:
        assert {**found[name], "error": ""} == {**ends[name], "error": ""}


@pytest.fixture(scope="module")
def left(fixed, tmp_path_factory):
    """Of each fixed program, what check says that needs install(), or a hand."""
    folder = tmp_path_factory.mktemp("left")
    paths = [folder / f"{name}.py" for name in PROGRAMS]
    for path in paths:
        path.write_text(fixed[path.stem])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "in_another_process", forks.answer)
        checked = check_files(map(str, paths))
    left = {Path(r.path).stem: needing_install(r, checked.facts) for r in checked.readings}
    hands = {Path(use.place.path).stem for use in checked.uses if use.advice.status in (*BY_HAND, UNSEEN)}
    return left, hands


def test_a_fixed_program_runs_under_plain_python_or_what_is_left_is_said(fixed, ends, left, tmp_path):
    needing, hands = left
    found = ends_of(fixed, tmp_path / "plain", plain=True)
    for name in PROGRAMS:
        runs, ran = "printed" in found[name], "printed" in ends[name]
        assert runs or needing[name] or name in hands, found[name]
        if ran and runs:
            assert found[name] == ends[name]
        if name not in {"mock_object"}:  # whose name is replaced before it is used
            assert not (runs and needing[name]), needing[name]
