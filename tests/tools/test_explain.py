"""``python -m xmap_compat explain``: the plan of each distinct call, once, beside what a program does anyway.

Programs run in processes of their own.  Their output, traceback and exit code are compared with those of
``python -m xmap_compat`` without ``explain``; plans with those of the same calls; and the programs that ``--source``
writes are run without xmap_compat and compared with NumPy.
"""

import functools
import io
import os
import re
import runpy
import textwrap
import threading

import forks
import jax
import numpy as np
import pytest
import subprocesses
from jax import lax

from xmap_compat import SerialLoop, api, xmap
from xmap_compat.tools import explain
from xmap_compat.tools.source import Merged

PROGRAM = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental.maps import Mesh, xmap

    def total(x):
        print("traced")
        return lax.psum(x, "i")

    def product(x, y):
        return lax.pdot(x, y, "k")

    def main():
        print(sys.argv, __name__)
        f = xmap(total, ["i", ...], [...], axis_resources={"i": "x"})
        with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
            for _ in range(3):
                f(np.ones((8, 3)))
                xmap(total, ["i", ...], [...], axis_resources={"i": "x"})(np.ones((8, 3)))
            f(np.ones((8, 5)))
            f(np.ones((8, 3), np.int32))
        for _ in range(2):
            xmap(product, (["i", "k"], ["k", "j"]), ["i", "j"])(np.ones((2, 3)), np.ones((3, 4)))
            xmap(lambda x: x * 2, ["i"], ["i"])(np.ones(3))
        ENDING

    main()
"""
ENDINGS = {"success": "pass", "exit code": "sys.exit(3)", "error": "xmap(total, ['j'], [])(np.ones(3))"}


run = functools.partial(forks.run, COLUMNS="300")


@pytest.fixture
def program(tmp_path):
    def write(source=PROGRAM, ending="pass", name="program.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).replace("ENDING", ending))
        return path

    return write


TITLE = r"^---- plan (\d+), called at \S+?(\w+\.py):(\d+) \(([\w<>]+)\) -*$"


def own_output(text):
    """What the program printed: what stands before the report."""
    own, _, report = text.partition("xmap_compat explain: ")
    assert report
    return own


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [["program.py"], ["-m", "program"]], ids=str)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_program_runs_as_without_explain(program, tmp_path, way, ending):
    program(ending=ENDINGS[ending])
    plain, explained = run(*way, "a", "--source", cwd=tmp_path), run("explain", *way, "a", "--source", cwd=tmp_path)
    assert explained.returncode == plain.returncode == {"success": 0, "exit code": 3, "error": 1}[ending]
    assert explained.stderr == plain.stderr
    assert own_output(explained.stdout) == plain.stdout
    assert "'a', '--source'] __main__" in plain.stdout


def test_each_distinct_call_is_explained_once(program, tmp_path):
    path = program()
    done = run("explain", "program.py", cwd=tmp_path)
    lines = path.read_text().splitlines()
    titles = [(int(k), file, lines[int(line) - 1].strip()) for k, file, line, _ in re.findall(TITLE, done.stdout, re.M)]
    f, product = "f(np.ones((8, ", "xmap(product, "
    assert [k for k, _, _ in titles] == [1, 2, 3, 4, 5]
    assert {file for _, file, _ in titles} == {"program.py"}
    starts = [f + "3)))", f + "5)))", f + "3), np.int32))", product, "xmap(lambda x: x * 2"]
    assert all(code.startswith(start) for (_, _, code), start in zip(titles, starts, strict=True))
    arguments = re.findall(r"^(\w+) +(\w+\[[\d,]+\]) .*$", done.stdout, re.M)
    assert [type for name, type in arguments if name == "x"] == [
        "f32[8,3]",
        "f32[8,5]",
        "i32[8,3]",
        "f32[2,3]",
        "f32[3]",
    ]
    assert done.stdout.count("local sum, all-reduce over x") == 3
    table = done.stdout.partition("xmap_compat explain: 5 plans\n")[2].splitlines()[:6]
    assert [line.split()[:2] for line in table[1:]] == [
        [str(k), name] for k, name in enumerate(["total"] * 3 + ["product", "<lambda>"], 1)
    ]


def test_the_modern_programs_are_one_module(program, tmp_path):
    program()
    done = run("explain", "--brief", "--source", "modern", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path / "modern") == ["program_modern.py"]
    path = tmp_path / "modern" / "program_modern.py"
    summary, *table = done.stdout.partition("xmap_compat explain: ")[2].splitlines()
    assert summary == f"5 plans, 5 written to {path}"
    entries = ["mapped_total", "mapped_total_2", "mapped_total_3", "mapped_product", "mapped_function"]
    assert [line.split()[-1] for line in table[1:]] == entries
    text = path.read_text()
    assert "xmap_compat" not in text and text.count("def total(x)") == 1 and text.count("mesh = Mesh(") == 1
    entry = runpy.run_path(str(path)).get
    x, y = np.arange(24.0).reshape(8, 3), np.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(entry("mapped_total")(x), x.sum(0))
    np.testing.assert_allclose(entry("mapped_product")(x[:2], y), x[:2] @ y)
    np.testing.assert_allclose(entry("mapped_function")(x[0]), 2 * x[0])


FIRST = '''"""f as a program."""

import jax
from model import scale

mesh = 1


def f(x):
    mesh_of = mesh
    return x * mesh_of


def g(x):
    return f(x)


f.rule = g
'''


def test_definitions_that_are_the_same_are_merged_and_others_renamed():
    merged = Merged()
    assert merged.add(FIRST, "g", "a") == "g"
    assert merged.add(FIRST, "g", "b") == "g"
    assert merged.add(FIRST.replace("mesh = 1", "mesh = 2"), "g", "c") == "g_2"
    assert merged.add(FIRST.replace("x * mesh_of", "x + mesh_of"), "f", "d") == "f_3"
    # An import and a global variable that are in the way.
    assert merged.add(FIRST.replace("import scale", "import other as scale"), "g", "e") is None
    another = FIRST.replace("mesh = 1", "mesh = 3")
    assert merged.add(another.replace("mesh_of = mesh", "global mesh"), "g", "e") is None
    text = merged.text("All.").split('"""')[2]
    assert [line for line in text.splitlines() if line.startswith(("mesh", "def", "f"))] == [
        *("from model import scale", "mesh = 1", "def f(x):", "def g(x):", "f.rule = g"),
        *("mesh_2 = 2", "def f_2(x):", "def g_2(x):", "f_2.rule = g_2"),
        *("def f_3(x):", "def g_3(x):", "f_3.rule = g_3"),
    ]
    assert "mesh_of = mesh_2" in text and "return f_3(x)" in text


