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
import sys

import jax
import jax.numpy as jnp
import numpy as np
import old_programs
import pytest

from xmap_compat import xmap
from xmap_compat.tools.leave import command, edits, messages, patch, report, running, values
from xmap_compat.tools.leave.recording import Recorder
from xmap_compat.tools.leave.replaying import Verifier
from xmap_compat.tools.leave.values import Leaf, RecordedCall
from xmap_compat.tools.leave.xmap_calls import FirstRun, XmapCall
from xmap_compat.tools.source.layout import Edit, applied, text_as_python

ROOT = pathlib.Path(__file__).parents[2]


def leave(*arguments, cwd):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
    kept["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    kept["JAX_PLATFORMS"] = "cpu"
    kept["PYTHONPATH"] = str(ROOT)
    command = [] if arguments[0] == "-c" else ["-m", "xmap_compat", "leave"]
    call = [sys.executable, *command, *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, env=kept, capture_output=True, text=True, timeout=400)


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
    assert "verified on" in done.stdout and "with gradients" in done.stdout
    assert "1 of 1 xmap calls patched" in done.stdout
    assert "JAX deprecates `with mesh:` (prog.py:13)" in done.stdout
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


def record(leaves, differentiated=False, traced=False):
    args = tuple(map(values.restored, leaves))
    results = values.evaluated(square, args, differentiated)
    of = RecordedCall(0, 1, values.described(args), None, traced)
    return of._replace(leaves=leaves, differentiated=differentiated, results=results)


def verifier(records, tmp_path):
    (tmp_path / "records").write_bytes(pickle.dumps(records))
    task = {"records": tmp_path / "records", "result": str(tmp_path / "result")}
    task["places"] = {("a.py", 1, 0): 0}
    task["ended"] = ""
    task["files"] = {os.path.realpath(__file__): "a.py"}
    return Verifier(task)


X = np.linspace(1, 2, 6, dtype=np.float32).reshape(2, 3)
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
    replay = verifier([record([Leaf(X)])], tmp_path)
    with contextlib.suppress(NameError):
        replay.probe(0, function)(np.zeros((2, 3), np.float32))
    replay.finish("")
    found, file, line = replay.seen.problems[0]
    assert words in found
    raised = ("a.py", function.__code__.co_firstlineno) if "raises" in words else ("", 0)
    assert (file, line) == raised


def test_recorded_arguments_are_used_and_not_those_of_the_program(tmp_path):
    """A wrong text that agrees on the program's own zeros is found, and the program's own call goes on."""
    replay = verifier([record([Leaf(X)])], tmp_path)
    found = replay.probe(0, lambda x: {"y": 2 * x})(np.zeros((2, 3), np.float32))
    replay.finish("")
    assert replay.seen.problems and not np.any(found["y"])


@pytest.mark.parametrize(
    "around", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]
)
def test_a_wrong_gradient_is_found_where_the_values_agree(around, tmp_path):
    halved = jax.custom_vjp(square)
    halved.defvjp(lambda x: (square(x), x), lambda x, g: (x * g["y"],))
    for function, words in ((halved, "the gradient of args[0] differs by"), (square, "")):
        replay = verifier([record([Leaf(X)], differentiated=True, traced=True)], tmp_path)
        probed = replay.probe(0, function)
        around(lambda x, f=probed: f(x)["y"].sum())(X)
        replay.finish("")
        if words:
            assert words in replay.seen.problems[0][0]
        else:
            assert replay.seen.problems == {}


def test_calls_are_compared_on_the_meshes_of_their_records(tmp_path):
    """Two calls of the same types, one of them traced; the program enters neither mesh."""
    records = []
    for k, name in ((0, "a"), (2, "b")):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[k : k + 2]), (name,))
        records.append(record([Leaf(X)])._replace(mesh=values.described_mesh(mesh)))
    records[1] = records[1]._replace(traced=True, differentiated=False)
    replay = verifier(records, tmp_path)
    seen = []

    def on_the_mesh(x):
        seen.append(jax.sharding.get_abstract_mesh().axis_names)
        return {"y": x * x}

    probed = replay.probe(0, on_the_mesh)
    probed(X)
    jax.jit(lambda x: probed(x))(X)
    replay.finish("")
    assert seen == [(), (), ("a",), ("b",)] and replay.seen.problems == {}


