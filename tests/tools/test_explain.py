"""``python -m xmap_compat explain``: the plan of each distinct call, once, beside what a program does anyway.

Programs run in processes of their own.  Their output, traceback and exit code are compared with those of
``python -m xmap_compat`` without ``explain``, and plans with those of the same calls.
"""

import io
import re
import textwrap
import threading

import forks
import jax
import numpy as np
import pytest
import subprocesses
from jax import lax

from xmap_compat import SerialLoop, xmap
from xmap_compat.core import watch
from xmap_compat.tools import explain

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
ENDINGS = {
    "success": "pass",
    "exit code": "sys.exit(3)",
    "error": "xmap(total, ['j'], [])(np.ones(3))",
}


run = forks.run


@pytest.fixture
def program(tmp_path):
    def write(source=PROGRAM, ending="pass", name="program.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).replace("ENDING", ending))
        return path

    return write


TITLE = r"^---- plan (\d+), called at \S*?(\w+\.py):(\d+) \(([\w<>]+)\) -*$"


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
    plain, explained = (
        run(*way, "a", "--brief", cwd=tmp_path),
        run("explain", *way, "a", "--brief", cwd=tmp_path),
    )
    assert (
        explained.returncode
        == plain.returncode
        == {"success": 0, "exit code": 3, "error": 1}[ending]
    )
    assert explained.stderr == plain.stderr
    assert own_output(explained.stdout) == plain.stdout
    assert "'a', '--brief'] __main__" in plain.stdout


def test_each_distinct_call_is_explained_once(program, tmp_path):
    path = program()
    done = run("explain", "program.py", cwd=tmp_path)
    lines = path.read_text().splitlines()
    titles = [
        (int(k), file, lines[int(line) - 1].strip())
        for k, file, line, _ in re.findall(TITLE, done.stdout, re.M)
    ]
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
    assert done.stdout.count("  all-reduce over x") == 3
    table = done.stdout.partition("xmap_compat explain: 5 plans\n")[2].splitlines()[:6]
    assert [line.split()[:2] for line in table[1:]] == [
        [str(k), name] for k, name in enumerate(["total"] * 3 + ["product", "<lambda>"], 1)
    ]


def test_a_program_without_xmap_and_without_jax(program, tmp_path):
    program("import sys; print('jax' in sys.modules)")
    done = subprocesses.run("-m", "xmap_compat", "explain", "program.py", cwd=tmp_path)
    assert done.stdout == "False\nxmap_compat explain: no call of an xmapped function\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-m"],
        ["--brief"],
        ["--brief=3", "program.py"],
        ["--source", "program.py"],
        ["--other", "program.py"],
    ]
    + [
        ["--mesh"],
        ["--mesh", "x=4,y", "program.py"],
        ["--mesh=x=0", "program.py"],
        ["--mesh=x=2,x=2", "program.py"],
    ],
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
    assert (
        "is to run on the mesh (x: 64, y: 64), which is abstract: it has no devices." in done.stderr
    )


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
    assert not watch._everywhere
    seen = []
    watcher = watch.Watcher(traced=lambda declared, made, args: seen.append(declared.name))
    ends = [watch.watch_everywhere(watcher) for _ in range(2)]
    traced(101)
    assert len(seen) == 2
    for end in ends:
        end()
        end()
    traced(102)
    assert len(seen) == 2
    assert not watch._everywhere


def test_a_report_tells_of_calls_in_all_threads():
    out = io.StringIO()
    report = explain.Report(out)
    end = watch.watch_everywhere(watch.Watcher(traced=report.call))
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
    end = watch.watch_everywhere(watch.Watcher(traced=report.call))
    try:
        for loops in (2, 3, 2):
            inner = xmap(lambda v: v * 2, ["k"], ["k"], axis_resources={"k": SerialLoop(loops)})
            jax.eval_shape(
                xmap(inner, ["i", ...], ["i", ...]), jax.ShapeDtypeStruct((5, 6), np.float32)
            )
    finally:
        end()
    report.finish()
    assert re.findall(r"loop of (\d)", out.getvalue()) == ["2", "3"]


def test_what_goes_wrong_in_a_report_stays_there(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("xmap_compat.tools.plan.plan_of_call", lambda *_: 1 / 0)
    report = explain.Report(out)
    end = watch.watch_everywhere(watch.Watcher(traced=report.call))
    try:
        traced(300)
    finally:
        end()
    report.finish()
    found = " ".join(out.getvalue().split())
    assert re.search(r"1 sum_over .*test_explain.py.* no plan: ZeroDivisionError: ", found)


def test_a_closed_output_disturbs_nobody():
    out = io.StringIO()
    out.close()
    report = explain.Report(out)
    end = watch.watch_everywhere(watch.Watcher(traced=report.call))
    try:
        traced(301)
    finally:
        end()
    report.finish()
    assert out.closed