RULE = '''"""g as a program."""

import jax

scale = 2.0


@jax.custom_vjp
def f(x):
    return x


def fwd(x):
    return x, None


def bwd(residual, ct):
    return (scale * ct,)


f.defvjp(fwd, bwd)


def g(x):
    return abs(f(x))
'''


@pytest.mark.parametrize(
    "old, new, merged",
    [
        ("scale * ct", "ct / scale", True),  # the rule of a function that is itself the same
        ("scale = 2.0", "scale = 4.0", True),
        ("return (scale * ct,)", "by = lambda scale: scale * ct\n    return (by(6.0),)", True),
        ("return (scale * ct,)", "return jax.tree.map(lambda ct, *, scale=scale: ct * scale, (ct,))", True),
        ("scale = 2.0", "scale = 4.0\nby = lambda scale: scale", True),
        ("return (scale * ct,)", "scale = 6.0\n    return (scale * ct,)", True),
        ("scale = 2.0", "from math import pi as scale", False),
        ("scale = 2.0", "scale = 4.25\nabs = lambda x: x * len(f'{scale}')", True),
        ("scale = 2.0", "scale = 4.0\nabs = lambda x: -2 * x", True),
        ("return x, None", "f_2 = 1\n    return f_2 * x, f(x)", True),  # the name that is wanted is a local one
    ],
)
def test_a_merged_module_computes_what_its_modules_compute(old, new, merged):
    both, texts = Merged(), [RULE, RULE.replace(old, new)]
    names = [both.add(text, "g", "") for text in texts]
    assert (None not in names) is merged
    if merged:
        found = {}
        exec(both.text("Both."), found)
        for name, text in zip(names, texts):
            own = {}
            exec(text, own)
            for order in (lambda f: f, jax.grad):
                np.testing.assert_array_equal(order(found[name])(3.0), order(own["g"])(3.0))


def test_a_builtin_is_not_another_modules_function():
    both = Merged()
    assert both.add(RULE.replace("scale = 2.0", "scale = 4.0\nabs = lambda x: -2 * x"), "g", "") == "g"
    assert both.add(RULE, "g", "") is None


def test_arrays_that_are_not_written_are_merged_if_they_are_the_same():
    text, one = RULE.replace("scale = 2.0", "scale: jax.Array  # assign this one"), np.ones(3)
    both = Merged()
    assert both.add(text, "g", "", {"scale": one}) == both.add(text, "g", "", {"scale": one}) == "g"
    assert both.add(text, "g", "", {"scale": np.ones(3)}) is None
    assert both.add(RULE, "g", "") is None or "scale_2 = 2.0" in both.text("Both.")


def test_the_directory_may_be_given_with_an_equals_sign_and_the_program_may_leave(program, tmp_path):
    program(PROGRAM.replace('print("traced")', 'os.chdir("/")'))
    done = run("explain", f"--source={tmp_path}", "program.py", cwd=tmp_path)
    assert done.stderr == ""
    assert (tmp_path / "program_modern.py").exists()


