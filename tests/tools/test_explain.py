"""``python -m xmap_compat explain``: the plan of each distinct call, once, beside what a program does anyway.

Programs run in processes of their own.  Their output, traceback and exit code are compared with those of
``python -m xmap_compat`` without ``explain``, and plans with those of the same calls.
"""

import io
import re
import textwrap
import threading

import jax
import numpy as np
import pytest
import subprocesses
from forks import run
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
ENDINGS = {"pass": 0, "sys.exit(3)": 3, "xmap(total, ['j'], [])(np.ones(3))": 1}


def write(folder, ending="pass"):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("ENDING", ending))
    return path.read_text().splitlines()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [["program.py"], ["-m", "program"]], ids=str)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_program_runs_as_without_explain(tmp_path, way, ending):
    write(tmp_path, ending)
    plain = run(*way, "a", "--brief", cwd=tmp_path)
    explained = run("explain", *way, "a", "--brief", cwd=tmp_path)
    assert explained.returncode == plain.returncode == ENDINGS[ending]
    assert explained.stderr == plain.stderr
    own, _, report = explained.stdout.partition("xmap_compat explain: ")
    assert report and own == plain.stdout
    assert "'a', '--brief'] __main__" in plain.stdout


def test_each_distinct_call_is_explained_once(tmp_path):
    lines = write(tmp_path)
    done = run("explain", "program.py", cwd=tmp_path)
    titles = re.findall(r"(?m)^---- (\d), called at \S*program.py:(\d+) ", done.stdout)
    called = [lines[int(line) - 1].strip() for _, line in titles]
    first, second, third, fourth, fifth = called
    assert (first, second) == ("f(np.ones((8, 3)))", "f(np.ones((8, 5)))")
    assert third == "f(np.ones((8, 3), np.int32))"
    assert fourth.startswith("xmap(product, ") and fifth.startswith("xmap(lambda x: x * 2")
    types = re.findall(r"(?m)^x +(\w+\[[\d,]+\]) ", done.stdout)
    assert types == ["f32[8,3]", "f32[8,5]", "i32[8,3]", "f32[2,3]", "f32[3]"]
    assert done.stdout.count("  all-reduce over x") == 3
    assert "xmap_compat explain: distinct calls of xmapped functions: 5\n" in done.stdout


def test_a_program_without_xmap_and_without_jax(tmp_path):
    (tmp_path / "program.py").write_text("import sys; print('jax' in sys.modules)")
    done = subprocesses.run("-m", "xmap_compat", "explain", "program.py", cwd=tmp_path)
    assert done.stdout == "False\nxmap_compat explain: distinct calls of xmapped functions: 0\n"


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--other", "program.py"]], ids=str)
def test_the_usage(tmp_path, arguments):
    done = run("explain", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: python -m xmap_compat explain" in done.stderr


# ----------------------------------------------------------------------------- the observer


def sum_over(x):
    return lax.psum(x, "i")


def traced(size):
    jax.eval_shape(xmap(sum_over, ["i"], []), jax.ShapeDtypeStruct((size,), np.float32))


@pytest.fixture
def report():
    """A report that watches while the test runs."""
    report = explain.Report(io.StringIO())
    end = watch.watch_everywhere(watch.Watcher(traced=report.call))
    yield report
    end()


def printed(report):
    report.finish()
    return report._out.getvalue()


def test_calls_in_all_threads_are_reported(report):
    threads = [threading.Thread(target=traced, args=(200 + k // 2,)) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = re.findall(r"f32\[(\d+)\] +f32", printed(report))
    assert sorted(sizes) == [str(200 + k) for k in range(6)]


def test_calls_that_differ_in_a_nested_call_are_two(report):
    for loops in (2, 3, 2):
        inner = xmap(lambda v: v * 2, ["k"], ["k"], axis_resources={"k": SerialLoop(loops)})
        outer = xmap(inner, ["i", ...], ["i", ...])
        jax.eval_shape(outer, jax.ShapeDtypeStruct((5, 6), np.float32))
    assert "functions: 2\n" in printed(report)


def test_what_goes_wrong_in_a_report_stays_there(report, monkeypatch):
    monkeypatch.setattr("xmap_compat.tools.plan.plan_of_call", lambda *_: 1 / 0)
    traced(300)
    assert re.search(
        r"called at \S*test_explain.py\S* .*\nno plan of sum_over: ZeroDivisionError: ",
        printed(report),
    )


def test_a_closed_output_disturbs_nobody(report):
    traced(301)
    report._out.close()
    report.finish()


def test_nobody_watches_before_and_after():
    assert not watch._everywhere
    seen = []
    watcher = watch.Watcher(traced=lambda declared, placed, args: seen.append(declared.name))
    ends = [watch.watch_everywhere(watcher) for _ in range(2)]
    traced(101)
    for end in ends:
        end()
        end()
    traced(102)
    assert len(seen) == 2
    assert not watch._everywhere
