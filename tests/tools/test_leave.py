"""``python -m xmap_compat leave``: what it records, verifies, refuses and writes.

The oracles are NumPy, with which the programs of tests/leaving compare themselves in both runs; git, which applies
patches; and edits that are wrong on purpose, which the second run must find.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmap_compat import xmap
from xmap_compat.tools.leave import command, edits, messages, patch, report, running, values
from xmap_compat.tools.leave.construction import Construction, Found
from xmap_compat.tools.leave.recording import Recorder
from xmap_compat.tools.leave.replaying import Verifier
from xmap_compat.tools.leave.values import Leaf, RecordedCall
from xmap_compat.tools.source.layout import Edit, applied, python_of

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "leaving"


def leave(*arguments, cwd):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))
    }
    own = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    call = [
        sys.executable,
        *([] if arguments[0] == "-c" else ["-m", "xmap_compat", "leave"]),
        *map(str, arguments),
    ]
    return subprocess.run(
        call, cwd=cwd, env={**inherited, **own}, capture_output=True, text=True, timeout=400
    )


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
    assert "1 of 1 constructions patched" in done.stdout
    assert not (tmp_path / "log.txt").exists()
    written = (tmp_path / "prog.py").read_bytes()
    assert b"# tabs stay\r\n" in written and written.count(b"\n") == written.count(b"\r\n")
    assert b"xmap" not in written
    ran = leave(
        "-c",
        "import sys; sys.modules['xmap_compat'] = None; exec(open('prog.py').read())",
        cwd=tmp_path,
    )
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


METHODS = """
def total(v):
    return v - lax.psum(v, 'i')

class Holder:
    def __init__(self, axes):
        self.mapped = xmap(self.total, in_axes=['i', ...], out_axes=['i', ...], axis_resources={'i': axes})

    def total(self, v):
        return v + lax.pmean(v, 'i')