def test_what_has_no_source_says_why(program, tmp_path):
    program(
        """
        import jax
        import numpy as np
        from jax.experimental.maps import xmap

        def printing(x):
            jax.debug.print("{}", x)
            return x

        xmap(eval("lambda x: printing(x)"), ["i"], ["i"])(np.ones(3))
        jax.jit(lambda c: xmap(lambda x: x * c, ["i"], ["i"])(np.ones(3)))(2.0)
        """
    )
    done = run("explain", "--source", "modern", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    table = " ".join(done.stdout.partition("xmap_compat explain: 2 plans\n")[2].split())
    assert re.search("1 .* refused: .* source cannot be read.* 2 .* refused: .* a transformation around", table)


def test_a_program_without_xmap_and_without_jax(program, tmp_path):
    program("import sys; print('jax' in sys.modules)")
    done = subprocesses.run("-m", "xmap_compat", "explain", "program.py", cwd=tmp_path)
    assert done.stdout == "False\nxmap_compat explain: no call of an xmapped function\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["-m"], ["--source"], ["--brief", "--source", "d"], ["--brief=3", "program.py"], ["--other", "program.py"]]
    + [["--mesh"], ["--mesh", "x=4,y", "program.py"], ["--mesh=x=0", "program.py"], ["--mesh=x=2,x=2", "program.py"]],
    ids=str,
)
def test_the_usage(tmp_path, arguments):
    done = run("explain", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: python -m xmap_compat explain" in done.stderr


ABSTRACT = """
import jax, numpy as np
from jax import lax
from xmap_compat import xmap
total = xmap(lambda v: lax.psum(v, "i"), ["i", ...], {}, axis_resources={"i": ("x", "y")})
print(total.eval_shape(jax.ShapeDtypeStruct((8192, 3), "float32")).shape)
print(total(np.ones((4096, 2), "float32")))
"""


def test_a_script_is_explained_for_a_mesh_that_is_not_there(program, tmp_path):
    program(ABSTRACT)
    done = run("explain", "--mesh", "x=64,y=64", "program.py", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0], lines[1]) == (1, "(3,)", "xmap_compat explain: 2 plans")
    assert done.stdout.count("mesh x: 64, y: 64 (4096 devices)") == 2
    assert "is to run on the mesh (x: 64, y: 64), which is abstract: it has no devices." in done.stderr


def test_the_index_of_calls_has_their_assignments(program, tmp_path):
    program(ABSTRACT)
    done = run("explain", "--brief", "--mesh=x=64,y=64", "program.py", cwd=tmp_path)
    titles, first, _ = done.stdout.splitlines()[2:]
    assert titles.split() == ["FUNCTION", "ASSIGNMENT", "CALLED", "AT"]
    assert re.fullmatch(r"1  <lambda>  i: x\+y +\S*program.py:6 \(<module>\)", first)


# ----------------------------------------------------------------------------- the observer


def sum_over(x):
    return lax.psum(x, "i")


def traced(size):
    jax.eval_shape(xmap(sum_over, ["i"], []), jax.ShapeDtypeStruct((size,), np.float32))


def test_nobody_observes_before_and_after():
    assert api._observers == ()
    seen = []
    ends = [api.observe(lambda declared, made, args: seen.append(declared.name)) for _ in range(2)]
    traced(101)
    assert len(seen) == 2
    for end in ends:
        end()
        end()
    traced(102)
    assert len(seen) == 2
    assert api._observers == ()


def test_a_report_tells_of_calls_in_all_threads():
    out = io.StringIO()
    report = explain.Report(out)
    end = api.observe(report.call)
    try:
        threads = [threading.Thread(target=traced, args=(200 + k // 2,)) for k in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        end()
    report.finish()
    sizes = re.findall(r"f32\[(\d+)\] +f32", out.getvalue())
    assert sorted(sizes) == [str(200 + k) for k in range(6)]


def test_calls_that_differ_in_a_nested_call_are_two():
    out = io.StringIO()
    report = explain.Report(out)
    end = api.observe(report.call)
    try:
        for loops in (2, 3, 2):
            inner = xmap(lambda v: v * 2, ["k"], ["k"], axis_resources={"k": SerialLoop(loops)})
            jax.eval_shape(xmap(inner, ["i", ...], ["i", ...]), jax.ShapeDtypeStruct((5, 6), np.float32))
    finally:
        end()
    report.finish()
    assert re.findall(r"loop of (\d)", out.getvalue()) == ["2", "3"]


def test_what_goes_wrong_in_a_report_stays_there(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("xmap_compat.tools.plan.describe_made", lambda *_: 1 / 0)
    report = explain.Report(out)
    end = api.observe(report.call)
    try:
        traced(300)
    finally:
        end()
    report.finish()
    found = " ".join(out.getvalue().split())
    assert re.search(r"1 sum_over .*test_explain.py.* no plan: ZeroDivisionError: ", found)
    assert "1 call(s) without a plan" in found


def test_a_closed_output_disturbs_nobody():
    out = io.StringIO()
    out.close()
    report = explain.Report(out)
    end = api.observe(report.call)
    try:
        traced(301)
    finally:
        end()
    report.finish()
    assert out.closed
