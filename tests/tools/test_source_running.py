"""A generated program runs beside the original before you get it, and edits of its text are found.

The oracle of an edit is what it changes: each one computes other numbers or gradients, which NumPy would show.
"""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from test_source import grid, normal, run, shaped

from xmap_compat import Mesh, xmap
from xmap_compat.tools.source import beside, program, running


def mixed(scale, x, at, key):
    """Numbers, indices and keys; helpers and a wrapper."""
    ring = lax.ppermute(x, "i", [(k, (k + 1) % 4) for k in range(4)])
    noise = jax.random.uniform(key, x.shape)
    return lax.pmax(x * scale, "i") + x[at] - scale, ring + noise * lax.psum(x, "i")


AXES = ([...], ["i", ...], ["i"], {}), (["i", ...], ["i", ...])


def planned(body=mixed, axes=AXES, args=None, mesh=None):
    args = args or (shaped(2), shaped(4, 2), shaped(4, dtype=np.int32), jax.random.key(0))
    with mesh or Mesh(grid(2), ("x",)):
        return xmap(body, *axes, axis_resources={"i": "x"}).plan(*args)


def of_text(plan, edit):
    """What is found when the text of a module is edited: whether the original runs, and the difference."""
    written = program.written(plan)
    text = edit(written.text)
    sample = running.sample_of(plan, written)
    expected = beside.of(jaxpr_as_fun(plan.staged.jaxpr), sample)
    return running.compared(plan, written._replace(text=text), expected, sample)


@pytest.fixture(scope="module")
def plan():
    with jax.numpy_rank_promotion("warn"):
        return planned()


