"""``python -m xmap_compat leave``: what it records, verifies, refuses and writes.

The oracles are NumPy, with which the programs of tests/old_programs compare themselves in both runs; git, which applies
patches; and edits that are wrong on purpose, which the second run must find.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import old_programs
import pytest
from subprocesses import run

from xmap_compat import xmap
from xmap_compat.tools.leave import edits, patch, recorded_calls, report, two_runs
from xmap_compat.tools.leave.place_of_helper import Helper
from xmap_compat.tools.leave.recorded_calls import RecordedCall
from xmap_compat.tools.leave.recording import Recorder
from xmap_compat.tools.leave.replaying import Verifier
from xmap_compat.tools.leave.xmap_calls import FirstRun, XmapCall
from xmap_compat.tools.source.layout import Edit, applied, text_as_python

ROOT = pathlib.Path(__file__).parents[2]


DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


def leave(*arguments, cwd):
    command = [] if arguments[0] == "-c" else ["-m", "xmap_compat", "leave"]
    variables = {"PYTHONPATH": str(ROOT), **DEVICES}
    return run(*command, *arguments, cwd=cwd, warn="ignore", seconds=400, **variables)


WITHOUT = "import sys; sys.modules['xmap_compat'] = None; exec(open('prog.py').read())"


def git(*arguments, cwd):
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *names, *map(str, arguments)], cwd=cwd, check=True, capture_output=True
    )


# ------------------------------------------------------------------------------ whole programs

HEAD = """import jax
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap

x = np.arange(24, dtype=np.float32).reshape(8, 3)
devices = np.array(jax.devices()[:4])
"""
CENTRED = """
def centred(row):
\treturn row - lax.psum(row, 'rows') / 8  # tabs stay