def test_records_can_be_read_before_the_program_imports_jax(tmp_path):
    records = [record([Leaf(X.astype(jnp.bfloat16))], differentiated=True)]
    (tmp_path / "records").write_bytes(pickle.dumps(records))
    program = (
        "import pickle, sys; from xmap_compat.tools.leave import replaying; calls = pickle.load(open('records', 'rb'))"
        "; print(len(calls), calls[0].leaves[0].value.dtype, 'jax' in sys.modules)"
    )
    done = leave("-c", program, cwd=tmp_path)
    assert done.stdout.split() == ["1", "bfloat16", "False"], done.stderr


def test_what_orders_of_addition_explain_is_no_difference():
    leaf = lambda dtype, error: {"": (np.linspace(1, 2, 9) * (1 + error)).astype(dtype)}
    for dtype, small, large in (
        ("f8", 1e-11, 1e-7),
        ("f4", 1e-6, 1e-3),
        (jnp.bfloat16, 1e-2, 0.2),
        ("c8", 1e-6, 1e-3),
    ):
        assert values.difference(leaf(dtype, small), leaf(dtype, 0)) == ""
        assert values.difference(leaf(dtype, large), leaf(dtype, 0)) != ""
    with_nan = lambda error: {"": np.array([np.nan, np.inf, 1 + error], "f4")}
    assert values.difference(with_nan(1e-6), with_nan(0)) == ""
    numbers = lambda k: {"": np.array([1 << 30, k])}
    assert "1 of its 2 elements" in values.difference(numbers(1), numbers(2))


def test_programs_that_compute_in_small_numbers_may_differ_by_more():
    """A program in bfloat16 whose results are in float32."""
    wanted, found = (
        {"": np.linspace(1, 2, 9, dtype="f4")},
        {"": np.linspace(1, 2.004, 9, dtype="f4")},
    )
    assert "differs by 0.004" in values.difference(found, wanted)
    assert values.difference(found, wanted, is_coarse=True) == ""
    far = {"": np.linspace(1, 2.1, 9, dtype="f4")}
    assert "differs by 0.1" in values.difference(far, wanted, is_coarse=True)


def test_keys_and_weak_numbers_are_recorded_as_they_are():
    for given in (jax.random.key(3, impl="rbg"), jnp.asarray(2.0), 2.0):
        leaf = values.leaf_without_value(given)._replace(value=np.array(values.data_of(given)))
        again = values.restored(leaf)
        assert jax.typeof(again) == jax.typeof(jnp.asarray(given))
        assert np.array_equal(*map(values.data_of, (again, given)))