holder = Holder('x')
f = xmap(total, in_axes=['i', ...], out_axes=['i', ...], axis_resources={'i': ('x', 'y')})
with Mesh(devices.reshape(2, 2), ('x', 'y')):
    np.testing.assert_allclose(holder.mapped(x), x + x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(f(x), x - x.sum(0), rtol=1e-6)
"""


def test_methods_share_no_function_with_others_of_the_program(tmp_path):
    (tmp_path / "prog.py").write_text(HEAD + METHODS)
    done = leave("prog.py", cwd=tmp_path)
    assert "2 of 2 constructions patched" in done.stdout, done.stdout + done.stderr
    assert "nothing written: add --write before the program" in done.stdout


def test_files_of_others_are_links_in_the_copy(tmp_path):
    for name in ("own", "others"):
        (tmp_path / name).mkdir()
    (tmp_path / "others" / "library.py").write_text("1")
    (tmp_path / "own" / "library.py").symlink_to(tmp_path / "others" / "library.py")
    (tmp_path / "own" / "file.py").write_text("2")
    (copy,) = patch.mirror([str(tmp_path / "own")], str(tmp_path / "tree")).values()
    spec = {"tree": str(tmp_path / "tree") + os.sep, "folders": {str(tmp_path / "own"): copy}}
    recorder = Recorder(spec)
    files = [os.path.realpath(os.path.join(copy, name)) for name in ("file.py", "library.py")]
    assert [recorder.is_own(file) for file in files] == [True, False]


NAMES = sorted(path.name for path in PROGRAMS.iterdir())
# Constructions of each program, and those that are patched.
COUNTS = {
    "fft.py": (2, 2),
    "generate.py": (2, 2),
    "gptj": (3, 3),
    "halo.py": (1, 1),
    "kmeans.py": (2, 2),
    "layer_norm.py": (1, 1),
    "meshes.py": (1, 1),
    "microbatches.py": (3, 3),
    "nested.py": (2, 2),
    "particles.py": (1, 1),
    "ring_attention.py": (1, 1),
    "softmax.ipynb": (1, 1),
    "zero.py": (1, 1),
}


def test_the_programs_are_those_that_are_counted():
    assert sorted(COUNTS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_programs_in_the_style_of_real_ones_leave(name, tmp_path):
    if name == "gptj":
        pytest.importorskip("haiku")
        pytest.importorskip("optax")
        shutil.copytree(PROGRAMS / name, tmp_path, dirs_exist_ok=True)
    else:
        shutil.copy(PROGRAMS / name, tmp_path)
    done = leave("train.py" if name == "gptj" else name, cwd=tmp_path)
    constructions, patched = COUNTS[name]
    assert f"{patched} of {constructions} constructions patched" in done.stdout, (
        done.stdout + done.stderr
    )
    assert done.returncode == (constructions != patched)
    assert "new file named_axes.py" in done.stdout


def test_most_constructions_of_the_programs_are_patched():
    made, patched = (sum(counts) for counts in zip(*COUNTS.values()))
    assert len(COUNTS) >= 12 and patched >= 0.9 * made


# -------------------------------------------------------------- what the second run must find


def square(x):
    return {"y": x * x}


def record(leaves, differentiated=False, construction=0, traced=False):
    args = tuple(map(values.restored, leaves))
    text, results = values.described(args), values.evaluated(square, args, differentiated)
    return RecordedCall(construction, 1, text, None, traced, leaves, differentiated, results)


def verifier(records, tmp_path, stopped=False):
    (tmp_path / "records").write_bytes(pickle.dumps(records))
    spec = {
        "records": tmp_path / "records",
        "result": str(tmp_path / "result"),
        "places": [("a.py", 1, 0, 0)],
        "edited": [os.path.realpath(__file__)],
        "stopped": stopped,
    }
    return Verifier({**spec, "status": tmp_path / "status"})


X = np.linspace(1, 2, 6, dtype=np.float32).reshape(2, 3)
WRONG = {
    "numbers": (lambda x: {"y": x * x * (1 + 1e-3)}, "the result['y'] differs by"),
    "type": (
        lambda x: {"y": (x * x).astype(jnp.bfloat16)},
        "is bfloat16[2, 3], and with xmap float32[2, 3]",
    ),
    "shape": (lambda x: {"y": (x * x)[None]}, "is float32[1, 2, 3]"),
    "structure": (lambda x: (x * x,), "the results are ['the result[0]'"),
    "NaN": (lambda x: {"y": jnp.where(x > 1.9, jnp.nan, x * x)}, "infinities or NaN"),
    "an error": (lambda x: undefined, "it raises NameError: name 'undefined'"),  # noqa: F821
}


@pytest.mark.parametrize("how", WRONG)
def test_what_an_edited_function_computes_otherwise_is_found(how, tmp_path):
    function, words = WRONG[how]
    seen = verifier([record([Leaf(X)])], tmp_path)
    with contextlib.suppress(NameError):
        seen.probe(0, function)(np.zeros((2, 3), np.float32))
    assert words in seen.problems[0] and seen.agreed == {}
    line = function.__code__.co_firstlineno
    assert seen.raised == ({0: (os.path.realpath(__file__), line)} if "raises" in words else {})


def test_recorded_arguments_are_used_and_not_those_of_the_program(tmp_path):
    """A wrong text that agrees on the program's own zeros is found, and the program's own call goes on."""
    seen = verifier([record([Leaf(X)])], tmp_path)
    found = seen.probe(0, lambda x: {"y": 2 * x})(np.zeros((2, 3), np.float32))
    assert seen.problems and not np.any(found["y"])


@pytest.mark.parametrize(
    "around", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]
)
def test_a_wrong_gradient_is_found_where_the_values_agree(around, tmp_path):
    halved = jax.custom_vjp(square)
    halved.defvjp(lambda x: (square(x), x), lambda x, g: (x * g["y"],))
    seen = verifier([record([Leaf(X)], differentiated=True, traced=True)], tmp_path)
    probed = seen.probe(0, halved)
    around(lambda x: probed(x)["y"].sum())(X)
    seen.finish("")
    assert "the gradient of args[0] differs by" in seen.problems[0]
    right = verifier([record([Leaf(X)], differentiated=True, traced=True)], tmp_path)
    probed_right = right.probe(0, square)
    around(lambda x: probed_right(x)["y"].sum())(X)
    right.finish("")
    assert right.problems == {} and right.agreed == {0: 1}


def test_calls_are_found_among_traced_ones_and_compared_on_the_meshes_of_their_records(tmp_path):
    """An eager call after a traced one, and one on another mesh, all of the same types."""
    meshes = [
        jax.sharding.Mesh(np.array(jax.devices()[k : k + 2]), name)
        for k, name in ((0, ("a",)), (2, ("b",)))
    ]
    tell = lambda mesh: record([Leaf(X)])._replace(mesh=values.placed(mesh))
    eager = [tell(mesh) for mesh in meshes]
    seen = verifier([*eager, eager[1]._replace(traced=True, differentiated=True)], tmp_path)
    compared, compare = [], seen.compare
    seen.compare = lambda call, *others: (compared.append(call.traced), compare(call, *others))

    def on_the_mesh(x):
        held = jax.sharding.get_abstract_mesh().axis_names
        return {"y": jax.shard_map(lambda x: x * x, in_specs=jax.P(held), out_specs=jax.P(held))(x)}

    probed = seen.probe(0, on_the_mesh)
    with jax.set_mesh(meshes[1]):
        jax.jit(lambda x: probed(x))(X)
        assert compared == []
    with jax.set_mesh(meshes[0]):
        probed(X)
    assert compared == [False, False] and seen.problems == {} and seen.agreed == {0: 2}


def test_a_lock_around_a_traced_call_is_not_waited_for(tmp_path):
    """The edited function is compared after the program, which then holds no lock that the function takes."""
    lock, seen = threading.RLock(), verifier([record([Leaf(X)], traced=True)], tmp_path)

    def locked(x):
        with lock:
            return square(x)

    probed, ended = seen.probe(0, locked), threading.Event()

    def program():
        with lock:
            jax.jit(lambda x: probed(x))(X)
        ended.set()

    threading.Thread(target=program, daemon=True).start()
    assert ended.wait(60)
    seen.finish("")
    assert seen.problems == {} and seen.agreed == {0: 1}


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
    leaf = lambda dtype, error: [("", Leaf((np.linspace(1, 2, 9) * (1 + error)).astype(dtype)))]
    for dtype, small, large in (
        ("f8", 1e-11, 1e-7),
        ("f4", 1e-6, 1e-3),
        (jnp.bfloat16, 1e-2, 0.2),
        ("c8", 1e-6, 1e-3),
    ):
        assert values.difference(leaf(dtype, small), leaf(dtype, 0)) == ""
        assert values.difference(leaf(dtype, large), leaf(dtype, 0)) != ""
    numbers = lambda k: [("", Leaf(np.array([1 << 30, k])))]
    assert "1 of its 2 elements" in values.difference(numbers(1), numbers(2))


def test_what_the_noise_of_a_program_explains_is_no_difference():
    """Of a program in bfloat16: one result may have no noise by chance, and one that would be zero has nothing else."""
    wanted = [
        ("a", Leaf(np.linspace(1, 2, 9, dtype="f4"))),
        ("b", Leaf(np.full(3, 5, "f4"))),
        ("0", Leaf(np.ones(1))),
    ]
    changed = lambda *by: [
        (path, Leaf(leaf.value * (1 + k))) for (path, leaf), k in zip(wanted, by)
    ]
    noise = values.noise_of(changed(1e-3, 0, 3), wanted)
    assert values.difference(changed(0, 2e-3, 0), wanted) != ""
    assert values.difference(changed(0, 2e-3, 0), wanted, noise) == ""
    assert values.difference(changed(0, 1e-2, 0), wanted, noise).startswith("b differs by 0.05")
    of_zero = values.noise_of(changed(0, 0, 3), wanted)
    assert values.difference(changed(0, 2e-3, 0), wanted, of_zero) != ""


def test_keys_and_weak_numbers_are_recorded_as_they_are():
    key = jax.random.key(3, impl="rbg")
    again = values.restored(values.to_host(key))
    assert again.dtype == key.dtype and np.array_equal(*map(jax.random.key_data, (again, key)))
    assert jax.typeof(values.restored(values.to_host(2.0))) == jax.typeof(jnp.asarray(2.0))
    committed = jax.device_put(X, jax.devices()[1])
    assert values.restored(Leaf(X), committed).sharding == committed.sharding


def test_an_array_whose_copies_differ_is_recorded_device_by_device():
    """As of xmap, where a result varies over an axis that its specification leaves out."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    apart = jax.shard_map(
        lambda: jax.lax.axis_index("y")[None],
        mesh=mesh,
        in_specs=(),
        out_specs=jax.P("x"),
        check_vma=False,
    )()
    again = values.restored(values.to_host(apart), apart)
    assert [int(s.data[0]) for s in again.addressable_shards] == [0, 1, 0, 1]
    # A sum over y that an edit forgets: the first copy may be right.
    whole = jax.device_put(np.zeros(2, np.int32), jax.sharding.NamedSharding(mesh, jax.P("x")))
    found, expected = ([("a result", values.to_host(x))] for x in (apart, whole))
    assert np.array_equal(found[0][1].value, expected[0][1].value)
    assert "the copies of a result differ on its devices" in values.difference(found, expected)
    assert values.difference(found, found) == ""


