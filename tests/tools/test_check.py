"""check finds what JAX removed: on programs that reach it in all sorts of ways, counted against what running them does.

``hostile_programs.txt`` has them.  They run in one process under plain Python, which mends JAX between two of them.
"""

import ast
import collections
import importlib.util
import io
import json
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import forks
import jax
import old_programs
import pytest
from subprocesses import run

import xmap_compat.__main__
from xmap_compat.tools.check import editor, findings, removed_names

ROOT = Path(__file__).parents[2]
TEXT = (Path(__file__).parent / "hostile_programs.txt").read_text()
PROGRAMS = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^### |\Z)", TEXT))
# Runs each program as its own main module; prints its end: what it printed, or its error's lines.
DRIVER = """
    import contextlib, io, json, os, sys, traceback
    modules = {m: dict(vars(m)) for n, m in sys.modules.items() if n.split(".")[0] == "jax"}
    ends = []
    for path in sys.argv[1:]:
        printed = io.StringIO()
        try:
            with open(path) as file, contextlib.redirect_stdout(printed):
                exec(compile(file.read(), path, "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            ends.append({"lines": [], "error": str(error)})
            while error is not None:  # what is raised where another is handled
                lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
                ends[-1]["lines"] += lines
                error = error.__context__
        else:
            ends.append({"lines": [], "printed": printed.getvalue()})
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
    paths = [folder / f"{name}.py" for name in programs]
    quickly = {"warn": "ignore", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = forks.run(folder / "driver", *paths, cwd=folder, plain=plain, **quickly)
    assert done.returncode == 0, done.stderr
    return dict(zip(programs, json.loads(done.stdout.splitlines()[-1])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def plain(folder):
    return ends_of(PROGRAMS, folder / "plain", plain=True)


@pytest.fixture(scope="module")
def checked(folder, plain):
    return findings.check([folder / "plain"])


def by_program(found):
    programs = collections.defaultdict(list)
    for finding in found:
        programs[finding.path.stem].append(finding)
    return programs


def at_its_line(found, ends):
    """Whether something was found in a statement that ended the program."""
    for finding in found:
        innermost = None
        for node in ast.walk(ast.parse(finding.path.read_text())):
            if isinstance(node, ast.stmt) and finding.line in lines_of(node):
                innermost = node
        if lines_of(innermost).intersection(ends["lines"]):
            return True
    return False


def lines_of(statement):
    decorators = getattr(statement, "decorator_list", [])
    first = min(node.lineno for node in [statement, *decorators])
    return {*range(first, statement.end_lineno + 1)}


# What check does not find in its place, and its false alarms: each with one of eight reasons.
REASONS = {
    "not followed, and listed as such": """
        eval_string exec_code import_level2 import_module_relative import_module_relative_pos kwargs_dict
        kwargs_dict2 kwargs_variable kwargs_variable_ok unseen_attrgetter unseen_dunder_dict unseen_exec
        unseen_option unseen_sys_modules unseen_vars""",
    "a name, module or code made at run time": """
        getattr_default_called mock_object module_constant setattr_compat sys_modules_alias2 unseen_import
        unseen_module_concat unseen_module_format unseen_module_percent unseen_name_of_a_variable unseen_reduce
        unseen_text_of_parts""",
    "a value whose type nobody declares": """
        clip_method device_method keyword_in_class method_kw unseen_argument unseen_returned""",
    "a guard by a flag or a function of the program, or an error that it caught": """
        dead_branch early_return_wrong else_of_try except_star flag_not flag_reset flag_wrong has_flag has_no_jax
        hcb_in_try if_false late_raise_func loop_continue mnfe_module none_raises none_used opt_called
        opt_pass_called opt_print_called optional_chain suppress try_except_two_modules version_list_comp
        version_tuple_of_text""",
    "a guard that is listed: whether it holds is not asked": """
        assert elif_chain_bad raise_in_else removed_in_dead_branch type_checking_else version_branch_taken
        version_chain_bad version_lt version_map version_str kw_cond2 try_rest_reached while_guard""",
    "an annotation that Python does not evaluate": """
        future_annotations local_annotation""",
    "an argument, not a name": """
        mhlo of_2021_jit_specs positional_too_many xla_positional""",
    "a module that JAX has and does not import": """
        sub_module_not_imported""",
}
# Programs with what "dies" under install(), which have a guard that check does not follow, or an annotation.
RUN_ALL_THE_SAME = """
    concrete_array dead_branch early_hasattr else_of_try except_star flag_in_function flag_not
    future_annotations has_flag has_no_jax hasattr_not if_false inner_raise kw_cond2 late_raise_func
    local_annotation loop_continue mnfe_module optional_chain setattr_compat suppress sys_modules_alias2
    try_except_two_modules try_rest_reached version_list_comp version_tuple_of_text while_guard"""


def test_most_programs_that_die_are_found_and_each_other_has_its_reason(plain, checked):
    alive = [finding for finding in checked.findings if not finding.guarded]
    found = by_program(
        finding for finding in alive if finding.gone.name != removed_names.NOT_FOLLOWED
    )
    listed = by_program(
        finding for finding in alive if finding.gone.name == removed_names.NOT_FOLLOWED
    )
    die = {name for name, end in plain.items() if "printed" not in end}
    clean = {name for name in die if not at_its_line(found[name], plain[name])}
    alarms = {name for name in found.keys() - die if found[name]}
    explained = " ".join(REASONS.values()).split()
    assert clean | alarms <= {*explained} and len(explained) <= len(clean | alarms) + 4
    assert len(die - clean) >= 190 and len(alarms) <= 23
    assert {*REASONS["not followed, and listed as such"].split()} <= listed.keys()


def test_what_dies_under_install_fails_there(checked, folder):
    """The exit code is about a program as it runs now: under install(), which restores most names."""
    dying = by_program(finding for finding in checked.findings if finding.fails)
    ends = ends_of(PROGRAMS, folder / "installed")
    ran = {name for name, end in ends.items() if "printed" in end}
    assert ran & dying.keys() == ran.intersection(RUN_ALL_THE_SAME.split())
    assert sum(at_its_line(dying[name], ends[name]) for name in dying.keys() - ran) >= 86


# ------------------------------------------------------------------------------- the command


def check(*arguments, cwd, **variables):
    return run("-m", "xmap_compat", "check", *arguments, cwd=cwd, **variables)


# Programs, and how the lines of their findings begin.
SHOWN = {
    "import jax\njax.tree_map\n": (
        "2:5: jax.tree_map: write jax.tree.map, or run it under xmap_compat.ins"
    ),
    "from jax.experimental.maps import thread_resources\n": (
        "1:35: jax.experimental.maps.thread_resources: run it under xmap_compat.install()"
    ),
    "import jax\njax.grad(abs, reduce_axes=('i',))(1.0)\n": (
        "2:15: jax.grad(reduce_axes=): write lax.psum(gradient, axes) in a body"
    ),
    "import jax\njax.nonsense\n": "2:5: jax.nonsense: jax 0.",
    "import jax\ndef broken(:\n": "2:12: cannot be read: SyntaxError: ",
    "def python2(:  # no word of it\n": "1:13: cannot be read: SyntaxError: ",
    "import jax\nif hasattr(jax, 'tree_map'):\n    jax.tree_map\n": (
        "3:9: jax.tree_map: guarded by a try or a test"
    ),
    "try:\n    from jax import nonsense\nexcept ImportError:\n    pass\n": (
        "2:21: jax.nonsense: guarded by a try or a test"
    ),
    "from jax.experimental.maps import xmap_p\n": (
        "1:35: jax.experimental.maps.xmap_p: write xmap_compat.xmap: this was"
    ),
    "import jax\nexec('jax.tree_map()')\n": "2:1: jax.?: which names of JAX this asks for, ",
    "import jax\njax.jit(abs, nonsense=1)\n": "2:14: jax.jit(nonsense=): jax 0.",
    "import jax\nif jax.devices():\n    jax.nonsense\n": "3:9: jax.nonsense: jax 0.",
    "import jax.numpy as jnp\njnp.ones(3).nonsense\n": "",
    "from jax.experimental import jax2tf\n": "",
    "import jax, numpy as np\nnp.nonsense\nnp.sum(nonsense=1)\nx: int = ''\n": "",
    "import jax\r\nif 1:\r\n    jax.a\r\n": "3:9: jax.a: ",
    "import jax\né = 'é'; jax.a  # type: ignore\n": "2:14: jax.a: ",
}


@pytest.mark.usefixtures("asked_in_forks")
def test_a_finding_is_a_line(tmp_path):
    for number, source in enumerate(SHOWN):
        (tmp_path / f"p{number}.py").write_bytes(source.encode())
    shown = by_program(findings.check([tmp_path]).findings)
    for number, begins in enumerate(SHOWN.values()):
        found = shown[f"p{number}"]
        assert len(found) == bool(begins)
        for finding in found:
            assert str(finding).startswith(f"{finding.path}:{begins}")


RESTORED = (
    "Files: 1 (jax {}). Uses of removed names: 1 that install() restores, 0 to change by hand"
)
BY_HAND = "Files: 1 (jax {}). Uses of removed names: 0 that install() restores, 1 to change by hand"


@pytest.mark.usefixtures("asked_in_forks")
@pytest.mark.parametrize(
    ("source", "code", "first", "summary"),
    [
        ("x = 1\n", 0, "", BY_HAND.replace("1 to", "0 to")),
        ("import jax\njax.tree_map\n", 0, "p.py:2:5: jax.tree_map: write", RESTORED),
        ("import jax\njax.a\n", 1, "p.py:2:5: jax.a: jax 0.", BY_HAND),
    ],
)
def test_the_exit_code_says_whether_something_dies(
    tmp_path, monkeypatch, capsys, source, code, first, summary
):
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(source)
    assert xmap_compat.__main__.main(["check", "p.py"]) == code
    shown = capsys.readouterr().out
    assert shown.startswith(first) and summary.format(jax.__version__) in shown
    assert "Not seen: names made at run time" in shown


CELLS = [
    "%matplotlib inline\nimport jax\n",
    "!ls\n%time y = jax.tree_map(abs, [-1])\n",
    "%%bash\njax.tree_map\n",
    "%%time\nz = jax.tree_leaves([1])\njax.tree_map?\n",
]


@pytest.mark.usefixtures("asked_in_forks")
def test_a_notebook_is_read_and_fixed_by_its_cells(tmp_path):
    cells = [{"cell_type": "code", "source": [cell]} for cell in CELLS]
    text = json.dumps({"cells": cells, "é": "é"}, indent=1, ensure_ascii=False)
    (tmp_path / "n.ipynb").write_text(text)
    checked = findings.check([tmp_path / "n.ipynb"])
    places = [(finding.cell, finding.line, finding.column) for finding in checked.findings]
    assert places == [(2, 2, 15), (4, 2, 9)]
    assert str(checked.findings[0]).startswith(f"{tmp_path / 'n.ipynb'}:cell 2:2:15: jax.tree_map:")
    (fixed,) = editor.fixed(checked).contents.values()
    first = CELLS[1].replace("jax.tree_map", "jax.tree.map")
    second = CELLS[3].replace("tree_leaves", "tree.leaves")
    sources = ["".join(cell["source"]) for cell in json.loads(fixed)["cells"]]
    assert sources == [CELLS[0], first, CELLS[2], second]
    cells.append({"cell_type": "code", "source": ["def broken(:"]})
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    assert editor.fixed(findings.check([tmp_path / "n.ipynb"])).contents == {}


def test_fix_keeps_what_it_does_not_change_and_lists_what_is_left(tmp_path):
    source = (
        b"# coding: latin-1\r\nimport jax\r\nx = '\xe9'; jax.tree_map(abs, [-1])\r\njax.nonsense"
    )
    (tmp_path / "p.py").write_bytes(source)
    shown = check("--diff", "p.py", cwd=tmp_path).stdout
    assert "-x = 'é'; jax.tree_map(abs, [-1])\n+x = 'é'; jax.tree.map(abs, [-1])\n" in shown
    assert "\n jax.nonsense\n" in shown  # the end of the file, without a new line
    done = check("--fix", "p.py", cwd=tmp_path)
    assert done.returncode == 1 and "p.py:4:5: jax.nonsense: jax " in done.stdout
    assert (tmp_path / "p.py").read_bytes() == source.replace(b"tree_map", b"tree.map")


def test_a_wrong_call_says_what_is_missing(tmp_path, monkeypatch, capsys):
    def check_here(*arguments):
        assert xmap_compat.__main__.main(["check", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert check_here(tmp_path) == f"0 files: no Python file or notebook in {tmp_path}\n"
    (tmp_path / "p.py").write_text("import jax\n")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install '.[check]'" in check_here(tmp_path)
    (tmp_path / "jax.py").write_text("raise ImportError('no JAX')\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert "cannot be imported: no JAX" in check_here(tmp_path / "p.py")
    assert xmap_compat.__main__.main(["check", "no.py"]) == 1
    assert "no.py:1:1: cannot be read: FileNotFoundError" in capsys.readouterr().out


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path):
    for number in range(300):
        (tmp_path / f"{'m' * 99}{number}.py").write_text("import jax\n" + "jax.tree_map\n" * 9)
    command = f"'{sys.executable}' -m xmap_compat check . | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ":2:5: jax.tree_map: " in done.stdout and done.stderr == ""


@pytest.mark.usefixtures("asked_in_forks")
def test_a_name_is_found_in_a_file_that_takes_its_module_from_another(tmp_path):
    (tmp_path / "compat.py").write_text("import jax.numpy as jnp\n")
    (tmp_path / "user.py").write_text(
        "import compat\nfrom compat import jnp\njnp.product\ncompat.jnp.cumproduct\n"
    )
    found = [(f.path.name, f.line, f.gone.name) for f in findings.check([tmp_path]).findings]
    assert found == [("user.py", 3, "jax.numpy.product"), ("user.py", 4, "jax.numpy.cumproduct")]


@pytest.mark.usefixtures("asked_in_forks")
def test_a_terminal_shows_the_progress(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for file in ("part/a.py", "part/b.py", ".hidden/c.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("import jax\n")
    for number in range(23):
        (tmp_path / f"m{number}.py").write_text("import jax\n")
    assert xmap_compat.__main__.main(["check", str(tmp_path)]) == 0
    last = terminal.getvalue().split("\r")[-1]
    assert last == f"[{'#' * 30}] 25 of 25 files\n" and terminal.getvalue().count("\r") == 25


@pytest.mark.slow
def test_two_thousand_files_take_less_than_a_minute(tmp_path):
    for number in range(2000):
        (tmp_path / f"m{number}.py").write_text(
            "import jax\n" + f"def f{number}(x):\n    return jax.numpy.sum(x)\n" * 40
        )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert check(".", cwd=tmp_path).returncode == 0
    # Time of the processor: others may run.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60


@pytest.mark.usefixtures("asked_in_forks")
def test_every_old_program_of_these_tests_is_found():
    """They do not run under plain Python: each has findings, and none a false one."""
    checked = findings.check([old_programs.FOLDER])
    found = {finding.path for finding in checked.findings}
    old = {program.path for program in checked.programs if "experimental.maps" in program.text}
    assert len(old) >= 15 and old <= found
    failing = {finding.gone.kind for finding in checked.findings if finding.fails}
    assert removed_names.UNKNOWN not in failing