EDITS = {
    "the wrapper swaps arguments": ("return mapped(scale, x, at, key)", "return mapped(x[0], x + scale, at, key)"),
    "the wrapper maps another dimension": ("in_axes=(None, 0, 0, None)", "in_axes=(None, 1, 0, None)"),
    "an argument is not mapped": ("in_axes=(None, 0, 0, None)", "in_axes=(None, 0, None, None)"),
    "a spec of an argument": ('in_specs=(P(), P("x"), P("x"), P())', 'in_specs=(P(), P("x"), P(), P())'),
    "a spec of a result": ('out_specs=P("x")', "out_specs=P()"),
    "what a helper writes": ('.set(sent, mode="drop")', '.set(0 * sent, mode="drop")'),
    "an extremum of a helper": ("over=(jnp.max, lax.pmax)", "over=(jnp.max, lax.pmin)"),
    "a derivative of a helper": ("reduced(ties * dx, axes)", "reduced(dx, axes)"),
    "a direction of a helper": ("(rank - distance) % devices", "(rank + 1 - distance) % devices"),
    "a place in a helper": ("return result[lax.axis_index(local)]", "return result[0]"),
    "the axes of a collective": ('noise * lax.psum(x, ("x", "i_local"))', 'noise * lax.psum(x, "i_local")'),
    "a number of the body": ("% 4) for k", "% 3) for k"),
    "an option of JAX": ('jax.config.update("jax_numpy_rank_promotion", "warn")', ""),
    "another option of JAX": ("import jax\n", 'import jax\njax.config.update("jax_enable_x64", True)\n'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_text_is_found(edit, plan):
    old, new = EDITS[edit]

    def replaced(text):
        assert text.count(old) >= 1
        return text.replace(old, new)

    ran, difference = of_text(plan, replaced)
    assert ran and difference


def test_the_text_as_it_is_computes_the_same(plan):
    assert of_text(plan, str) == (True, "")
    assert "not run" not in plan.source()


def test_a_process_without_the_package_finds_an_edit(plan, tmp_path):
    written = program.written(plan)
    original = running.exported(plan)
    for text, wrong in ((written.text, False), (written.text.replace(*EDITS["an extremum of a helper"]), True)):
        path = tmp_path / f"module_{wrong}.py"
        path.write_text(text, encoding="utf-8")
        ((ran, difference),) = running.differences(str(path), [(written.entry, *original)], written.values)
        assert (ran, bool(difference)) == (True, wrong)


def test_a_process_without_the_package_has_the_whole_mesh(tmp_path):
    with Mesh(grid(2, 2), ("x", "y")):
        both = xmap(lambda x: lax.psum(x, "i"), ["i", "j"], ["j"], axis_resources={"i": "x", "j": "y"})
        plan = both.plan(shaped(2, 6))
    written = program.written(plan)
    (tmp_path / "module.py").write_text(written.text, encoding="utf-8")
    todo = [(written.entry, *running.exported(plan))]
    assert running.differences(str(tmp_path / "module.py"), todo, written.values) == [(True, "")]


def test_a_program_that_asks_which_names_exist_is_refused():
    """In a body the removed names exist, and in plain JAX they do not: the traced programs are the same."""

    def asks(x):
        return lax.pargmax(x, "i") * x if hasattr(lax, "pargmax") else x

    with pytest.raises(NotImplementedError, match="computes something else, on made-up arguments"):
        planned(asks, (["i", ...], ["i", ...]), (shaped(4, 2),)).source()


def test_a_plan_runs_once(monkeypatch):
    plan, calls = planned(lambda x: x + 1, (["i", ...], ["i", ...]), (shaped(4, 2),)), []
    kept = running.why_not_run
    monkeypatch.setattr(running, "why_not_run", lambda *args: calls.append(args) or kept(*args))
    assert plan.source() == plan.source() and len(calls) == 1
    assert plan.source(run=False).splitlines()[0].endswith('Traced and compared, not run: run=False."""')
    assert len(calls) == 1


def printing(x):
    jax.debug.print("{}", x)
    return x


def halving(x):
    return lax.while_loop(lambda v: jnp.max(v) > 1, lambda v: v / 2, x)


def counting(x):
    return lax.while_loop(lambda c: (c[0] < 3) & (jnp.max(c[1]) < 9), lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


ROWS = (["i", ...], ["i", ...])


@pytest.mark.parametrize(
    ("body", "mesh", "why"),
    [
        (printing, None, "it calls functions of the host"),
        (halving, None, "a while loop may never end"),
        (lambda x: x, jax.sharding.AbstractMesh((2,), ("x",)), "its mesh has no devices"),
    ],
    ids=["callback", "while", "abstract"],
)
def test_the_first_line_says_why_nothing_ran(body, mesh, why):
    if mesh is not None:
        with jax.sharding.use_abstract_mesh(mesh):
            text = xmap(body, *ROWS, axis_resources={"i": "x"}).plan(shaped(4, 2)).source()
    else:
        text = planned(body, ROWS, (shaped(4, 2),)).source()
    assert f"Traced and compared, not run: {why}." in text.splitlines()[0]


def test_a_loop_that_counts_runs():
    assert "not run" not in planned(counting, ROWS, (shaped(4, 2),)).source()


def with_sizes(x):
    return x - lax.psum(x, "i") / lax.psum(1, "i")


@pytest.mark.parametrize(("axes", "ran"), [(ROWS, True), (([...], ["i", ...]), False)])
def test_a_large_call_runs_on_fewer_elements_unless_its_sizes_are_in_the_text(axes, ran, monkeypatch):
    monkeypatch.setattr(running, "_MOST_BYTES", 1000)
    with Mesh(grid(2), ("x",)):
        f = xmap(with_sizes, *axes, axis_sizes={} if ran else {"i": 400}, axis_resources={"i": "x"})
        text = f.plan(shaped(400, 2) if ran else shaped(2)).source()
    assert ("not run: its arrays are large, and their sizes are in the text" in text) is not ran


def repeated(x):
    return lax.scan(lambda c, _: (lax.pmax(c, "i"), None), x, None, length=2)[0]


def test_a_derivative_that_only_xmap_has_is_said_in_front():
    """JAX forgets the axis of a vmap where it differentiates a function with a rule in a scan."""
    text = planned(repeated, ROWS, (shaped(4, 2),)).source()
    about = ast.get_docstring(ast.parse(text)).split("\n\n")
    assert about[1].startswith("JAX cannot differentiate this, and xmap can: NameError")
    x = normal(4, 2)
    np.testing.assert_allclose(run(text)(x), np.broadcast_to(x.max(0), x.shape))
    with pytest.raises(NameError):
        jax.grad(lambda x: run(text)(x).sum())(x)


def test_made_up_arguments_are_of_the_right_kind():
    types = [((2, 3), "float32", None), ((5,), "int32", None), ((4,), "bool", None), ((2,), "uint32", "threefry2x32")]
    sample = beside.Sample([*types[:3], ((2,), "key<fry>", "threefry2x32")], 3, 1e-5, True)
    floats, indices, flags, keys = beside.made_up(sample)
    assert (floats < 0).any() and (floats > 0).any() and set(indices) <= {0, 1, 2} and flags.dtype == bool
    assert jax.random.bits(jax.random.wrap_key_data(keys, impl="threefry2x32")[0]).shape == ()
    assert (beside.made_up(sample, positive=True)[0] > 0).all()


def test_rounding_is_no_difference():
    """A sum in another order, and a threshold that rounding decides."""
    sample = beside.Sample([((1000,), "float32", None)], 2, 1e-5, True)
    forward = beside.of(lambda x: [x.cumsum()[-1]], sample)
    assert beside.difference(forward, beside.of(lambda x: [x[::-1].cumsum()[-1]], sample), sample) is None
    assert beside.difference(forward, beside.of(lambda x: [x.sum() * 1.001], sample), sample)
