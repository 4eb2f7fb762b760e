"""`leave --write` of one program, and the programs and tests that import the modules that it edits.

Their oracle is NumPy: each program compares its numbers with it, before and after each edit.
"""

import functools
import itertools
import pathlib
import shutil
import textwrap

import forks
import pytest
import subprocesses
import without_package

OURS = {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
QUICKLY = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}

LAYERS = """
    import jax.numpy as jnp
    from jax import lax


    def norm(row):
        return row - lax.pmean(row, 'shard')


    def probabilities(row):
        shifted = row - lax.pmax(lax.stop_gradient(row), axis_name='shard')
        return jnp.exp(shifted) / lax.psum(jnp.exp(shifted), 'shard')
"""
DATA = """
    import numpy as np

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    centred = x - x.mean(0)
    softmax = np.exp(x) / np.exp(x).sum(0)
"""
TRAIN = """
    import jax
    import numpy as np
    from jax.experimental.maps import Mesh, xmap

    from data import centred, softmax, x
    from layers import norm, probabilities


    def update(row):
        return jax.grad(lambda row: (norm(row) * row).sum())(row)


    def main():
        train = xmap(update, ['shard', ...], ['shard', ...], axis_resources={'shard': 'mp'})
        both = xmap(lambda r: (norm(r), probabilities(r)), ['shard', ...], (['shard', ...],) * 2,
                    axis_resources={'shard': 'mp'})
        with Mesh(np.array(jax.devices()[:4]), ('mp',)):
            np.testing.assert_allclose(train(x), 2 * centred, rtol=1e-4, atol=1e-5)
            for found, wanted in zip(both(x), (centred, softmax)):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


    if __name__ == '__main__':
        main()
        print('trained')
"""
SAMPLE = """
    import sys

    import jax
    import numpy as np
    from jax.experimental.maps import Mesh, xmap

    from data import softmax, x
    from layers import norm, probabilities

    sample = xmap(probabilities, ['shard', ...], ['shard', ...], axis_resources={'shard': ('a', 'b')})
    with Mesh(np.array(jax.devices()).reshape(2, 4), ('a', 'b')):
        np.testing.assert_allclose(sample(x), softmax, rtol=1e-5)
    if '--norms' in sys.argv:  # which no run of the tests does
        norms = xmap(norm, in_axes=['shard', ...], out_axes=['shard', ...])
        np.testing.assert_allclose(norms(x), x - x.mean(0), rtol=1e-5)
    print('sampled')
"""
PMAPPED = """
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental import maps

    from data import centred, x
    from layers import norm
    from train import update

    np.testing.assert_allclose(jax.pmap(norm, axis_name='shard')(x), centred, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.pmap(update, axis_name='shard')(x), 2 * centred, rtol=1e-4, atol=1e-5)
    total = maps.xmap(lambda row: lax.psum(norm(row) ** 2, 'shard'), ['shard', ...], {})
    np.testing.assert_allclose(total(x), (centred ** 2).sum(0), rtol=1e-5)
    print('mapped')
"""
TESTS = """
    import jax
    import numpy as np
    from data import centred, softmax, x
    from layers import norm, probabilities


    def test_norm():
        np.testing.assert_allclose(jax.vmap(norm, axis_name='shard')(x), centred, rtol=1e-5, atol=1e-6)


    def test_probabilities():
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ('shard',))
        spec = jax.sharding.PartitionSpec('shard')
        fun = jax.shard_map(probabilities, mesh=mesh, in_specs=spec, out_specs=spec)
        np.testing.assert_allclose(fun(x), softmax, rtol=1e-5)


    test_norm()
    test_probabilities()
    print('tested')
"""
SCRIPTS = ("train.py", "sample.py", "pmapped.py")
WORDS = {
    "train.py": "trained",
    "sample.py": "sampled",
    "pmapped.py": "mapped",
    "test_layers.py": "tested",
}


def write(folder, **files):
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))


run = functools.partial(
    subprocesses.run, warn="ignore", seconds=400, JAX_PLATFORMS="cpu", **QUICKLY
)
WITHOUT = without_package.__file__


def with_package(script, *options, cwd):
    return forks.run(script, *options, cwd=cwd, warn="ignore", **QUICKLY)


def run_without(script, *options, cwd):
    """Runs a script where this package cannot be imported."""
    return forks.run(WITHOUT, script, *options, cwd=cwd, plain=True, warn="ignore", **QUICKLY)


def leave(script, *options, cwd):
    done = with_package("leave", "--write", *options, script, cwd=cwd)
    assert "written: " in done.stdout, done.stdout + done.stderr
    return done.stdout


def check(done, word):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(word)


# Of the one that is quick, the last script has no mesh, and imports one that has left; the second imports none.
ORDERS = [
    pytest.param(order, id="-".join(order), marks=[] if order == SCRIPTS else [pytest.mark.slow])
    for order in itertools.permutations(SCRIPTS)
]


@pytest.mark.parametrize("order", ORDERS)
def test_scripts_around_one_module_leave_one_after_the_other(order, tmp_path):
    write(tmp_path, data=DATA, layers=LAYERS, train=TRAIN, sample=SAMPLE, pmapped=PMAPPED)
    write(tmp_path, test_layers=TESTS)
    for k, script in enumerate(order):
        said = leave(script, cwd=tmp_path)
        assert "verified on" in said, said
        for other in order[k + 1 :]:
            check(with_package(other, cwd=tmp_path), WORDS[other])
        check(run_without("test_layers.py", cwd=tmp_path), "tested")
    for script in SCRIPTS:
        check(run_without(script, cwd=tmp_path), WORDS[script])
    check(run_without("sample.py", "--norms", cwd=tmp_path), "sampled")
    assert "xmap" not in "".join((tmp_path / script).read_text() for script in SCRIPTS)
    assert len([*tmp_path.glob("named_axes*.py")]) == 1


