"""The examples do what they say: as programs, and the parts that they train against NumPy."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
DIGITS = EXAMPLES / "digits.py"


def run_example(name, *options):
    """An example in a process of its own, which has to ask for its devices itself."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)


def run_digits(*options):
    return run_example("digits", *options)


def test_digits_learns_the_same_thing_under_three_assignments():
    done = run_digits("--steps", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(x) for x in re.findall(r"held-out digits: ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 3
    assert min(accuracies) > 95
    (difference,) = re.findall(r"largest difference .*: (\S+)", done.stdout)
    assert float(difference) <= 1e-3
    placements = re.findall(r"(\w+)\[[\d, ]+\]: (.*), parts of (.*)", done.stdout)
    assert placements == [
        ("w1", "one device", "[64, 64]"),
        ("images", "one device", "[144, 64]"),
        ("w1", "P()", "[64, 64]"),
        ("images", "P(('x', 'y'),)", "[18, 64]"),
        ("w1", "P(None, 'y')", "[64, 32]"),
        ("images", "P('x',)", "[36, 64]"),
    ]


def test_digits_fails_when_it_has_not_learnt():
    done = run_digits("--steps", "1")
    assert done.returncode == 1
    assert "FAILED" in done.stdout


@pytest.fixture
def digits(monkeypatch):
    """The example as a module; what it writes into the environment is undone."""
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(variable, os.environ[variable])
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numpy_loss_and_gradient(params, images, labels):
    """The positional network in float64, and its gradient by hand."""
    w1, b1, w2, b2 = (params[k].astype(np.float64) for k in ("w1", "b1", "w2", "b2"))
    before = images @ w1 + b1
    hidden = np.maximum(before, 0)
    exp = np.exp(hidden @ w2 + b2)
    probabilities = exp / exp.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels]).mean()
    d_logits = probabilities.copy()
    d_logits[rows, labels] -= 1
    d_logits /= len(labels)
    d_before = d_logits @ w2.T * (before > 0)
    gradient = {"w1": images.T @ d_before, "b1": d_before.sum(0), "w2": hidden.T @ d_logits, "b2": d_logits.sum(0)}
    return loss, gradient


@pytest.mark.parametrize("run", ["one device", "batch over 8 devices", "batch over 4, hidden over 2"])
def test_digits_train_step_equals_backpropagation_by_hand(digits, run, mesh42):
    images, labels, *_ = digits.load_data()
    images, labels = images[:16], labels[:16]
    params = digits.init_params(images.shape[1])
    at_rest = jax.tree.map(np.zeros_like, params)
    with mesh42:
        step = digits.make_train_step(digits.RUNS[run])
        trained, _, loss = jax.block_until_ready(step(params, at_rest, images, labels))
    expected_loss, gradient = numpy_loss_and_gradient(params, images, labels)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, before in params.items():
        expected = before - digits.LEARNING_RATE * gradient[name]
        np.testing.assert_allclose(trained[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def losses_of(run):
    return [float(x) for x in re.findall(r"loss ([\d.]+)", run)]


def test_two_processes_hold_the_parts_of_one_training():
    done = run_example("two_processes")
    assert done.returncode == 0, done.stdout + done.stderr
    differences = re.findall(r"process (\d): largest difference from NumPy (\S+)", done.stdout)
    assert sorted(index for index, _ in differences) == ["0", "1"]
    assert max(float(difference) for _, difference in differences) <= 1e-4
    placements = re.findall(r"w1: (P\(.*\)), parts of \((.*)\)", done.stdout)
    assert placements == [("P(None, 'device')", "6, 4"), ("P(None, 'process')", "6, 8"), ("P()", "6, 16")]
    runs = [losses_of(run) for run in done.stdout.split("axis_resources=")[1:]]
    assert runs[0] == pytest.approx(runs[1], abs=2e-4) and runs[0] == pytest.approx(runs[2], abs=2e-4)
    assert runs[0][-1] < runs[0][0] / 2