f = xmap(centred, in_axes=['rows', ...], out_axes=['rows', ...], axis_resources={'rows': 'x'})
with Mesh(devices, ('x',)):
\tprint(np.asarray(f(x)).tolist())
\tprint(np.asarray(jax.jit(jax.grad(lambda x: (f(x) * x).sum()))(x)).tolist())
open('log.txt', 'w').write('a file')
"""


def test_a_program_with_tabs_and_crlf_is_written_and_runs_without_xmap(tmp_path):
    text = (HEAD + CENTRED).replace("\n", "\r\n")
    (tmp_path / "prog.py").write_bytes(text.encode())
    git("init", "-q", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    git("commit", "-qm", "a program", cwd=tmp_path)
    done = leave("--write", "--diff", "../leave.patch", "prog.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.rpartition("---")[0].count("[[") == 2  # what the run with xmap prints
    assert "verified on" in done.stdout and "with gradients" in done.stdout
    assert "1 of 1 xmap calls patched" in done.stdout
    assert not (tmp_path / "log.txt").exists()
    written = (tmp_path / "prog.py").read_bytes()
    assert b"# tabs stay\r\n" in written and written.count(b"\n") == written.count(b"\r\n")
    assert b"xmap" not in written
    ran = leave("-c", WITHOUT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    values, gradients = map(json.loads, ran.stdout.splitlines())
    np.testing.assert_allclose(values, x - x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(gradients, 2 * (x - x.mean(0)), rtol=1e-5)
    # git applies the patch, too, to what was there.
    git("checkout", "-q", ".", cwd=tmp_path)
    (tmp_path / "named_axes.py").unlink()
    git("apply", tmp_path.parent / "leave.patch", cwd=tmp_path)
    assert (tmp_path / "prog.py").read_bytes() == written


@pytest.mark.slow
@pytest.mark.parametrize("old", old_programs.LEFT, ids=lambda old: old.path.name)
def test_programs_in_the_style_of_real_ones_leave(old, tmp_path):
    name = old.path.name
    if name == "gptj":
        pytest.importorskip("haiku")
        pytest.importorskip("optax")
        shutil.copytree(old.path, tmp_path, dirs_exist_ok=True)
        name = "train.py"
    else:
        shutil.copy(old.path, tmp_path)
    done = leave(name, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert f"{old.patched} of {old.patched} xmap calls patched" in said, said
    assert done.returncode == 0 and "new file named_axes.py" in done.stdout


# -------------------------------------------------------------- what the second run must find


def square(x):
    return {"y": x * x}


X = np.linspace(1, 2, 6, dtype=np.float32).reshape(2, 3)
STRUCTURE = jax.tree.structure((X,))


def record(differentiated=False, traced=False, mesh=None):
    call = RecordedCall(
        0, 1, recorded_calls.described((X,)), traced, mesh, [X], [""], differentiated
    )
    return call._replace(results=call.evaluated(square, STRUCTURE))


def verifier(tmp_path, *records):
    (tmp_path / "records").write_bytes(pickle.dumps((None, records)))
    task = {"records": tmp_path / "records", "result": tmp_path / "result"}
    here = str(pathlib.Path(__file__).parent) + os.sep
    return Verifier(task | {"tree": here, "trees": ("", ""), "patched": [0], "ended": ""})


WRONG = {
    "numbers": (lambda x: {"y": x * x * (1 + 1e-3)}, "the result['y'] differs by"),
    "type": (
        lambda x: {"y": (x * x).astype(jnp.bfloat16)},
        "is bfloat16[2, 3], and with xmap float32[2, 3]",
    ),
    "shape": (lambda x: {"y": (x * x)[None]}, "is float32[1, 2, 3]"),
    "structure": (lambda x: (x * x,), "the results are ['the result[0]'"),
    "NaN": (lambda x: {"y": jnp.where(x > 1.9, jnp.nan, x * x)}, "differs by nan"),
    "an error": (lambda x: undefined, "it raises NameError: name 'undefined'"),  # noqa: F821
}


@pytest.mark.parametrize("how", WRONG)
def test_what_an_edited_function_computes_otherwise_is_found(how, tmp_path):
    function, words = WRONG[how]
    replay = verifier(tmp_path, record())
    probed = replay.probe(0, lambda: function)()
    with contextlib.suppress(NameError):
        probed(np.zeros((2, 3), np.float32))
    replay.finish("")
    assert words in replay.problems[0]
    if how == "an error":
        line = function.__code__.co_firstlineno
        assert f' at test_leave.py:{line}: `"an error": (' in replay.problems[0]


def test_recorded_arguments_are_used_and_not_those_of_the_program(tmp_path):
    """A wrong text that agrees on the program's own zeros is found, and the program's own call goes on."""
    replay = verifier(tmp_path, record())
    probed = replay.probe(0, lambda: lambda x: {"y": 2 * x})()
    found = probed(np.zeros((2, 3), np.float32))
    replay.finish("")
    assert replay.problems and not np.any(found["y"])


@pytest.mark.parametrize(
    "around", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]
)
def test_a_wrong_gradient_is_found_where_the_values_agree(around, tmp_path):
    halved = jax.custom_vjp(square)
    halved.defvjp(lambda x: (square(x), x), lambda x, g: (x * g["y"],))
    for function, words in ((halved, "the gradient of args[0] differs by"), (square, "")):
        replay = verifier(tmp_path, record(differentiated=True, traced=True))
        probed = replay.probe(0, lambda of=function: of)()
        around(lambda x, f=probed: f(x)["y"].sum())(X)
        replay.finish("")
        assert words in replay.problems.get(0, "")
        assert bool(words) == bool(replay.problems)


def test_calls_are_compared_on_the_meshes_of_their_records(tmp_path):
    """Two calls of the same types, one of them traced; the program enters neither mesh."""
    records = [
        record(mesh=(("a",), np.arange(2))),
        record(mesh=(("b",), np.arange(2, 4)), traced=True),
    ]
    replay = verifier(tmp_path, *records)
    seen = []

    def on_the_mesh(x):
        seen.append(jax.sharding.get_abstract_mesh().axis_names)
        return {"y": x * x}

    probed = replay.probe(0, lambda: on_the_mesh)()
    probed(X)
    jax.jit(lambda x: probed(x))(X)
    replay.finish("")
    assert seen == [(), (), ("a",), ("b",)] and replay.problems == {}


def test_a_call_that_is_not_made_again_is_not_verified(tmp_path):
    replay = verifier(tmp_path, record(), record(traced=True))
    replay.probe(0, lambda: square)()(X)
    replay.finish("")
    assert replay.problems == {0: "a recorded call is not made again"}


def test_records_can_be_read_before_the_program_imports_jax(tmp_path):
    small = record()._replace(leaves=[X.astype(jnp.bfloat16)])
    (tmp_path / "records").write_bytes(pickle.dumps(small))
    program = (
        "import pickle, sys; from xmap_compat.tools.leave import replaying; call = pickle.load(open('records', 'rb'))"
        "; print(call.leaves[0].dtype, 'jax' in sys.modules)"
    )
    done = leave("-c", program, cwd=tmp_path)
    assert done.stdout.split() == ["bfloat16", "False"], done.stderr


@pytest.mark.parametrize(
    "dtype, small, large",
    [("f8", 1e-11, 1e-7), ("f4", 1e-6, 1e-3), (jnp.bfloat16, 1e-2, 0.2), ("c8", 1e-6, 1e-3)],
)
def test_what_orders_of_addition_explain_is_no_difference(dtype, small, large):
    wanted = np.append(np.linspace(1, 2, 9), [np.nan, np.inf])
    expected = {"": wanted.astype(dtype)}
    assert recorded_calls.difference({"": (wanted * (1 + small)).astype(dtype)}, expected) == ""
    assert recorded_calls.difference({"": (wanted * (1 + large)).astype(dtype)}, expected) != ""


def test_programs_that_compute_in_small_numbers_may_differ_by_more():
    """A program in bfloat16 whose results are in float32; integers must be equal."""
    wanted = {"": np.linspace(1, 2, 9, dtype="f4")}
    near = {"": np.linspace(1, 2.004, 9, dtype="f4")}
    far = {"": np.linspace(1, 2.1, 9, dtype="f4")}
    assert "differs by 0.004" in recorded_calls.difference(near, wanted)
    assert recorded_calls.difference(near, wanted, is_coarse=True) == ""
    assert "differs by 0.1" in recorded_calls.difference(far, wanted, is_coarse=True)
    numbers = {"": np.array([1 << 30, 1])}
    others = {"": np.array([1 << 30, 2])}
    assert "differs by 1" in recorded_calls.difference(numbers, others, is_coarse=True)


def test_a_result_whose_copies_differ_is_compared_device_by_device():
    """As of xmap, where a result varies over an axis that its specification leaves out."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = {"mesh": mesh, "in_specs": (), "out_specs": jax.P("x"), "check_vma": False}
    differs = jax.shard_map(lambda: jax.lax.axis_index("y")[None], **specs)()
    # A sum over y that an edit forgets: the first copy may be right.
    whole = jax.device_put(np.zeros(2, np.int32), jax.sharding.NamedSharding(mesh, jax.P("x")))
    found, expected = (
        recorded_calls.arrays_by_path("a result", array) for array in (differs, whole)
    )
    assert [*found] == ["a result", "a result on device 1", "a result on device 3"]
    assert "the results are ['a result', 'a result on" in recorded_calls.difference(found, expected)
    assert recorded_calls.difference(found, found) == ""