# ------------------------------------------------------------------------ what the first run records


@pytest.fixture
def recorder(tmp_path):
    spec = {"calls": 3, "bytes": 1 << 20, "records": tmp_path / "records"}
    return Recorder({**spec, "status": tmp_path / "status", "tree": "", "folders": {}})


def test_what_one_construction_has_traced_counts_for_others_of_the_same_function(recorder):
    """JAX traces it once."""

    class Made:
        def __init__(self, declared):
            self.plan = type("Plan", (), {"declared": declared})

    declared = type("Declared", (), {"names": ["i"], "resources": {}})
    other = type("Declared", (), {"names": ["j"], "resources": {}})
    cs = [Construction("a.py", k, number=k) for k in range(3)]
    recorder.functions = {0: [Made(declared)], 1: [Made(declared)], 2: [Made(other)]}
    recorder.learn(cs)
    assert [c.axes for c in cs] == [{"i"}, {"i"}, {"j"}]


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
    xmapped, c = (
        xmap(lambda row: jax.lax.psum((row * row).sum(), "i"), ["i", ...], [...]),
        Construction("a.py", 1),
    )
    called = functools.partial(recorder.called, c, 1, xmapped)
    for _ in range(4):
        jax.eval_shape(lambda x: called(x), X)  # a trace of its own
    assert not c.differentiated
    TAKEN[kind](called)
    jax.effects_barrier()
    assert c.differentiated
    for pending in [*recorder.pending]:
        recorder.compute(c, pending)
    paths = {path for call in recorder.records for path, _ in call.results}
    assert paths == {"the result", "the gradient of args[0]"}


