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
from notebook_outputs import differences

import xmap_compat

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(*arguments):
    """Python in a process of its own, which compiles as quickly as this one, and has to ask for its devices itself."""
    quickly = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    env = {k: v for k, v in {**os.environ, "XLA_FLAGS": quickly}.items() if k != "JAX_PLATFORMS"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=240
    )


def run_example(name, *options):
    return run("-W", "error", str(EXAMPLES / f"{name}.py"), *options)


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


def test_the_tutorial_shows_what_its_notebook_stores():
    """Its cells hold their numbers against NumPy and the positional program."""
    assert not any(differences(str(EXAMPLES / "named_axes.ipynb"), rtol=1e-3))


@pytest.fixture
def load_example(monkeypatch):
    """Loads an example as a module; what it writes into the environment is undone."""
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(variable, os.environ[variable])

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def losses_of(run):
    return [float(x) for x in re.findall(r"loss ([\d.]+)", run)]


@pytest.mark.slow
def test_megatron_block_has_the_losses_of_plain_jax():
    done = run_example("megatron", "--steps", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    plain, *runs = [
        losses_of(run)
        for run in re.split("^(?! )", done.stdout, flags=re.MULTILINE)
        if "step" in run
    ]
    assert len(plain) > 3 and plain[-1] < 0.1
    assert len(runs) == 3
    for losses in runs:
        assert losses == pytest.approx(plain, abs=1e-3)


def test_megatron_gradients_are_those_of_whole_arrays(load_example):
    """Of every parameter, heads and shards over one mesh axis: the rules of the pair count no sum twice."""
    megatron = load_example("megatron")
    params = megatron.init_params()
    sequences = np.arange(24, dtype=np.int32).reshape(4, 6) % 10
    with xmap_compat.mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model")):
        resources = {"batch": "data", "heads": "model", "shards": "model"}
        axes = (megatron.PARAMS, megatron.SEQUENCES)
        loss = xmap_compat.xmap(megatron.named_loss, axes, {}, axis_resources=resources)
        value, grads = jax.value_and_grad(loss)(params, sequences)
    expected_value, expected = jax.value_and_grad(megatron.positional_loss)(params, sequences)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(grads[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_halo_exchange_gives_what_numpy_gives():
    done = run_example("halo", "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    (difference,) = re.findall(r"largest difference from NumPy: (\S+)", done.stdout)
    assert float(difference) <= 1e-5
    assert re.findall(r"on each device (\d) x (\d) blocks", done.stdout) == [
        ("8", "4"),
        ("2", "4"),
        ("2", "2"),
        ("1", "4"),
    ]


@pytest.mark.parametrize("resources", [{"row": "x", "column": "y"}, {"row": ("x", "y")}], ids=str)
def test_a_wave_decays_on_the_plate_as_the_stencil_says(resources, load_example, mesh42):
    """A sine between the cold borders times a cosine around the tube only shrinks, by a factor that is known."""
    halo = load_example("halo")
    height, width = halo.HEIGHT, halo.WIDTH
    rows = np.sin(np.pi * np.arange(1, height + 1) / (height + 1))
    wave = np.outer(rows, np.cos(2 * np.pi * np.arange(width) / width)).astype(np.float32)
    factor = 1 - 4 * halo.RATE * (
        np.sin(np.pi / (2 * (height + 1))) ** 2 + np.sin(np.pi / width) ** 2
    )
    step = xmap_compat.xmap(halo.named_step, halo.BLOCKS, halo.BLOCKS, axis_resources=resources)
    with mesh42:
        np.testing.assert_allclose(halo.join(step(halo.cut(wave))), factor * wave, atol=1e-6)


def attention_by_numpy(params, x, target):
    """Sequence after sequence and head after head, in float64."""
    error = 0.0
    for sequence, wanted in zip(np.float64(x), np.float64(target)):
        out = np.zeros_like(wanted)
        for head in range(params["query"].shape[1]):
            query, key, value = (
                sequence @ params[name][:, head] for name in ("query", "key", "value")
            )
            for now in range(len(sequence)):
                scores = np.exp(key[: now + 1] @ query[now] / np.sqrt(len(query[now])))
                out[now] += scores / scores.sum() @ value[: now + 1] @ params["out"][head]
        error += np.mean((out - wanted) ** 2)
    return error / len(x)


@pytest.mark.slow
def test_porting_goes_in_steps_that_agree(load_example):
    done = run_example("porting")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\S.*?) +loss ([\d.]+)  difference (\S+)", done.stdout, re.MULTILINE)
    titles, losses, differences = zip(*found)
    porting = load_example("porting")
    steps = [title.partition(":")[0] for title in titles if title.startswith("step")]
    assert steps == ["step 1", "step 2", "step 3", "step 4"]
    assert [*porting.ASSIGNMENTS] == [title for title in titles if title in porting.ASSIGNMENTS]
    assert len(titles) == 10
    expected = attention_by_numpy(porting.init_params(), *porting.load_data())
    assert [float(loss) for loss in losses] == pytest.approx([expected] * len(losses), abs=1e-5)
    assert max(map(float, differences)) <= 1e-5
