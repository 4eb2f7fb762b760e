"""Every public docstring has an example, and the examples do what they show.

They run by doctest in this one process, each as if it were alone, and with small shapes.
"""

import doctest
import importlib
import inspect

import pytest

import xmap_compat

NAMESPACES = ["xmap_compat", *(f"xmap_compat.{name}" for name in xmap_compat._MODULES)]


def documented():
    """``{'xmap_compat.lax.pdot': pdot}``: the modules, and each public object once."""
    found = {}
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        found[namespace] = module
        found.update((f"{namespace}.{name}", getattr(module, name)) for name in module.__all__)
    found["xmap_compat.xmap(...).plan"] = xmap_compat.Xmapped.plan
    return {
        name: value
        for name, value in found.items()
        if list(found.values()).index(value) == [*found].index(name)
    }


DOCUMENTED = documented()


def examples_of(name):
    return doctest.DocTestParser().get_doctest(inspect.getdoc(DOCUMENTED[name]), {}, name, name, 0)


@pytest.fixture
def settings():
    """As they are by default, after an example has changed them."""
    yield
    xmap_compat.compare_processes()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_docstring_has_an_example_that_runs(name):
    examples = examples_of(name)
    assert any(not example.source.startswith(("import", "from")) for example in examples.examples)
    said = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=said.append)
    assert results.failed == 0, "".join(said)


def test_help_begins_with_what_the_package_is():
    first, *_ = inspect.getdoc(xmap_compat).splitlines()
    assert (
        first == "xmap on modern JAX: named axes, and one argument that says how each is executed."
    )