def test_a_gradient_of_what_an_xmapped_function_closes_over_is_noted(recorder):
    def loss(w):
        xmapped = xmap(lambda row: jax.lax.psum((w * row).sum(), "i"), ["i", ...], [...])
        return recorder.called(c, 1, xmapped, X)

    c = Construction("a.py", 1)
    assert np.isclose(jax.grad(loss)(2.0), X.sum()) and c.differentiated


def test_the_arguments_of_a_traced_call_are_counted_once(recorder):
    xmapped, c = xmap(lambda row: row.sum(), ["i", ...], ["i"]), Construction("a.py", 1)
    recorder.spec["bytes"] = X.nbytes + X[:, 0].nbytes
    jax.jit(lambda x: recorder.called(c, 1, xmapped, x))(X)
    jax.effects_barrier()
    recorder.compute(c, recorder.pending[0])
    assert (c.recorded, c.problem) == (1, "")


def test_an_xmap_whose_call_raises_is_refused_with_its_error(recorder, tmp_path):
    (tmp_path / "a.py").write_text("")
    c = Construction(str(tmp_path / "a.py"), 1)
    with pytest.raises(NameError):
        recorder.called(c, 1, xmap(lambda row: jax.lax.psum(row, "j"), ["i", ...], [...]), X)
    recorder.functions[0] = []
    recorder.learn([c])
    assert c.refused.startswith("its call raises NameError: ")
    assert "j" in c.refused.partition("NameError")[2]


