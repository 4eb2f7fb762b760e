"""The programs of docs/sources and what ``plan.source()`` writes for them, kept so that changes are seen in review.

Values, first and second derivatives of what is written are those of the program without resources, at a seeded point
that is not symmetric.
"""

import importlib.util
import itertools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_source import needs_ruff, run

from xmap_compat import xmap

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "sources"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.endswith("_modern"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"before_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(name):
    f, args, mesh = load(name).example()
    with mesh:
        return f.plan(*args).source()


def test_there_are_seven():
    assert len(NAMES) == 7
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in NAMES)


@needs_ruff
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_is_kept(name):
    path, text = FOLDER / f"{name}_modern.py", source(name)
    if os.environ.get("XMAP_COMPAT_REGENERATE"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def declaration(f):
    return f.plan.args[0] if hasattr(f.plan, "args") else f.plan.declared


def on_one_device(f):
    """The same xmapped function without resources."""
    declared = declaration(f)
    return xmap(declared.fun, declared.in_source, declared.out_source)


def smooth_loss(f, args):
    """A functional of the results that are floats, and the arguments that are."""
    leaves, tree = jax.tree.flatten(args)
    places = [k for k, x in enumerate(leaves) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]

    def loss(floats):
        given = dict(zip(places, floats))
        outs = jax.tree.leaves(f(*jax.tree.unflatten(tree, [given.get(k, x) for k, x in enumerate(leaves)])))
        kept = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.cos(jnp.arange(x.size)).reshape(x.shape) * x) for x in kept)

    return loss, [jnp.asarray(leaves[k]) for k in places]


def first(loss, floats):
    return jax.grad(loss)(floats)


def second(loss, floats):
    """The derivative of the gradient along a direction."""
    return jax.jvp(jax.grad(loss), (floats,), ([jnp.sin(x) for x in floats],))[1]


def check_values_and_derivatives(modern, f, args, orders):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    got, want = jax.block_until_ready(modern(*args)), on_one_device(f)(*args)
    jax.tree.map(close, jax.tree.leaves(got), jax.tree.leaves(want))
    found = []
    for g in (modern, on_one_device(f)):
        loss, floats = smooth_loss(g, args)
        derivatives = lambda floats, loss=loss: [order(loss, floats) for order in orders]
        found.append(jax.block_until_ready(jax.jit(derivatives)(floats)))
    jax.tree.map(close, *found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name):
    f, args, _ = load(name).example()
    modern = run((FOLDER / f"{name}_modern.py").read_text(encoding="utf-8"))
    check_values_and_derivatives(modern, f, args, [first])


def test_second_derivatives_of_a_pair_of_rules():
    f, args, _ = load("megatron").example()
    modern = run((FOLDER / "megatron_modern.py").read_text(encoding="utf-8"))
    check_values_and_derivatives(modern, f, args, [second])


def assignments(f, mesh):
    """At most two axes on each axis of the mesh, and on all of them."""
    names = declaration(f).names
    places = [(), *((m,) for m in mesh.axis_names), *([mesh.axis_names] if len(mesh.axis_names) > 1 else [])]
    for chosen in itertools.product(places, repeat=len(names)):
        if sum(map(bool, chosen)) <= 2:
            yield {name: place for name, place in zip(names, chosen) if place}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_values_and_derivatives_under_every_assignment(name):
    f, args, mesh = load(name).example()
    declared = declaration(f)
    written = []
    for resources in assignments(f, mesh):
        placed = xmap(declared.fun, declared.in_source, declared.out_source, axis_resources=resources)
        try:
            with mesh:
                text = placed.plan(*args).source(run=False)
        except (
            ValueError,
            jax.errors.JAXTypeError,
        ):
            continue  # two axes that need one axis of the mesh, or sizes that it does not divide
        check_values_and_derivatives(run(text), f, args, [first, second])
        written.append(resources)
    print(f"\n{name}: {written}")
    assert len(written) >= 2
