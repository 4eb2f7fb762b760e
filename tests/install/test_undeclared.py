"""Undeclared results: under install() what jax 0.4.30 gave, on each device; otherwise refused."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import undeclared_chains
import undeclared_hostile
import undeclared_programs
from jax import lax
from jax.experimental import io_callback
from undeclared_programs import ON_X, PROGRAMS, V

import xmap_compat
from xmap_compat import install

RECORDED = json.loads((Path(__file__).parent / "undeclared_0_4_30.json").read_text())
CHAINS = json.loads((Path(__file__).parent / "undeclared_chains_0_4_30.json").read_text())
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def maps():
    with install():
        yield jax.experimental.maps


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("program", PROGRAMS)
def test_under_install_each_device_has_what_it_had(maps, quiet, program):
    with MESH:
        found = undeclared_programs.outcome(program, maps.xmap)
    if "refused" in RECORDED[program]:
        assert found == {"refused": "TypeError"}
    else:
        assert found == RECORDED[program]


def same_on_each_device(out, recorded):
    for found, wanted in zip(undeclared_chains.buffers(out), recorded, strict=True):
        # Legacy's xmap without a mesh gives one buffer, and what is equal everywhere is recorded once.
        np.testing.assert_allclose(
            np.stack(found).astype(float), np.stack(wanted * (8 // len(wanted))), 1e-4, 1e-4
        )


@pytest.mark.parametrize(
    "name", [n for n in undeclared_chains.CHAINS if not n.startswith("undeclared, named")]
)
def test_collectives_combine_what_each_device_has(maps, quiet, name):
    recorded = {c: value for c, value in CHAINS[name].items() if not isinstance(value, str)}
    assert len(recorded) >= 7
    with MESH:
        out = undeclared_chains.chain(name, maps.xmap, recorded)
    found = out if isinstance(out, dict) else out[1]
    for collective, value in recorded.items():
        alone = found[collective] if isinstance(out, dict) else (out[0], found[collective])
        same_on_each_device(alone, value)


@pytest.mark.parametrize("program", undeclared_hostile.PROGRAMS)
def test_programs_that_feed_on_undeclared_results_have_legacys_numbers(maps, quiet, program):
    assert not isinstance(CHAINS[program], str)
    with MESH:
        same_on_each_device(undeclared_hostile.run(program, maps.xmap), CHAINS[program])


@pytest.mark.parametrize("placement", undeclared_chains.PLACEMENTS)
def test_named_each_device_takes_its_part_of_its_own(maps, quiet, placement):
    """Legacy refused every array that is not placed as its spec says: here one is cut on each device."""
    name = f"undeclared, named, {placement}"
    assert set(CHAINS[name].values()) == {"ValueError"}
    if placement == "in part":
        return
    sizes = list(undeclared_chains.PLACEMENTS[placement][1].values())
    with MESH:
        out = undeclared_chains.chain(name, maps.xmap, ["psum"])
    np.testing.assert_array_equal(out["psum"], (10 + np.arange(np.prod(sizes))).sum())


def own(maps):
    return maps.xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(V)


def devices_of(out):
    return [float(s.data) for s in sorted(out.addressable_shards, key=lambda s: s.device.id)][::2]


def test_a_clean_argument_a_state_and_a_clean_one_again(maps, quiet):
    total = maps.xmap(lambda s: lax.psum(s, "i"), {}, {}, axis_sizes={"i": 4}, axis_resources=ON_X)
    jitted = jax.jit(lambda s: total(s) + 1)
    with MESH:
        assert [float(total(3.0)), float(jitted(3.0))] == [12, 13]
        for _ in range(2):
            assert devices_of(total(own(maps))) == [46] * 4
            assert devices_of(jitted(own(maps))) == [47] * 4
            assert [float(total(3.0)), float(jitted(3.0))] == [12, 13]


def test_a_predicate_around_a_collective_gives_results_where_legacy_hung(maps, quiet):
    def chosen(s):
        return lax.cond(s > 11, lambda s: lax.psum(s, "i"), lambda s: -s, s)

    def grown(s):
        return lax.while_loop(lambda c: c < 30, lambda c: c + lax.pmax(c, "i") / 2, s)

    options = {"axis_sizes": {"i": 4}, "axis_resources": ON_X}
    with MESH:
        assert devices_of(maps.xmap(chosen, {}, {}, **options)(own(maps))) == [-10, -11, 46, 46]
        found = devices_of(maps.xmap(grown, {}, {}, **options)(own(maps)))
        # What decides is a state, and what the collective combines is not.
        sums = maps.xmap(
            lambda s, v: lax.cond(s > 11, lambda v: lax.psum(v, "i"), lambda v: -v, v),
            ({}, ["i"]),
            ["i"],
            **options,
        )
        np.testing.assert_array_equal(sums(own(maps), V), [-10, -11, 46, 46])
    values = np.arange(10.0, 14)
    while (values < 30).any():
        values = np.where(values < 30, values + values.max() / 2, values)
    assert found == values.tolist()


def test_only_collectives_that_depend_on_it_have_no_gradient_from_outside(maps, quiet):
    loss = maps.xmap(lambda w, v: lax.psum((w * v) ** 2, "i"), ({}, ["i"]), {}, axis_resources=ON_X)
    of_all = maps.xmap(
        lambda w, v: lax.psum(w * v, "i") + lax.psum(w, "i"), ({}, ["i"]), {}, axis_resources=ON_X
    )

    def noted(w, v):
        """The values that a callback gets differ along x as their axis says."""
        io_callback(lambda _: None, None, lax.stop_gradient(w * v))
        return lax.psum((w * v) ** 2, "i")

    noted = maps.xmap(noted, ({}, ["i"]), {}, axis_resources=ON_X)
    with MESH:
        own(maps)
        for f in (loss, noted):
            np.testing.assert_allclose(jax.grad(f)(2.0, V), 4 * (V**2).sum(), rtol=1e-6)
        with pytest.raises(
            NotImplementedError,
            match=r"has no gradient from outside.*Add the axis to those out_axes",
        ):
            jax.grad(of_all)(2.0, V)


def test_without_a_mesh_it_is_the_value_of_the_first_device(maps, quiet):
    twice = maps.xmap(lambda s: s * 2, {}, {}, axis_sizes={"k": 3})
    key = maps.xmap(
        lambda v: jax.random.wrap_key_data(jnp.full(2, v, jnp.uint32)),
        ["i"],
        {},
        axis_resources=ON_X,
    )
    with MESH:
        assert devices_of(twice(own(maps))) == devices_of(jax.jit(twice)(own(maps))) == [20] * 4
        assert devices_of(twice(own(maps) > 9).astype(int)) == [2] * 4
        np.testing.assert_allclose(jax.grad(twice)(3.0), 2)
        bits = maps.xmap(jax.random.key_data, {}, {}, axis_sizes={"k": 3})(key(V))
    assert [s.data.tolist() for s in bits.addressable_shards] == [[10, 10]] * 8


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_package_keeps_refusing(maps, program):
    with xmap_compat.Mesh(MESH.devices, MESH.axis_names):
        assert undeclared_programs.outcome(program, xmap_compat.xmap) == {"refused": "TypeError"}


def test_inside_of_a_jit_too(maps, quiet):
    first = maps.xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)
    second = maps.xmap(lambda s, w: s + w, ({}, ["i"]), ["i"], axis_resources=ON_X)
    with MESH:
        np.testing.assert_array_equal(jax.jit(lambda v: second(first(v), v))(V), 2 * V)
        np.testing.assert_array_equal(jax.jit(lambda v: first(v) * 2)(V), 2 * V[0])


def test_the_warning_names_result_axis_and_place_once(maps):
    def run():
        fun = maps.xmap(
            lambda v: {"a": v, "b": v.sum()}, ["i"], {"a": {}, "b": ["i"]}, axis_resources=ON_X
        )
        with MESH:
            fun(V)  # this line

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        run()
    (warning,) = caught
    line = next(
        k
        for k, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# this line")
    )
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert f"result['a'] of the xmapped function at {__file__}:{line}" in str(warning.message)
    assert "varies over i, but its out_axes do not name i" in str(warning.message)


def test_it_has_no_gradient_from_outside(maps, quiet):
    fun = maps.xmap(lambda v: (v, jax.lax.psum(v**2, "i")), ["i"], ({}, {}), axis_resources=ON_X)
    with (
        MESH,
        pytest.raises(
            NotImplementedError, match="no gradient from outside: it returns a result that varies"
        ),
    ):
        jax.grad(lambda v: fun(v)[0])(V)


def test_a_nested_one_is_refused_as_it_was(maps):
    inner = maps.xmap(lambda u: u, ["j"], {}, axis_resources={"j": "y"})
    outer = maps.xmap(lambda v: inner(v), ["i", ...], ["i", ...], axis_resources=ON_X)
    with MESH, pytest.raises(TypeError, match="actually mapped along more axes"):
        outer(jnp.ones((4, 2)))


CALLS = {  # of v = 1, 4, 9, 16 on the devices along x: what 0.4.30 returned there
    "alone": (lambda call, v: call(v), [2, 8, 18, 32]),
    "in a loop": (
        lambda call, v: lax.fori_loop(0, 2, lambda _, c: c + call(c), v),
        [9, 36, 81, 144],
    ),
    "in a branch": (lambda call, v: lax.cond(v > 5, call, lambda v: v, v), None),
    "in a loop that devices leave apart": (
        lambda call, v: lax.while_loop(lambda c: c < 9, call, v),
        None,
    ),
}


@pytest.mark.parametrize(("body", "wanted"), CALLS.values(), ids=CALLS)
def test_an_io_callback_is_called_with_what_each_device_has_or_refused(
    maps, quiet, end_a_hang, body, wanted
):
    seen = []

    def double(x):
        seen.append(float(x))
        return np.float32(2 * x)

    def call(v):
        return jax.experimental.io_callback(double, jax.ShapeDtypeStruct((), np.float32), v)

    with MESH:
        state = maps.xmap(lambda v: v * v, ["i"], {}, axis_resources=ON_X)(
            np.arange(1, 5, dtype=np.float32)
        )
        fun = maps.xmap(lambda v: body(call, v), {}, {}, axis_sizes={"i": 4}, axis_resources=ON_X)
        if wanted is None:
            with pytest.raises(
                NotImplementedError, match=r"Not all elements of .*x.* reach the io_callback"
            ):
                fun(state)
            return
        found = [float(shard.data) for shard in fun(state).addressable_shards]
    np.testing.assert_array_equal(found, np.repeat(wanted, 2))
    assert len(seen) == (
        4 if body is CALLS["alone"][0] else 8
    )  # once for each device along x, not for the copies