# ------------------------------------------------------------------------------------ bad input

BAD = {
    "no program": ([], {}, "no program is given"),
    "an option": (["--wrte", "p.py"], {}, "--wrte"),
    "no number": (["--calls", "many", "p.py"], {}, "argument --calls: invalid int value: 'many'"),
    "no number of seconds": (
        ["--stop-after", "soon", "p.py"],
        {},
        "argument --stop-after: invalid int value",
    ),
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
    monkeypatch.setattr(subprocess, "run", None)
    with contextlib.suppress(SystemExit):
        assert command.main(parsed(*arguments)) == 2
    assert words in capsys.readouterr().err


def test_without_the_type_checker_nothing_runs_and_it_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(parsed("p.py")) == 2
    assert "leave: it needs the type checker ty" in capsys.readouterr().err


def test_a_failure_of_leave_itself_is_told_as_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.Leaving, "run", lambda self: 1 / 0)
    assert command.main(parsed("p.py")) == 2
    assert "leave itself fails, with ZeroDivisionError: division by zero" in capsys.readouterr().err


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
    done = leave("--write", "--stop-after", "200", "-m", "pkg.run", cwd=tmp_path / "work")
    words = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stdout + done.stderr
    assert words.count("it is in generated code or in another package") == 2
    assert "not verified: never called" in words
    assert "2 of 4 constructions patched" in words
    written = (package / "run.py").read_text()
    assert "from .named_axes import mapped, psum" in written and "never = mapped(" in written


# ------------------------------------------------------------------------------ files and patches


def edit(text, old, new):
    line, column = (
        text[: text.index(old)].count("\n") + 1,
        len(text[: text.index(old)].rpartition("\n")[2]),
    )
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
    after = applied(before, str(path), [edit(python_of(before, "prog.py"), "b = 2", new)])
    changes = {str(path): (before, after), str(path.parent / "helpers.py"): (None, b"# new\n")}
    (tmp_path.parent / "p.patch").write_bytes(
        patch.diff(changes).encode("utf-8", "surrogateescape")
    )
    git("apply", tmp_path.parent / "p.patch", cwd=tmp_path)
    assert path.read_bytes() == after and (path.parent / "helpers.py").read_bytes() == b"# new\n"
    encoding, ends = "latin-1" if kind == "Latin-1" else "utf-8", "\r\n" if kind == "CRLF" else "\n"
    assert after == before.replace(b"b = 2", new.replace("\n", ends).encode(encoding))


@pytest.mark.parametrize("indent, end", [(1, "\n"), (2, ""), (None, "\n")])
def test_cells_are_edited_and_the_rest_of_a_notebook_stays(indent, end):
    sources = [
        ["%precision 4\n", "a = 1"],
        "%%bash\nls",
        "%time b = 2\n# a\nif a:\n    !ls\nc = 3",
        "d = a",
    ]
    cells = [{"cell_type": "code", "source": source} for source in sources] + [
        {"cell_type": "markdown", "source": "x"}
    ]
    data = (json.dumps({"cells": cells}, indent=indent, ensure_ascii=False) + end).encode()
    text = python_of(data, "n.ipynb")
    names = {}
    exec(text, names)
    assert (names["b"], names["c"], names["d"]) == (2, 3, 1)
    after = applied(data, "n.ipynb", [edit(text, f"{name} =", f"{name}{name} =") for name in "acd"])
    assert after == data.replace(b"a = 1", b"aa = 1").replace(b"c =", b"cc =").replace(
        b"d =", b"dd ="
    )


def two_files(tmp_path):
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_bytes(b"1\n")
        path.chmod(0o750)
    return paths, {str(path): (b"1\n", b"2\n") for path in paths}


