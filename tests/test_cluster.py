"""The example of a cluster, started by the commands that the guide shows; the training against NumPy."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
GUIDE = ROOT / "docs" / "many_machines.md"

LIMIT = 150  # seconds for one job on a busy machine; it needs about 5
PROXY = "http://proxy.invalid:1"

# What Slurm would do with the two commands: here one process, with the variables that it sets.
SBATCH = 'exec bash "$@"'
SRUN = f'shift 2; exec python {CLUSTER / "launch_local.py"} "$TASKS" "$@"'


def load(name):
    spec = importlib.util.spec_from_file_location(name, CLUSTER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job(tmp_path):
    """Runs a script of commands in a folder that has the examples, and stands for Slurm's commands."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, body in {
        "sbatch": SBATCH,
        "srun": SRUN,
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JAX_", "XLA_", "SLURM_", "XMAP_COMPAT_"))
    }
    paths = {
        "PATH": f"{programs}:{kept['PATH']}",
        "PYTHONPATH": f"{ROOT}:{kept.get('PYTHONPATH', '')}",
    }

    def run(script, **variables):
        env = {**kept, **paths, "PYTHONWARNINGS": "error", **variables}
        with (tmp_path / "log").open("w") as log:
            bash = subprocess.Popen(
                ["bash", "-e", "-c", script],
                cwd=tmp_path,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            code = bash.wait(LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(bash.pid, signal.SIGKILL)
        shown = (tmp_path / "log").read_text()
        assert code == 0, shown[-4000:]
        return shown

    return run


def commands():
    """Those of the guide: the one that starts, and the one on a cluster, within a sentence."""
    text = GUIDE.read_text()
    (start,) = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (on_slurm,) = re.findall(r"`(sbatch [^`]+)`", text)
    return start, on_slurm


def train_in_numpy(steps):
    """The losses and the parameters of the same training on whole arrays in float64, with backpropagation by hand."""
    train = load("train")
    params = jax.tree.map(np.float64, train.init_state()["params"])
    momentum = jax.tree.map(np.zeros_like, params)
    losses = []
    for step in range(steps):
        rows, targets = map(np.float64, train.read(step))
        hidden = np.tanh(rows @ params["w1"] + params["b1"])
        error = hidden @ params["w2"] - targets
        losses.append(np.mean(error**2))
        d_predicted = 2 * error / len(rows)
        d_before = np.outer(d_predicted, params["w2"]) * (1 - hidden**2)
        grads = {"w1": rows.T @ d_before, "b1": d_before.sum(0), "w2": hidden.T @ d_predicted}
        momentum = {k: train.MOMENTUM * momentum[k] + grads[k] for k in params}
        params = {k: params[k] - train.LEARNING_RATE * momentum[k] for k in params}
    return losses, params


def assert_trained(shown, first, steps):
    """A job has shown the losses of these steps."""
    found = [
        (int(step), float(loss))
        for step, loss in re.findall(r"^step +(\d+)  loss (\S+)$", shown, re.MULTILINE)
    ]
    expected, _ = train_in_numpy(steps)
    assert [step for step, _ in found] == list(range(first, steps))
    np.testing.assert_allclose([loss for _, loss in found], expected[first:], atol=2e-5)


def test_the_commands_of_the_guide(job, tmp_path):
    """Two processes train and write a checkpoint; a job of one goes on, under another assignment."""
    start, on_slurm = commands()
    settings, _ = start.split("\n", 1)
    shown = job(start)
    assert_trained(shown, 0, 20)
    assert "process 0: w1 P(), here (6, 16) of (6, 16)" in shown and "process 1: w1 P()" in shown
    shown = job(f"{settings}\n{on_slurm.strip()} --result trained.npz", TASKS="1", http_proxy=PROXY)
    assert_trained(shown, 20, 40)
    assert re.findall(r"process (\d): w1 (P.*?), here", shown) == [("0", "P(None, 'device')")]
    assert_saved(tmp_path, 40)


def assert_saved(folder, steps):
    _, expected = train_in_numpy(steps)
    saved = np.load(folder / "trained.npz")
    assert {*saved} == {*expected}
    for name, values in expected.items():
        np.testing.assert_allclose(saved[name], values, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_state_goes_through_four_jobs(job, tmp_path):
    """Of 1, 4, 2 and 2 processes, under all assignments."""
    settings, _ = commands()[0].split("\n", 1)
    jobs = [(1, "data"), (4, "tensor"), (2, "data and tensor"), (2, "tensor")]
    for k, (count, assignment) in enumerate(jobs):
        options = f'--checkpoints saved --steps {3 * k + 3} --assignment "{assignment}" --result trained.npz'
        shown = job(
            f"{settings}\npython examples/cluster/launch_local.py {count} examples/cluster/train.py {options}"
        )
        assert_trained(shown, 3 * k, 3 * k + 3)
        assert_saved(tmp_path, 3 * k + 3)


def test_the_guide_runs_what_the_example_has():
    start, on_slurm = commands()
    assert "launch_local.py 2 examples/cluster/train.py" in start
    assert on_slurm.startswith("sbatch examples/cluster/slurm.sbatch ")
    script = (CLUSTER / "slurm.sbatch").read_text()
    assert "srun --kill-on-bad-exit=1 python -u examples/cluster/train.py " in script
    assert "unset http_proxy https_proxy" in script


def test_when_one_fails_the_launcher_ends_the_others(monkeypatch):
    launcher = load("launch_local")
    monkeypatch.setattr(launcher, "SECONDS_TO_END", 0.3)
    program = "import os, sys, time; sys.exit(3) if os.environ['SLURM_PROCID'] == '1' else time.sleep(100)"
    began = time.monotonic()
    assert launcher.launch(2, ["-c", program]) != 0
    assert time.monotonic() - began < 50


def test_the_launcher_sets_what_slurm_sets(tmp_path):
    launcher = load("launch_local")
    program = """
        import os, sys
        own = {k: v for k, v in os.environ.items() if k.startswith("SLURM_")}
        open(f"{sys.argv[1]}/{own['SLURM_PROCID']}", "w").write(str(sorted(own)))
    """
    assert launcher.launch(2, ["-c", textwrap.dedent(program), str(tmp_path)]) == 0
    (names,) = {(tmp_path / str(k)).read_text() for k in range(2)}
    for name in (
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "SLURM_LOCALID",
    ):
        assert name in names