# ------------------------------------------------------------------------ what the first run records


@pytest.fixture
def recorder():
    return Recorder({"tree": "", "folders": {}})


def test_files_of_the_package_are_not_the_programs(recorder):
    """Also where the program runs beside a clone of it."""
    assert recorder.users_file(__file__) == os.path.realpath(__file__)
    assert recorder.users_file(two_runs.__file__) == ""


def test_what_runs_on_is_awaited_before_the_records_are_read(recorder, tmp_path, monkeypatch):
    """The last calls may not have noted their arguments yet."""
    recorder.task["result"] = tmp_path / "result"
    awaited = []
    monkeypatch.setattr(jax, "effects_barrier", lambda: awaited.append(recorder.is_over))
    recorder.finish("")
    assert awaited == [False]


PLACE = (1, 0, 1, 9)
TAKEN = {
    "grad": lambda f: jax.grad(f)(X),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(X),
    "of second order": lambda f: jax.hessian(f)(X),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_gradients_are_noted_on_any_traced_call_and_recorded_if_the_calls_before_had_no_values(
    kind, recorder
):
    xmapped = xmap(lambda row: jax.lax.psum((row * row).sum(), "i"), ["i", ...], [...])
    c = XmapCall("a.py", PLACE)
    called = functools.partial(recorder.called, c, 1, xmapped)
    for _ in range(4):
        jax.eval_shape(lambda x: called(x), X)  # a trace of its own
    assert not c.differentiated
    TAKEN[kind](called)
    jax.effects_barrier()
    assert c.differentiated
    for noted in recorder.noted:
        recorder.repeat(c, noted)
    paths = {path for call in recorder.records for path in call.results}
    assert paths == {"the result", "the gradient of args[0]"}


def test_a_gradient_of_what_an_xmapped_function_closes_over_is_noted(recorder):
    def loss(w):
        xmapped = xmap(lambda row: jax.lax.psum((w * row).sum(), "i"), ["i", ...], [...])
        return recorder.called(c, 1, xmapped, X)

    c = XmapCall("a.py", PLACE)
    assert np.isclose(jax.grad(loss)(2.0), X.sum()) and c.differentiated


def test_the_first_calls_of_each_kind_are_noted_with_the_arguments_that_they_had(recorder):
    c = XmapCall("a.py", PLACE)
    xmapped = xmap(lambda row: row.sum(), ["i", ...], ["i"])
    for k in range(5):  # the calls of `xmap` at the same place
        changed = X + k
        recorder.called(c, k, xmapped, changed)
        changed[:] = 0
        recorder.called(c, k, xmapped, changed[:1].astype(np.int32))
    found = [noted.call.leaves[0] for noted in recorder.noted]
    np.testing.assert_array_equal(found[::2], [X, X + 1, X + 2])
    assert [value.dtype for value in found[1::2]] == [np.int32] * 3 and c.calls == 10


def test_random_keys_are_recorded_as_they_are(recorder):
    c = XmapCall("a.py", PLACE)
    xmapped = xmap(lambda key: jax.random.uniform(key), ["i"], ["i"])
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    wanted = recorder.called(c, 1, xmapped, keys)
    (noted,) = recorder.noted
    recorder.repeat(c, noted)
    (call,) = recorder.records
    np.testing.assert_array_equal(call.results["the result"], wanted)


# ------------------------------------------------------------------------------------ bad input

BAD = {
    "no program": ([], {}, "no program is given"),
    "an option": (["--wrte", "p.py"], {}, "--wrte"),
    "no file": (["p.py"], {}, "p.py cannot be read"),
    "a syntax error": (["p.py"], {"p.py": "def f(:\n"}, "p.py cannot be read: "),
    "a notebook that is none": (["p.ipynb"], {"p.ipynb": "{}"}, "p.ipynb cannot be read"),
}


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    two_runs.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_words_and_nothing_runs(case, tmp_path, monkeypatch, capsys):
    arguments, files, words = BAD[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    with contextlib.suppress(SystemExit):
        assert two_runs.main(parsed(*arguments)) == 2
    assert words in capsys.readouterr().err


def test_a_lack_or_a_fault_of_leave_is_told_as_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(two_runs.Leaving, "run", lambda self: 1 / 0)
    assert two_runs.main(parsed("p.py")) == 2
    assert "leave itself fails, with ZeroDivisionError: division by zero" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert two_runs.main(parsed("p.py")) == 2
    assert "leave: it needs the type checker ty" in capsys.readouterr().err


RUN = {
    "no xmap": ("print(1)", "p.py ended with no error and called no xmapped function"),
    "an exception before the first call": (
        HEAD + CENTRED.replace("with Mesh", "raise ValueError('no data')\nwith Mesh"),
        "p.py ended with ValueError and called no xmapped function",
    ),
    "the end of its process": ("import os; os._exit(3)", "p.py ended its process with exit code 3"),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in RUN])
def test_a_program_that_calls_no_xmap_is_refused_in_words(case, tmp_path):
    text, words = RUN[case]
    (tmp_path / "p.py").write_text(text)
    done = leave("--write", "p.py", cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr and done.stdout == ""
    assert (
        re.findall(r'File "(?!.*p\.py").*', done.stderr) == []
    )  # only the program is in a traceback
    assert (tmp_path / "p.py").read_text() == text


@pytest.mark.slow
def test_packages_generated_code_and_what_was_not_run_are_named(tmp_path):
    """``-m``; an xmap in exec; one that is never called; one in the file of another package."""
    package, library = tmp_path / "work" / "pkg", tmp_path / "library"
    package.mkdir(parents=True)
    library.mkdir()
    (package / "__init__.py").write_text("")
    (library / "other.py").write_text(
        "from jax.experimental.maps import xmap\n"
        "g = xmap(lambda r: r * 2, in_axes=['rows', ...], out_axes=['rows', ...])\n"
    )
    text = (
        HEAD
        + f"import sys\nsys.path.append({str(library)!r})\nimport other\nother.g(x)\n"
        + CENTRED
    )
    text += 'exec(\'h = xmap(lambda r: r, in_axes=["rows", ...], out_axes=["rows", ...]); h(x)\')\n'
    text += "never = xmap(lambda r: r, in_axes=['rows', ...], out_axes=['rows', ...])\n"
    (package / "run.py").write_text(text)
    done = leave("--write", "-m", "pkg.run", cwd=tmp_path / "work")
    words = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert words.count("it is in generated code or in another package") == 2
    assert "not verified: this run does not call it" in words
    assert "2 of 4 xmap calls patched" in words
    written = (package / "run.py").read_text()
    assert "from .named_axes import mapped, psum" in written and "never = mapped(" in written


# ------------------------------------------------------------------------------ files and patches


def edit(text, old, new):
    before = text[: text.index(old)]
    line = before.count("\n") + 1
    column = len(before.rpartition("\n")[2])
    return Edit((line, column), (line, column + len(old)), new)


FILES = {
    "no newline at its end": b"a = 1\nb = 2",
    "CRLF": b"a = 1\r\nb = 2\r\nc = 3\r\n",
    "a form feed and other ends of lines": "a = 1\n\x0cb = 2  # \u2028 \x1c\nc = 3\n".encode(),
    "Latin-1": "# -*- coding: latin-1 -*-\n# \u00e9\nb = 2\n".encode("latin-1"),
    "a byte order mark": b"\xef\xbb\xbfa = 1\nb = 2\n",
}


def test_a_file_of_the_program_with_the_name_of_the_helper_is_not_overwritten(tmp_path):
    path = tmp_path / "named_axes.py"
    path.write_bytes(b"# \xe9 in Latin-1")
    with pytest.raises(patch.Refused, match=r"named_axes.py is a file of the program.*rename it"):
        Helper({str(path): "named_axes"}, str(tmp_path)).change({"psum"})


@pytest.mark.parametrize("kind", FILES)
def test_git_applies_the_patch_to_the_same_bytes(kind, tmp_path, monkeypatch):
    before, path = FILES[kind], tmp_path / "sub" / "prog.py"
    path.parent.mkdir()
    path.write_bytes(before)
    monkeypatch.chdir(path.parent)
    git("init", "-q", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    new = "b = 22\nnew = '\u00e9'"
    after = applied(before, str(path), [edit(text_as_python(before, "prog.py"), "b = 2", new)])
    changes = {str(path): (before, after), str(path.parent / "helpers.py"): (None, b"# new\n")}
    diff = patch.diff(changes)
    assert diff.index(b"helpers.py") < diff.index(b"prog.py")
    (tmp_path.parent / "p.patch").write_bytes(diff)
    git("apply", tmp_path.parent / "p.patch", cwd=path.parent)
    assert path.read_bytes() == after and (path.parent / "helpers.py").read_bytes() == b"# new\n"
    encoding, ends = "latin-1" if kind == "Latin-1" else "utf-8", "\r\n" if kind == "CRLF" else "\n"
    assert after == before.replace(b"b = 2", new.replace("\n", ends).encode(encoding))


def two_files(tmp_path):
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_bytes(b"1\n")
        path.chmod(0o750)
    return paths, {str(path): (b"1\n", b"2\n") for path in paths}


def test_files_are_written_with_their_modes(tmp_path):
    paths, changes = two_files(tmp_path)
    patch.write({**changes, str(tmp_path / "new.py"): (None, b"3\n")})
    assert [path.read_bytes() for path in paths] == [b"2\n"] * 2
    assert paths[0].stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py", "new.py"]


def changed(paths, monkeypatch):
    paths[1].write_bytes(b"0\n")
    return "has changed since it was read"


def new_file_is_there(paths, monkeypatch):
    (paths[0].parent / "new.py").write_text("own")
    return "has changed since it was read"


def disk_is_full(paths, monkeypatch):
    write = pathlib.Path.write_bytes
    full = iter([False, True])

    def write_bytes(path, data):
        if next(full, False):
            write(path, data[:1])
            raise OSError("no space left")
        write(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", write_bytes)
    return "Nothing is written: no space left"


@pytest.mark.parametrize("happens", [changed, new_file_is_there, disk_is_full])
def test_all_files_are_written_or_none(happens, tmp_path, monkeypatch):
    paths, changes = two_files(tmp_path)
    words = happens(paths, monkeypatch)
    contents = lambda: {path.name: path.read_bytes() for path in tmp_path.glob("*.py")}
    before = contents()
    with pytest.raises(patch.Refused, match=words):
        patch.write({**changes, str(tmp_path / "new.py"): (None, b"3\n")})
    assert contents() == before


def test_links_stay_and_hidden_folders_are_left_out_of_copies(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / ".hidden").mkdir(parents=True)
    (folder / "file.py").write_text("2")
    (folder / "part").mkdir()
    (folder / "environment").mkdir()
    (folder / "environment" / "pyvenv.cfg").write_text("")
    (tmp_path / "library.py").write_text("1")
    (folder / "library.py").symlink_to(tmp_path / "library.py")
    tree = str(tmp_path / "tree") + os.sep
    folders = patch.mirror([str(folder)], tree)
    copy = pathlib.Path(folders[str(folder)])
    links = {path.name: path.is_symlink() for path in copy.iterdir()}
    assert links == {"file.py": False, "part": False, "library.py": True}
    recorder = Recorder({"tree": tree, "folders": folders})
    assert recorder.users_file(str(copy / "file.py")) == str(folder / "file.py")
    assert recorder.users_file(str(copy / "library.py")) == ""
    assert recorder.users_file(str(copy / "written_by_the_run.py")) == ""
    monkeypatch.setattr(patch, "MOST_GIB", 0)
    with pytest.raises(patch.Refused, match="project has more than 0 GiB, too much to run"):
        patch.mirror([str(folder)], str(tmp_path / "again"))


# ------------------------------------------------------------------- what is verified together


def leaving(tmp_path, monkeypatch):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return two_runs.Leaving(parsed("p.py"), str(tmp_path / f"{patch.SCRATCH}1"))


def test_what_differs_stays_and_the_rest_is_compared_again(tmp_path, monkeypatch):
    """The files that are written are those of the last replay; what no run calls is edited too."""
    left = leaving(tmp_path, monkeypatch)
    every = [XmapCall("p.py", PLACE, k, made=1, calls=1, recorded=1) for k in range(4)]
    every[3].calls = every[3].recorded = 0
    compared = []

    class Program(argparse.Namespace):
        refuse_or_add = lambda self: None
        edited = lambda self, others: [c.number for c in every if not c.refused]

    def replay(found, edited, limit):
        compared.append(edited)
        return dict.fromkeys({0, 2} & {*edited}, "differs when it is run: it raises E")

    program = Program(sources={}, helper=argparse.Namespace(is_there=False))
    monkeypatch.setattr(left, "first_run", lambda: FirstRun(every))
    monkeypatch.setattr(left, "replay", replay)
    monkeypatch.setattr(edits, "ProgramFiles", lambda *args: program)
    monkeypatch.setattr(report, "report", lambda options, xmap_calls, edited: edited)
    assert left.run() == [1, 3] and compared == [[0, 1, 2, 3], [1, 3]]
    monkeypatch.setattr(left, "first_run", lambda: FirstRun([]))
    with pytest.raises(patch.Refused, match="ended with no error and called no xmapped function"):
        left.run()


ENDS = {
    "another error": (("E", {}), "ended with E, and the one with xmap with no error"),
    "a process that died": (None, "ended with exit code 7"),
    "the same": (("", {}), ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_otherwise_verifies_nothing(how, tmp_path, monkeypatch):
    ended, words = ENDS[how]
    left = leaving(tmp_path, monkeypatch)
    before = left.task_in("second")["result"]  # of an earlier replay: it says nothing of this one
    pathlib.Path(before).write_bytes(pickle.dumps(({}, "")))

    def execute(task, *args):
        pathlib.Path(task["log"]).write_text("")
        if ended:
            pathlib.Path(task["result"]).write_bytes(pickle.dumps(ended[::-1]))
        return 7

    monkeypatch.setattr(left, "execute", execute)
    cs = [XmapCall("a.py", PLACE, k, recorded=1) for k in range(3)]
    problems = left.replay(FirstRun(cs), edits.Edited(), 120)
    assert len(problems) == (3 if words else 0)
    assert all(words in problem for problem in problems.values())


def test_a_first_run_whose_process_dies_is_refused(tmp_path, monkeypatch):
    left = leaving(tmp_path, monkeypatch)
    monkeypatch.setattr(left, "execute", lambda task, module: 3)
    with pytest.raises(patch.Refused, match="ended its process with exit code 3"):
        left.first_run()


def test_a_line_says_that_a_run_goes_on_and_one_that_hangs_is_killed(tmp_path, monkeypatch, capsys):
    left = leaving(tmp_path, monkeypatch)
    monkeypatch.setattr(two_runs, "PROGRESS_SECONDS", 0.2)
    monkeypatch.setattr(two_runs, "_ENTRY", "import time; time.sleep(60)  # {0}")
    assert left.execute(left.task_in("second"), "replaying", limit=0.1) < 0
    assert "leave: replaying, 0 s\n" in capsys.readouterr().err


def test_options_are_read_up_to_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("")
    given = ["--diff", "d", "p.py", "--own", "--diff=3"]
    options = parsed(*given)
    assert (options.diff, two_runs.Leaving(options, "").program) == ("d", given[2:])


# ------------------------------------------------------------------------- kinds of real programs

NEVER_MADE = """
import sys

def loss(v):
    return v - lax.pmean(v, 'rows')

f = xmap(loss, in_axes=['rows', ...], out_axes=['rows', ...], axis_resources={'rows': 'x'})

def other(spec):
    return xmap(loss, in_axes=spec, out_axes=['rows', ...], axis_resources={'rows': 'x'})

with Mesh(devices, ('x',)):
    print(np.asarray(f(x)).tolist())
    if '--other' in sys.argv:
        print(other(['rows', ...])(x))
"""
KINDS = {
    "one name for an axis and a mesh axis": (
        """
f = xmap(lambda v: v - lax.pmean(v, 'x'), in_axes=['x', ...], out_axes=['x', ...], axis_resources={'x': 'x'})
with Mesh(devices, ('x',)):
    np.testing.assert_allclose(f(x), x - x.mean(0), rtol=1e-5)
""",
        "1 of 1 xmap calls patched",
    ),
    "one function for parts of two sizes, and without a mesh": (
        """
def share(v):
    return v - lax.pmean(v, 'rows')

on_mesh = xmap(share, in_axes=['rows', ...], out_axes=['rows', ...], axis_resources={'rows': 'x'})
alone = xmap(share, in_axes=['rows', ...], out_axes=['rows', ...])
with Mesh(devices, ('x',)):
    for part in (x, x[:4]):
        np.testing.assert_allclose(on_mesh(part), part - part.mean(0), rtol=1e-5)
    np.testing.assert_allclose(alone(x), x - x.mean(0), rtol=1e-5)
""",
        "2 of 2 xmap calls patched",
    ),
    "specs in a class, options unpacked, several xmaps of one line, and names in an enumeration": (
        """
import enum

@jax.tree_util.register_pytree_node_class
class State:
    def __init__(self, w, n):
        self.w, self.n = w, n
    def tree_flatten(self):
        return (self.w, self.n), None
    @classmethod
    def tree_unflatten(cls, _, held):
        return cls(*held)

class Axis(enum.Enum):
    ROWS = 'rows'

def step(state, v):
    return State(state.w + lax.psum(v, 'rows'), state.n + 1)

SPECS, options = State([...], {}), {'axis_resources': {'rows': 'x'}, 'donate_argnums': 0, 'backend': None}
both = (step, SPECS), (lambda s, v: s.n, {})
step, size = (xmap(f, (SPECS, [Axis.ROWS.value, ...]), s, **options) for f, s in both)
with Mesh(devices, ('x',)):
    assert size(State(np.zeros(3, np.float32), 4), x) == 4
    np.testing.assert_allclose(step(State(np.zeros(3, np.float32), 0), x).w, x.sum(0), rtol=1e-5)
""",
        "1 of 1 xmap calls patched",
    ),
    "an xmap of an xmap, which share a function": (
        """
def total(v):
    return lax.psum(v, 'rows')

inner = xmap(lambda v: 2 * v, in_axes=['cols'], out_axes=['cols'])
outer = xmap(lambda v: total(inner(v)), in_axes=['rows', ...], out_axes=[...], axis_resources={'rows': 'x'})
with Mesh(devices, ('x',)):
    np.testing.assert_allclose(outer(x), 2 * x.sum(0), rtol=1e-5)
""",
        "2 of 2 xmap calls patched",
    ),
    "a backward rule with a sum, and a gradient from outside": (
        """
@jax.custom_vjp
def synced(v):
    return v

synced.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, 'rows'),))
axes = {'in_axes': ([...], ['rows', ...]), 'out_axes': ['rows'], 'axis_resources': {'rows': 'x'}}
f = xmap(lambda w, v: (synced(w) * v).sum(), **axes)
with Mesh(devices, ('x',)):
    print(jax.grad(lambda w: f(w, x).sum())(np.ones(3, np.float32)))
""",
        "prog.py:13: `synced.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, 'rows'),))`: this is in a rule",
    ),
    "a function of an xmap that this run does not make": (
        NEVER_MADE,
        "2 of 2 xmap calls patched",
    ),
    "an option of xmap, and a mesh that is read": (
        """
from jax.experimental import maps
jax.config.update('experimental_xmap_spmd_lowering', True)

def share(v):
    return v / lax.psum(1, 'rows') * maps.thread_resources.env.shape['x']

f = jax.jit(xmap(share, in_axes=['rows', ...], out_axes=['rows', ...], axis_resources={'rows': 'x'}))
with Mesh(devices, ('x',)):
    np.testing.assert_allclose(f(x), x / 8 * 4, rtol=1e-5)
""",
        "1 of 1 xmap calls patched",
    ),
    "removed names, runpy, a module that is written, and an xmap that is never called": (
        """
import os, runpy, sys, types
from jax.experimental import PartitionSpec as P
from jax.experimental.maps import SerialLoop
from jax.experimental.pjit import pjit, with_sharding_constraint

sys.modules['odd'] = types.ModuleType('odd')
sys.modules['odd'].__file__ = 7

def share(row):
    return jax.tree_map(lambda v: v / lax.psum(v, 'rows'), row)

axes = {'in_axes': ['rows', ...], 'out_axes': ['rows', ...], 'axis_resources': {'rows': 'x'}}
f, never = xmap(share, **axes), xmap(lambda row: 2 * share(row), **axes)
twice = pjit(lambda v: with_sharding_constraint(2 * v, P('x')), in_axis_resources=P('x'), out_axis_resources=P('x'))
with Mesh(devices, ('x',)):
    np.testing.assert_allclose(f(x), x / x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(twice(x), 2 * x)
    np.testing.assert_allclose(runpy.run_path('./part.py')['g'](x), x - x.mean(0), rtol=1e-5)
    if not os.path.exists('named_axes.py'):
        with open('written.py', 'w') as file:
            file.write('from jax.experimental.maps import xmap\\nh = xmap(abs, in_axes=[...], out_axes=[...])')
        import written
        written.h(x)
# part.py
from jax import lax
from jax.experimental.maps import xmap

g = xmap(lambda v: v - lax.pmean(v, 'c'), in_axes=['c', ...], out_axes=['c', ...], axis_resources={'c': 'x'})
""",
        "3 of 4 xmap calls patched",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_program_runs_without_the_package_or_is_as_it_was(kind, tmp_path):
    text, words = KINDS[kind]
    text, _, part = text.partition("# part.py\n")
    (tmp_path / "prog.py").write_text(HEAD + text)
    (tmp_path / "part.py").write_text(part)
    done = leave("--write", "prog.py", cwd=tmp_path)
    assert words in " ".join(done.stdout.split()), done.stdout + done.stderr
    if words.startswith("prog"):
        assert (tmp_path / "prog.py").read_text() == HEAD + text
        return
    ran = leave("-c", WITHOUT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