def test_files_are_written_with_their_modes(tmp_path):
    paths, changes = two_files(tmp_path)
    patch.write({**changes, str(tmp_path / "new.py"): (None, b"3\n")})
    assert [path.read_bytes() for path in paths] == [b"2\n"] * 2 and paths[
        0
    ].stat().st_mode & 0o777 == 0o750
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
    replace, calls = os.replace, []

    def once(*names):
        calls.append(names)
        if len(calls) == 2:
            raise OSError("no space left")
        replace(*names)

    monkeypatch.setattr(os, "replace", once)
    return "Nothing is written: no space left"


@pytest.mark.parametrize(
    "happens", [changed, read_only, uncommitted, new_file_is_there, disk_is_full]
)
def test_all_files_are_written_or_none(happens, tmp_path, monkeypatch):
    paths, changes = two_files(tmp_path)
    words = happens(paths, monkeypatch)
    before = {
        name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path) if name != ".git"
    }
    with pytest.raises(patch.Refused, match=words):
        patch.write({**changes, str(tmp_path / "new.py"): (None, b"3\n")})
    assert {
        name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path) if name != ".git"
    } == before


def test_uncommitted_changes_are_written_over_with_force(tmp_path):
    paths, changes = two_files(tmp_path)
    git("init", "-q", cwd=tmp_path)
    patch.write(changes, force=True)
    assert paths[0].read_bytes() == b"2\n"


def test_a_large_file_of_the_copy_is_copied_before_it_is_written(tmp_path):
    """A link to the user's file is not written through."""
    folder, tree = tmp_path / "own", str(tmp_path / "tree") + os.sep
    (folder / ".hidden").mkdir(parents=True)
    (folder / "big.bin").write_bytes(bytes(patch.LARGE))
    (folder / "small.txt").write_text("a")
    copy = pathlib.Path(patch.mirror([str(folder)], tree)[str(folder)])
    assert (copy / "big.bin").is_symlink() and sorted(os.listdir(copy)) == ["big.bin", "small.txt"]
    path = str(copy / "big.bin")
    running.copy_before_writing(tree, "open", (path, "r", os.O_RDONLY))
    assert (copy / "big.bin").is_symlink()
    running.copy_before_writing(tree, "open", (path, "ab", os.O_WRONLY | os.O_APPEND))
    with open(path, "ab") as file:
        file.write(b"more")
    assert (folder / "big.bin").stat().st_size == patch.LARGE
    assert (copy / "big.bin").stat().st_size == patch.LARGE + 4


# ------------------------------------------------------------------- what is verified together


def test_what_differs_stays_and_the_rest_is_compared_again(tmp_path, monkeypatch):
    """The files that are written are those of the last replay."""
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    left = command.Leaving(parsed("p.py"), str(tmp_path / "scratch"))
    every = [Construction("p.py", k, number=k, reached=1, calls=1, recorded=1) for k in range(4)]
    every[3].calls = every[3].recorded = 0
    compared = []

    class Program:
        def __init__(self, *args):
            self.sources = {}

        def judge(self):
            pass

        def edited(self, patched, others):
            return edits.Edited({}, [], [], None, [c.number for c in patched])

    def replay(found, records, edited, patched, code):
        compared.append(edited.functions)
        return dict.fromkeys({0, 2} & {*edited.functions}, "differs when it is run: it raises E")

    monkeypatch.setattr(
        left, "first_run", lambda: (Found(every), {"folders": {}, "records": ""}, 0)
    )
    monkeypatch.setattr(left, "replay", replay)
    monkeypatch.setattr(edits, "Program", Program)
    monkeypatch.setattr(report.Report, "print", lambda self: [c.number for c in self.patched])
    assert left.run() == [1, 3] and compared == [[0, 1, 2, 3], [1, 3]]


