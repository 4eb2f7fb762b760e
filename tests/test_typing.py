"""What types say of a user's program is what it does.

The lint checks the program's types with mypy and pyright (``setup.cfg`` and ``pyproject.toml`` name its folder); here
it runs, with its own assertions on values.
"""

import configparser
import inspect
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest

import xmap_compat
from xmap_compat import Xmapped, xmap

ROOT = Path(__file__).parents[1]


def test_the_typed_program_does_what_its_types_say(capsys):
    made = runpy.run_path(str(ROOT / "tests" / "typed" / "user_program.py"))
    assert "batch" in capsys.readouterr().out  # the plan that it prints
    assert isinstance(made["version"], str)


def test_the_lint_checks_its_types():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert "tests/typed" in setup["mypy"]["files"] and pyright["include"] == ["tests/typed"]
    assert (
        setup["mypy-user_program"]["warn_unused_ignores"] == "True"
        and pyright["reportUnnecessaryTypeIgnoreComment"]
    )
    lint = (ROOT / "noxfile.py").read_text().partition("def lint(")[2]
    assert 'session.run("mypy")' in lint and 'session.run("pyright")' in lint
    assert (
        "session.chdir(program.parent)" in lint
    )  # and from elsewhere, where only the installed package can be found
    assert (Path(xmap_compat.__file__).parent / "py.typed").exists()


def test_an_xmapped_function_has_what_its_type_promises():
    f = xmap(lambda x: x, ["i"], ["i"])
    promised = {name for name in vars(Xmapped) if not name.startswith("_")} | {
        "__call__",
        "__get__",
        "__wrapped__",
    }
    assert promised > {"plan", "lower", "trace"}
    assert [name for name in promised if not hasattr(f, name)] == []


def test_help_shows_the_parameters_as_users_give_them():
    shown = str(inspect.signature(xmap))
    assert shown == (
        "(fun, in_axes, out_axes, *, axis_sizes=None, axis_resources=None, donate_argnums=(), "
        "backend=None)"
    )
    assert ":class:" not in xmap.__doc__ and ":mod:" not in xmap.__doc__


# ------------------------------------------------------------------------------------- a decorator


def test_xmap_without_a_function_is_a_decorator():
    @xmap(in_axes=["i", ...], out_axes=["i", ...], axis_sizes={"j": 2}, donate_argnums=())
    def doubled(x):
        """Twice."""
        return 2 * x

    assert doubled(np.array([1, 2, 3])).tolist() == [2, 4, 6]
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")
    assert [axis.name for axis in doubled.plan(np.array([1, 2, 3])).axes] == ["i", "j"]


@pytest.mark.parametrize("given", [{}, {"in_axes": ["i"]}, {"out_axes": ["i"]}], ids=str)
def test_a_decorator_without_specs_is_refused(given):
    missing = " and ".join(name for name in ("in_axes", "out_axes") if name not in given)
    for wanting in (lambda: xmap(**given), lambda: xmap(len, **given)):
        with pytest.raises(
            TypeError,
            match=rf"^xmap\(\) is missing {missing}, which .* @xmap\(in_axes=\['batch', ...\], out_axes=",
        ):
            wanting()
