"""The parts of the fence that only help: without any of them calls give the same numbers and the same programs."""

import importlib
import inspect
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import distributed
from test_private_names import EXPECTED

from xmap_compat import _jax, named_shape, xmap
from xmap_compat._jax import nice
from xmap_compat._jax.nice import plain

X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture(autouse=True)
def fresh_parts(monkeypatch):
    """Each part is on, whatever the environment and other tests say, and imported anew."""
    monkeypatch.setattr(nice, "_off", set())
    monkeypatch.delenv("XMAP_COMPAT_PUBLIC", raising=False)


def remove(monkeypatch, part):
    """A part that raises when it is imported, as it does where JAX has changed."""
    monkeypatch.setitem(sys.modules, f"xmap_compat._jax.nice.{part}", None)


def program(v):
    return v - lax.pmean(jnp.sin(v), "i") + lax.axis_index("i")


def operations(text):
    """The lines of a compiled program, less where in the source they come from: its tables differ in their lengths."""
    lines = re.sub(r"(metadata=\{[^}]*\}|^\s*\d+ .*$)", "", text, flags=re.M).splitlines()
    return [line for line in lines if line.strip()]


def outcomes(mesh):
    """What calls give: values, a gradient, the compiled program."""
    fun = xmap(program, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with mesh:
        slope = jax.grad(lambda x: (fun(x) ** 2).sum())(X)
        text = jax.jit(fun).lower(X).compile().as_text()
        return np.asarray(fun(X)), np.asarray(slope), operations(text)


def called(mesh, x):
    with mesh:
        return xmap(lambda v: program(v), ["i", ...], ["i", ...], axis_resources={"i": "x"})(x)


# For each part what needs it, of a mesh, and what is said where it is off (None: it works as well, or gives nothing).
USES = {
    "recovery": (lambda mesh: called(mesh, jax.device_put(X, jax.devices()[1])), "Received incompatible devices"),
    "contexts": (lambda mesh: called(mesh, X), None),
    "spmd": (lambda mesh: called(mesh, X), None),
    "processes": (lambda mesh: stored(), None),
    "origins": (lambda mesh: xmap(shape_of, ["i", ...], ["i", ...])(X), "cannot tell which named axes"),
    "frames": (lambda mesh: _jax.user_frames(jax.make_jaxpr(jnp.sin)(1.0).eqns[0]), None),
    "references": (lambda mesh: xmap(writes, ["i", ...], ["i", ...])(X), "reference"),
}


def stored():
    """What a process keeps in the store, whose client offers only what the part needs."""
    kept = {}
    client = types.SimpleNamespace(key_value_set=kept.__setitem__, key_value_dir_get=lambda folder: [*kept.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.global_state, "client", client)
        store = _jax.process_store()
    return store and (store.put("a/b", "c"), store.under("a"))


def shape_of(v):
    """Of a value, and of one that another transformation holds."""

    def asked(u):
        assert named_shape(u * 2) == {"i": 8}
        return u.sum()

    return v + jax.grad(asked)(v) + jax.vmap(asked)(v)


def writes(v):
    total = jax.new_ref(jnp.zeros(3))
    total[...] = total[...] + v
    return total[...]


def warned(run, match):
    """Run, and return the warnings of parts."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if match is None:
            run()
        else:
            with pytest.raises((ValueError, AttributeError, NotImplementedError), match=match):
                run()
    return [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("part", nice.PARTS)
def test_a_part_that_fails_at_import_is_off_with_one_warning(part, mesh42, monkeypatch):
    remove(monkeypatch, part)
    use, match = USES[part]
    told = warned(lambda: use(mesh42), match) + warned(lambda: use(mesh42), match)
    assert [f"part `{part}`" in text for text in told] == [True]
    assert not nice.is_on(part)


def test_without_any_part_values_gradients_and_programs_are_the_same(mesh42, monkeypatch):
    jax.clear_caches()  # what tests before this one traced may be called otherwise
    expected = outcomes(mesh42)
    monkeypatch.setenv("XMAP_COMPAT_PUBLIC", "1")
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = outcomes(mesh42)
    for one, other in zip(expected[:2], found[:2]):
        np.testing.assert_array_equal(one, other)
    assert found[2] == expected[2]


def test_parts_and_stand_ins_agree():
    for part in nice.PARTS:
        module = importlib.import_module(f"xmap_compat._jax.nice.{part}")
        names = [name for name in vars(getattr(plain, part)) if not name.startswith("__")]
        assert all(callable(getattr(module, name)) for name in names)


def assert_off_with_one_warning(part, pattern, other, cause, mesh, monkeypatch, folder):
    """Use a part twice whose source says something else."""
    source = inspect.getsource(importlib.import_module(f"xmap_compat._jax.nice.{part}"))
    assert re.search(pattern, source)
    (folder / f"{part}.py").write_text(re.sub(pattern, other, source))
    monkeypatch.setattr(nice, "__path__", [str(folder), *nice.__path__])
    monkeypatch.delitem(sys.modules, f"xmap_compat._jax.nice.{part}")
    use, match = USES[part]
    told = warned(lambda: use(mesh), match) + warned(lambda: use(mesh), match)
    assert [f"part `{part}` needs" in text and cause in text for text in told] == [True]
    assert not nice.is_on(part)


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, name in EXPECTED if part])
def test_a_private_name_that_is_gone_turns_its_part_off(part, name, mesh42, monkeypatch, tmp_path):
    """Where the part asks for another name, which no JAX has."""
    leaf = re.findall(r"\w+", name)[-1]
    assert_off_with_one_warning(part, rf"\b{leaf}\b", f"{leaf}_gone", f"{leaf}_gone", mesh42, monkeypatch, tmp_path)


# For each part something that may change without its name, and how the warning names it.
CHANGED = [
    ("contexts", r'"mesh", "x", "name", "api_name"', '"x", "mesh", "name", "api_name"', "_create_sharding_for_array"),
    ("frames", r"made.raw_frames\(\)", "[[None], [0], [0]]", "too many values to unpack"),
    ("origins", r"x\.val\)", "None)", "not in"),
    ("spmd", r"axis_env\.spmd", "axis_env.spmd_axis_names.spmd", "spmd"),
]


@pytest.mark.parametrize(("part", "pattern", "other", "cause"), CHANGED, ids=[part for part, *_ in CHANGED])
def test_a_private_thing_that_has_changed_turns_its_part_off(
    part, pattern, other, cause, mesh42, monkeypatch, tmp_path
):
    assert_off_with_one_warning(part, pattern, other, cause, mesh42, monkeypatch, tmp_path)


def test_a_caller_of_named_shape_without_its_part_gets_an_error_of_ours(monkeypatch):
    monkeypatch.setenv("XMAP_COMPAT_PUBLIC", "1")
    with pytest.raises(ValueError, match="named_shape cannot tell"):
        xmap(lambda v: v * len((v + 1).named_shape), ["i", ...], ["i", ...])(X)