def replayed(tmp_path, monkeypatch, seen, code=0):
    """What the driver makes of what a replay has found, of three constructions."""
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    left = command.Leaving(parsed("p.py"), str(tmp_path / "scratch"))
    found = {"problems": {}, "agreed": {}, "ended": "", "whole": True, "comparing": -1} | seen

    def execute(spec, *args):
        pathlib.Path(spec["result"]).write_text(json.dumps(found))
        pathlib.Path(spec["log"]).write_text("")
        return code

    monkeypatch.setattr(left, "put", lambda *args: None)
    monkeypatch.setattr(left, "execute", execute)
    cs = [Construction("a.py", k, number=k, recorded=1) for k in range(3)]
    return left.replay(Found(cs), "", edits.Edited({}, [], [], None, []), cs, 0)


def test_a_rule_that_jax_traces_late_stays_with_its_line_before_the_edits(tmp_path):
    before = b"import jax\nfrom jax import lax\n\ndef rule(_, ct):\n    return lax.psum(ct, 'i'),\n"
    after = b"from named_axes import psum\n\ndef rule(_, ct):\n    return psum(ct, 'i'),\n"
    (tmp_path / "a.py").write_bytes(before)
    edited = edits.Edited({str(tmp_path / "a.py"): (before, after)}, [], [], None, [])
    where, shown = edited.line_before(str(tmp_path / "a.py"), 4)
    assert (where, shown) == ("a.py:5", "return lax.psum(ct, 'i'),")
    late = "it raises NameError: unbound axis name: i.  In a rule of a jax.custom_vjp, take"
    assert messages.differs(late, where, shown).startswith(
        "a.py:5: `return lax.psum(ct, 'i'),` is in a rule whose gradient is taken from outside: "
    )
    assert messages.differs("it raises E", where, shown).endswith(
        "it raises E at a.py:5: `return lax.psum(ct, 'i'),`"
    )


def test_a_process_that_dies_or_hangs_tells_on_which_construction(tmp_path, monkeypatch):
    problems = replayed(tmp_path, monkeypatch, {"whole": False, "comparing": 1}, 124)
    assert [*problems] == [1] and "hangs for 120 s" in problems[1]


def test_a_program_that_ends_otherwise_verifies_nothing(tmp_path, monkeypatch):
    agreed = {"0": 1, "1": 1, "2": 1}
    problems = replayed(tmp_path, monkeypatch, {"agreed": agreed, "ended": "E: no"}, 1)
    assert len(problems) == 3
    assert "ended with E: no, and the one with xmap with no error" in problems[0]


def test_a_call_that_is_not_found_again_is_not_verified(tmp_path, monkeypatch):
    problems = replayed(tmp_path, monkeypatch, {"agreed": {"0": 1, "2": 1}})
    assert [*problems] == [1] and "0 of 1 were found again" in problems[1]


def test_who_looks_on_is_told_what_a_run_has_seen(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    monkeypatch.setattr(report, "EVERY", 0.01)
    for looks_on in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", looks_on)
        with report.progress("recording", str(tmp_path / "status")):
            time.sleep(0.05)
            running.tell({"status": tmp_path / "status"}, "3 constructions made, 5 calls recorded")
        if looks_on.isatty():
            lines = looks_on.getvalue().splitlines()
            assert len(lines) > 1 and lines[0] == "leave: recording: 0 s"
            assert lines[-1] == "leave: recording: 3 constructions made, 5 calls recorded, 0 s"
    assert looks_on.getvalue() == ""


def test_options_are_read_up_to_the_program():
    given = [
        "--calls=2",
        "--stop-after",
        "9",
        "--diff",
        "d",
        "p.py",
        "--calls",
        "7",
        "--own",
        "--stop-after=3",
    ]
    options = parsed(*given)
    command.check(options)
    assert (options.calls, options.stop_after, options.diff, options.program) == (
        2,
        9,
        "d",
        given[5:],
    )


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
        "1 of 1 constructions patched",
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
        "2 of 2 constructions patched",
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
        "1 of 1 constructions patched",
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
        "2 of 2 constructions patched",
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
        "1 of 2 constructions patched",
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
        "1 of 1 constructions patched",
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
        "3 of 4 constructions patched",
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
    ran = leave(
        "-c",
        "import sys; sys.modules['xmap_compat'] = None; exec(open('prog.py').read())",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
