"""check finds what JAX removed: on programs that reach it in all sorts of ways, counted against what running them does.

``hostile_programs.txt`` has them.  They run in one process under plain Python, which mends JAX between two of them.
"""

import collections
import json
import re
import textwrap
from pathlib import Path

import forks
import pytest

from xmap_compat.tools.check import findings

ROOT = Path(__file__).parents[2]
TEXT = (Path(__file__).parent / "hostile_programs.txt").read_text()
PROGRAMS = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^### |\Z)", TEXT))
# Runs each program as its own main module; prints its end: what it printed, or its error's lines.
DRIVER = """
    import contextlib, io, json, os, sys, traceback
    modules = {m: dict(vars(m)) for n, m in sys.modules.items() if n.split(".")[0] == "jax"}
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
                ends[path]["lines"] += lines
                error = error.__context__
        else:
            ends[path] = {"lines": [], "printed": printed.getvalue()}
        for module, values in modules.items():
            for name in set(vars(module)) - set(values):
                delattr(module, name)
            vars(module).update(values)
    print(json.dumps(ends))
"""


def ends_of(programs, folder, plain=False):
    """How each program ends, under install() or plain Python."""
    folder.mkdir(exist_ok=True)
    (folder / "driver").write_text(textwrap.dedent(DRIVER))
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    paths = [str(folder / f"{name}.py") for name in programs]
    done = forks.run(folder / "driver", *paths, cwd=folder, plain=plain, warn="ignore")
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    return {name: ends[path] for name, path in zip(programs, paths)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def plain(folder):
    return ends_of(PROGRAMS, folder / "plain", plain=True)


@pytest.fixture(scope="module")
def checked(folder):
    (folder / "checked").mkdir()
    for name, source in PROGRAMS.items():
        (folder / "checked" / f"{name}.py").write_text(source)
    return findings.check([folder / "checked"])


def by_program(found):
    programs = collections.defaultdict(list)
    for finding in found:
        programs[finding.path.stem].append(finding)
    return programs


def at_its_line(found, ends):
    """Whether something was found in a statement that ended the program."""
    return any(
        first <= line <= last for finding in found for first, last in [finding.statement] for line in ends["lines"]
    )


# What check does not find in its place, and its false alarms: each with one of six reasons.
REASONS = {
    "a name, module or code made at run time": """
        exec_code getattr_constant_name getattr_default_called unseen_import unseen_module_concat unseen_module_format
        unseen_module_percent unseen_name_of_a_variable unseen_reduce sys_modules_alias2 mock_object""",
    "a value whose type nobody declares": """
        alias_annotated keyword_in_class unseen_argument unseen_returned""",
    "a guard by a flag or a function of the program": """
        early_return_wrong flag_reset flag_wrong none_raises has_no_jax optional_chain try_except_two_modules""",
    "what TYPE_CHECKING or install() hides": """
        type_checking_else hasattr_not""",
    "an argument, not a name": """
        mhlo of_2021_jit_specs positional_too_many star_numpy xla_positional""",
    "a module that JAX has and does not import": """
        sub_module_not_imported submodule_imported_by_a_library""",
}


def test_most_programs_that_die_are_found_and_each_other_has_its_reason(plain, checked):
    found = by_program(checked.reported)
    die = {name for name, end in plain.items() if "printed" not in end}
    clean = {name for name in die if not at_its_line(found[name], plain[name])}
    alarms = {name for name in PROGRAMS.keys() - die if found[name]}
    explained = " ".join(REASONS.values()).split()
    assert len(REASONS) <= 6 and len(explained) == len(set(explained)) <= len(clean | alarms) + 4
    assert clean | alarms <= set(explained)
    assert len(die) - len(clean) >= 220 and len(alarms) <= 12


def test_what_dies_under_install_fails_there(checked, folder):
    """The exit code is about a program as it runs now: under install(), which restores most names."""
    dying = by_program(finding for finding in checked.reported if finding.dies)
    ends = ends_of(PROGRAMS, folder / "installed")
    ran = {name for name, end in ends.items() if "printed" in end}
    assert sorted(name for name in ran if dying[name]) == sorted(ran & RUN_ALL_THE_SAME)
    assert sum(at_its_line(dying[name], ends[name]) for name in PROGRAMS.keys() - ran) >= 110


# Programs with what "dies" under install(), which have a guard that check does not follow.
RUN_ALL_THE_SAME = {"has_no_jax", "optional_chain", "sys_modules_alias2", "try_except_two_modules"}