UNMADE = """
    import sys

    import jax
    import numpy as np
    from jax.experimental.maps import Mesh, xmap

    from data import centred, x
    from layers import norm

    if '--all' in sys.argv:
        with Mesh(np.array(jax.devices()[:2]), ('dp',)):
            sample = xmap(norm, ['shard', ...], ['shard', ...], axis_resources={'shard': 'dp'})
            np.testing.assert_allclose(sample(x), centred, rtol=1e-5, atol=1e-6)
    print('sampled')
"""
PARALLEL = """
    import jax
    import numpy as np
    from data import centred, x
    from layers import norm

    np.testing.assert_allclose(jax.pmap(norm, axis_name='shard')(x), centred, rtol=1e-5, atol=1e-6)
    print('mapped')
"""
# Exit codes, and words of each.
TRAINED_LAST = {
    "sample.py": (1, "not verified: this run does not call it"),
    "parallel.py": (0, "0 of 0 xmap calls patched"),
    "test_layers.py": (0, "0 of 0 xmap calls patched"),
    "train.py": (0, "2 of 2 xmap calls patched"),
}


@pytest.mark.slow
def test_programs_that_make_no_xmap_leave_before_the_one_that_does(tmp_path):
    write(tmp_path, data=DATA, layers=LAYERS, train=TRAIN, sample=UNMADE, parallel=PARALLEL)
    write(tmp_path, test_layers=TESTS)
    for script, (code, words) in TRAINED_LAST.items():
        done = run("-m", "xmap_compat", "leave", "--write", script, cwd=tmp_path, **OURS)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == code and words in said, said
    check(run_without("sample.py", "--all", cwd=tmp_path), "sampled")
    check(run_without("parallel.py", cwd=tmp_path), "mapped")
    check(run_without("test_layers.py", cwd=tmp_path), "tested")
    check(run_without("train.py", cwd=tmp_path), "trained")


PACKAGE = {
    "__init__": "",
    "parts/__init__": "",
    "parts/layers": LAYERS,
    "step": """
        import jax

        from nets.parts.layers import norm, probabilities


        def update(row):
            return jax.grad(lambda row: (norm(row) * row).sum())(row), probabilities(row)
    """,
    "trainer": """
        import jax
        import numpy as np
        from jax import lax
        from jax.experimental.maps import Mesh, xmap

        from .step import update


        def train(x, devices):
            fun = xmap(update, in_axes=['shard', ...], out_axes=(['shard', ...],) * 2, axis_resources={'shard': 'mp'})
            total = xmap(lambda row: lax.psum(row ** 2, 'shard'), ['shard', ...], {}, axis_resources={'shard': 'mp'})
            with Mesh(np.array(devices), ('mp',)):
                return *fun(x), total(x)
    """,
}
SCRIPT = """
    import os
    import sys

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))

    import jax
    import numpy as np
    from jax import lax
    from jax.experimental.maps import Mesh, xmap
    from nets.trainer import train

    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    gradient, softmax, total = train(x, jax.devices()[:4])
    np.testing.assert_allclose(gradient, 2 * (x - x.mean(0)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(softmax, np.exp(x) / np.exp(x).sum(0), rtol=1e-5)
    np.testing.assert_allclose(total, (x ** 2).sum(0), rtol=1e-5)
    sums = xmap(lambda v: lax.psum(v, 'batch'), ['batch', ...], [...], axis_resources={'batch': 'dp'})
    with Mesh(np.array(jax.devices()[:2]), ('dp',)):
        np.testing.assert_allclose(sums(x), x.sum(0), rtol=1e-5, atol=1e-6)
    print('trained')
"""


@pytest.mark.parametrize("place", ["scripts", "."])
def test_the_helper_of_a_package_stands_in_it(place, tmp_path):
    project = tmp_path / "project"
    write(project / "nets", **PACKAGE)
    write(project / place, run=SCRIPT if place == "scripts" else SCRIPT.replace("'..'", "'.'"))
    script = pathlib.Path(place, "run.py")
    assert "3 of 3 xmap calls" in leave(script, cwd=project)
    assert (project / "nets" / "named_axes.py").exists()
    assert [*tmp_path.rglob("named_axes*.py")] == [project / "nets" / "named_axes.py"]
    layers = (project / "nets" / "parts" / "layers.py").read_text()
    assert "from ..named_axes import pmax, pmean, psum\n" in layers
    assert "from .named_axes import " in (project / "nets" / "trainer.py").read_text()
    check(run_without(script, cwd=project), "trained")
    # Elsewhere there are JAX, the package as it would be installed, and the script.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project / "nets", elsewhere / "nets")
    shutil.copy(project / script, elsewhere / "run.py")
    shutil.rmtree(project)
    check(run(WITHOUT, "run.py", cwd=elsewhere), "trained")


MESH_ONLY = """
    import jax
    import numpy as np
    from jax.experimental import maps

    import train
    from data import softmax, x
    from layers import probabilities

    with maps.Mesh(np.array(jax.devices()[:4]), ('mp',)):
        np.testing.assert_allclose(jax.vmap(probabilities, axis_name='shard')(x), softmax, rtol=1e-5)
    train.main()
    print('shown')
"""


def test_a_script_whose_xmaps_have_left_leaves_too(tmp_path):
    write(tmp_path, data=DATA, layers=LAYERS, train=TRAIN, show=MESH_ONLY)
    leave("train.py", cwd=tmp_path)
    assert "0 of 0 xmap calls" in leave("show.py", cwd=tmp_path)
    check(run_without("show.py", cwd=tmp_path), "shown")