def test_a_result_whose_copies_differ_is_compared_device_by_device():
    """As of xmap, where a result varies over an axis that its specification leaves out."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    specs = {"mesh": mesh, "in_specs": (), "out_specs": jax.P("x"), "check_vma": False}
    differs = jax.shard_map(lambda: jax.lax.axis_index("y")[None], **specs)()
    # A sum over y that an edit forgets: the first copy may be right.
    whole = jax.device_put(np.zeros(2, np.int32), jax.sharding.NamedSharding(mesh, jax.P("x")))
    found, expected = (values.named("a result", array) for array in (differs, whole))
    assert [*found] == ["a result", "a result on device 1", "a result on device 3"]
    assert "the results are ['a result', 'a result on" in values.difference(found, expected)
    assert values.difference(found, found) == ""


# ------------------------------------------------------------------------ what the first run records


@pytest.fixture
def recorder(tmp_path):
    return Recorder({"tree": "", "folders": {}})


def test_what_one_xmap_call_has_traced_counts_for_others_of_the_same_function(recorder):
    """JAX traces it once."""
    xmapped = xmap(lambda row: jax.lax.psum(row, "i"), ["i"], [])
    cs = [XmapCall("a.py", (k, 0, k, 9), number=k) for k in range(2)]
    for c in cs:
        recorder.functions[c.number][c.number] = xmapped
    recorder.learn(cs)
    assert [c.axes for c in cs] == [{"i"}, {"i"}]


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
    found = [noted.call.leaves[0].value for noted in recorder.noted]
    np.testing.assert_array_equal(found[::2], [X, X + 1, X + 2])
    assert [value.dtype for value in found[1::2]] == [np.int32] * 3 and c.calls == 10


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
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_words_and_nothing_runs(case, tmp_path, monkeypatch, capsys):
    arguments, files, words = BAD[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    with contextlib.suppress(SystemExit):
        assert command.main(parsed(*arguments)) == 2
    assert words in capsys.readouterr().err


def test_a_lack_or_a_fault_of_leave_is_told_as_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(command.Leaving, "run", lambda self: 1 / 0)
    assert command.main(parsed("p.py")) == 2
    assert "leave itself fails, with ZeroDivisionError: division by zero" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(parsed("p.py")) == 2
    assert "leave: it needs the type checker ty" in capsys.readouterr().err


RUN = {
    "no xmap": ("print(1)", "p.py ended with no error and called no xmapped function"),
    "an exception before the first call": (
        HEAD + CENTRED.replace("with Mesh", "raise ValueError('no data')\nwith Mesh"),
        "p.py ended with ValueError before its first call",
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
    assert "not verified: never called" in words
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


@pytest.mark.parametrize("kind", FILES)
def test_git_applies_the_patch_to_the_same_bytes(kind, tmp_path, monkeypatch):
    before, path = FILES[kind], tmp_path / "sub" / "prog.py"
    path.parent.mkdir()
    path.write_bytes(before)
    git("init", "-q", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    new = "b = 22\nnew = '\u00e9'"
    after = applied(before, str(path), [edit(text_as_python(before, "prog.py"), "b = 2", new)])
    changes = {str(path): (before, after), str(path.parent / "helpers.py"): (None, b"# new\n")}
    (tmp_path.parent / "p.patch").write_bytes(patch.diff(changes))
    git("apply", tmp_path.parent / "p.patch", cwd=tmp_path)
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


def read_only(paths, monkeypatch):
    paths[1].chmod(0o400)
    return "is read-only"


def uncommitted(paths, monkeypatch):
    git("init", "-q", cwd=paths[0].parent)
    return "changes that git has not committed"


def new_file_is_there(paths, monkeypatch):
    (paths[0].parent / "new.py").write_text("own")
    return "has changed since it was read"


def disk_is_full(paths, monkeypatch):
    write = patch.write_file
    full = iter([False, True])

    def write_file(path, data):
        if next(full, False):
            pathlib.Path(path).write_bytes(data[:1])
            raise OSError("no space left")
        write(path, data)

    monkeypatch.setattr(patch, "write_file", write_file)
    return "Nothing is written: no space left"


@pytest.mark.parametrize(
    "happens", [changed, read_only, uncommitted, new_file_is_there, disk_is_full]
)
def test_all_files_are_written_or_none(happens, tmp_path, monkeypatch):
    paths, changes = two_files(tmp_path)
    words = happens(paths, monkeypatch)
    contents = lambda: {path.name: path.read_bytes() for path in tmp_path.glob("*.py")}
    before = contents()
    with pytest.raises(patch.Refused, match=words):
        patch.write({**changes, str(tmp_path / "new.py"): (None, b"3\n")})
    assert contents() == before


def test_uncommitted_changes_are_written_over_with_force(tmp_path):
    paths, changes = two_files(tmp_path)
    git("init", "-q", cwd=tmp_path)
    patch.write(changes, force=True)
    assert paths[0].read_bytes() == b"2\n"


def test_files_of_others_and_large_ones_are_links_which_are_copied_before_they_are_written(
    tmp_path,
):
    folder = tmp_path / "project"
    (folder / ".hidden").mkdir(parents=True)
    (folder / "big.bin").write_bytes(bytes(patch.LARGE))
    (folder / "file.py").write_text("2")
    (tmp_path / "library.py").write_text("1")
    (folder / "library.py").symlink_to(tmp_path / "library.py")
    tree = str(tmp_path / "tree") + os.sep
    folders = patch.mirror([str(folder)], tree)
    copy = pathlib.Path(folders[str(folder)])
    links = {path.name: path.is_symlink() for path in copy.iterdir()}
    assert links == {"big.bin": True, "file.py": False, "library.py": True}
    recorder = Recorder({"tree": tree, "folders": folders})
    assert recorder.users_file(str(copy / "file.py")) == str(folder / "file.py")
    assert recorder.users_file(str(copy / "library.py")) == ""
    path = str(copy / "big.bin")
    running.copy_before_writing(tree, "open", (path, "r", os.O_RDONLY))
    assert os.path.islink(path)
    running.copy_before_writing(tree, "open", (path, "ab", os.O_WRONLY | os.O_APPEND))
    with open(path, "ab") as file:
        file.write(b"more")
    assert (folder / "big.bin").stat().st_size == patch.LARGE
    assert os.path.getsize(path) == patch.LARGE + 4


# ------------------------------------------------------------------- what is verified together


def leaving(tmp_path, monkeypatch):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return command.Leaving(parsed("p.py"), str(tmp_path / f"{patch.SCRATCH}1"))


def test_what_differs_stays_and_the_rest_is_compared_again(tmp_path, monkeypatch):
    """The files that are written are those of the last replay."""
    left = leaving(tmp_path, monkeypatch)
    every = [XmapCall("p.py", PLACE, k, made=1, calls=1, recorded=1) for k in range(4)]
    every[3].calls = every[3].recorded = 0
    compared = []

    class Program(argparse.Namespace):
        refuse_or_add = lambda self: None
        edited = lambda self, patched, others: edits.Edited(functions=[c.number for c in patched])

    def replay(found, records, edited, patched):
        compared.append(edited.functions)
        return dict.fromkeys({0, 2} & {*edited.functions}, "differs when it is run: it raises E")

    monkeypatch.setattr(left, "first_run", lambda: (FirstRun(every), ""))
    monkeypatch.setattr(left, "replay", replay)
    monkeypatch.setattr(
        edits, "ProgramFiles", lambda *args: Program(sources={}, helper=Program(before=None))
    )
    monkeypatch.setattr(report.Report, "print", lambda self: [c.number for c in self.patched])
    assert left.run() == [1, 3] and compared == [[0, 1, 2, 3], [1, 3]]


def replayed(tmp_path, monkeypatch, seen, code=0):
    """What the driver makes of what a replay has found, of three xmap calls."""
    left = leaving(tmp_path, monkeypatch)

    def execute(task, *args):
        pathlib.Path(task["result"]).write_bytes(pickle.dumps({"ended": ""} | seen))
        pathlib.Path(task["log"]).write_text("")
        return code

    monkeypatch.setattr(left, "put", lambda *args: None)
    monkeypatch.setattr(left, "execute", execute)
    cs = [XmapCall("a.py", PLACE, k, recorded=1) for k in range(3)]
    return left.replay(FirstRun(cs), "", edits.Edited(), cs)


def test_a_rule_that_jax_traces_late_stays_with_its_line_before_the_edits(tmp_path):
    before = b"import jax\nfrom jax import lax\n\ndef rule(_, ct):\n    return lax.psum(ct, 'i'),\n"
    after = b"from named_axes import psum\n\ndef rule(_, ct):\n    return psum(ct, 'i'),\n"
    (tmp_path / "a.py").write_bytes(before)
    edited = edits.Edited({str(tmp_path / "a.py"): (before, after)})
    where, shown = edited.line_before(str(tmp_path / "a.py"), 4)
    assert (where, shown) == ("a.py:5", "return lax.psum(ct, 'i'),")
    late = "it raises NameError: unbound axis name: i.  In a rule of a jax.custom_vjp, take"
    assert messages.raised(late, where, shown).startswith(
        "a.py:5: `return lax.psum(ct, 'i'),` is in a rule whose gradient is taken from outside: "
    )
    assert messages.raised("it raises E", where, shown).endswith(
        "it raises E at a.py:5: `return lax.psum(ct, 'i'),`"
    )


def test_a_process_that_dies_or_hangs_tells_on_which_xmap_call(tmp_path, monkeypatch):
    problems = replayed(tmp_path, monkeypatch, {"ended": None, "executing": 1}, 124)
    assert [*problems] == [1] and "hangs for 120 s" in problems[1]


def test_a_program_that_ends_otherwise_verifies_nothing(tmp_path, monkeypatch):
    for ended, words in (("E", "E"), (None, "exit code 7")):
        problems = replayed(tmp_path, monkeypatch, {"ended": ended}, 7)
        assert len(problems) == 3
        assert f"ended with {words}, and the one with xmap with no error" in problems[0]
    assert replayed(tmp_path, monkeypatch, {}) == {}


def test_a_call_that_is_not_made_again_is_not_verified(tmp_path):
    replay = verifier([record([Leaf(X)]), record([Leaf(X)], traced=True)], tmp_path)
    replay.probe(0, square)(X)
    replay.finish("")
    assert replay.seen.problems == {0: ("a recorded call is not made again", "", 0)}


def test_a_line_says_that_a_run_goes_on_and_one_that_hangs_is_killed(tmp_path, monkeypatch, capsys):
    left = leaving(tmp_path, monkeypatch)
    monkeypatch.setattr(command, "EVERY", 0.2)
    monkeypatch.setattr(command, "_ENTRY", "import time; time.sleep(60)  # {0}")
    assert left.execute(left.task_in("second"), "replaying", limit=0.1) < 0
    assert "leave: replaying, 0 s\n" in capsys.readouterr().err


def test_options_are_read_up_to_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("")
    given = ["--diff", "d", "p.py", "--own", "--diff=3"]
    options = parsed(*given)
    assert (options.diff, command.Leaving(options, "").program) == ("d", given[2:])


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
        "stays: prog.py:13: `synced.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, 'rows'),))` is in a rule",
    ),
    "a function of an xmap that this run does not make": (
        NEVER_MADE,
        "1 of 2 xmap calls patched",
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


def program(*command, cwd):
    """Run a program under this package."""
    runs = f"import runpy, sys; sys.argv = {[*command]}; sys.path.insert(0, '')\n"
    runs += "import xmap_compat; xmap_compat.install()\n"
    done = leave("-c", runs + f"runpy.run_path({command[0]!r}, run_name='__main__')", cwd=cwd)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_program_runs_without_the_package_or_is_as_it_was(kind, tmp_path):
    text, words = KINDS[kind]
    text, _, part = text.partition("# part.py\n")
    (tmp_path / "prog.py").write_text(HEAD + text)
    (tmp_path / "part.py").write_text(part)
    done = leave("--write", "prog.py", cwd=tmp_path)
    assert words in " ".join(done.stdout.split()), done.stdout + done.stderr
    if words.startswith("stays"):
        assert (tmp_path / "prog.py").read_text() == HEAD + text
        return
    if words.startswith("1 of 2"):
        assert program("prog.py", "--other", cwd=tmp_path)
        return
    ran = leave("-c", WITHOUT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
