"""Lines that the package draws for itself: what may import what, where JAX's insides are touched, what is documented.

Sources are read with ``ast``.  Each fence is a function from sources to what it finds, and is shown bad sources too.
"""

import ast
import configparser
import functools
import importlib
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

import xmap_compat
from xmap_compat import _jax
from xmap_compat._jax import version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "xmap_compat"


def module_name(path):
    """``'core.rules.table'``; a folder's ``__init__`` is called as the folder, that of the package ``'__init__'``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def in_folder(name, *folders):
    return any(name == folder or name.startswith(f"{folder}.") for folder in folders)


FENCE = {name: source for name, source in SOURCES.items() if in_folder(name, "_jax")}
OTHERS = {name: source for name, source in SOURCES.items() if name not in FENCE}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}

# ------------------------------------------------------------------------- reading sources


@functools.cache
def nodes(tree):
    """All nodes of a tree; walking one takes longer than what a test asks of it."""
    return tuple(ast.walk(tree))


@functools.cache
def bindings(tree):
    """The imported names of a file: ``{'lax': 'jax.lax'}``."""
    names = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            names.update(
                (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
            )
    return names


def dotted(node, names):
    """``'jax.lax.psum'`` for ``lax.psum``; a local name stands for itself, anything else is ``'?'``."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return "?"


def imported_modules(tree):
    """The dotted names that a file imports, also by ``importlib.import_module('...')``."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func, {}).endswith(
            ("import_module", "__import__")
        ):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_of_jax(name):
    return name.split(".")[0] in ("jax", "jaxlib")


# -------------------------------------------------------------- one file for JAX's insides


def names_defined_in(tree):
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


OF_PYTHON = {"_replace", "_fields", "_initializing"}  # of named tuples and module specs
OWN_NAMES = {name for tree in TREES.values() for name in names_defined_in(tree)} | OF_PYTHON


def private_uses(source):
    """Private names of JAX: imported, as attributes of its modules, or of objects whose class is not ours."""
    tree = ast.parse(source)
    names = bindings(tree)
    found = [
        name
        for name in imported_modules(tree)
        if is_of_jax(name) and any(map(is_private, name.split(".")))
    ]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = dotted(node, names)
            of_another_library = name.split(".")[0] in {
                n.split(".")[0] for n in names.values()
            } and not is_of_jax(name)
            if is_of_jax(name) or not (node.attr in OWN_NAMES or of_another_library):
                found.append(name)
        elif isinstance(node, ast.Call) and dotted(node.func, names) in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            text = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(text) and text not in OWN_NAMES:
                found.append(text)
    return found


def version_questions(source):
    """Where a source asks which JAX this is: its version, or whether it has a name."""
    tree = ast.parse(source)
    names = bindings(tree)
    versions = re.compile(
        r"jax(lib)?(\.version)?\.__version(_info)?__|xmap_compat\._jax\.(VERSION|FLOOR)"
    )
    found = [name for name in map(str, imported_modules(tree)) if versions.match(name)]
    for node in nodes(tree):
        name = dotted(node, names) if isinstance(node, ast.Attribute) else ""
        if versions.match(name):
            found.append(name)
        if (
            isinstance(node, ast.Call)
            and dotted(node.func, names) in ("hasattr", "getattr")
            and node.args
        ):
            asked = dotted(node.args[0], names)
            # getattr with a default, too, asks whether there is something.
            if is_of_jax(asked) and (len(node.args) == 3 or dotted(node.func, names) == "hasattr"):
                found.append(asked)
        if isinstance(node, ast.Call) and dotted(node.func, names).endswith("metadata.version"):
            found.append("importlib.metadata.version")
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_private_names_of_jax_are_used_in_one_file_only(name):
    assert private_uses(OTHERS[name]) == []


@pytest.mark.parametrize("name", OTHERS)
def test_the_version_of_jax_matters_in_one_file_only(name):
    assert version_questions(OTHERS[name]) == []


PRIVATE = [
    "from jax._src import core",
    "import jax._src.core as core",
    "from jax import _src",
    "from jaxlib import _jax",
    "import importlib; importlib.import_module('jax._src.mesh')",
    "import jax; jax._src.core",
    "from jax import lax; lax._convert_element_type(x)",
    "import jax; jax.jit(f)._fun",
    "def f(tracer):\n    return tracer._trace_of_jax",
    "def f(mesh):\n    return getattr(mesh, '_name_of_jax')",
]
VERSIONS = [
    "import jax; jax.__version__ > '0.10'",
    "from jax import __version__",
    "import jaxlib; jaxlib.__version__",
    "from jax import version; version.__version__",
    "from xmap_compat import _jax; _jax.VERSION >= (0, 11)",
    "from xmap_compat._jax import VERSION",
    "import jax; hasattr(jax.lax, 'pcast')",
    "from jax import lax; getattr(lax, 'pcast', None)",
    "from importlib import metadata; metadata.version('jax')",
]


@pytest.mark.parametrize("source", PRIVATE)
def test_the_fence_around_private_names_holds(source):
    assert private_uses(source)


@pytest.mark.parametrize("source", VERSIONS)
def test_the_fence_around_versions_holds(source):
    assert version_questions(source)


def test_the_fences_would_find_what_the_one_file_does():
    assert private_uses(
        "\n".join(re.sub("from __future__.*", "", source) for source in FENCE.values())
    )
    assert version_questions(SOURCES["_jax.version"])


# --------------------------------------------------------------------------- version branches


def version_tests(source):
    """Each comparison with VERSION, as ``(line, operator, releases or None)``."""
    for node in nodes(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        if not any(isinstance(side, ast.Name) and side.id == "VERSION" for side in sides):
            continue
        right = node.comparators[0]
        release = ast.literal_eval(right) if isinstance(right, ast.Tuple) else None
        is_floor = isinstance(right, ast.Name) and right.id == "FLOOR"
        yield node.lineno, type(node.ops[0]).__name__, "FLOOR" if is_floor else release


def badly_versioned(source, floor):
    """Lines of comparisons that are always true or not of the form ``VERSION >= (0, 11, 0)``."""
    tests = list(version_tests(source))
    good = [
        line
        for line, op, release in tests
        if op == "GtE" and type(release) is tuple and release > floor
    ]
    floors = [line for line, op, release in tests if (op, release) == ("Lt", "FLOOR")]
    return [line for line, _, _ in tests if line not in [*good, *floors]]


def test_every_version_branch_is_newer_than_the_floor():
    assert {
        name: lines
        for name, source in FENCE.items()
        if (lines := badly_versioned(source, _jax.FLOOR))
    } == {}


def test_there_are_branches_and_one_floor():
    tests = [test for source in FENCE.values() for test in version_tests(source)]
    assert any(type(release) is tuple for _, _, release in tests)
    assert [release for _, _, release in tests].count("FLOOR") == 1


@pytest.mark.parametrize(
    "comparison",
    [
        "VERSION >= (0, 10, 0)",
        "VERSION >= (0, 9)",
        "VERSION < (0, 12, 0)",
        "VERSION > (0, 11, 0)",
        "(0, 11, 0) <= VERSION",
        "VERSION >= '0.11'",
        "VERSION == (0, 11, 0)",
    ],
)
def test_the_fence_around_version_branches_holds(comparison):
    assert badly_versioned(f"\n{comparison}", (0, 10, 0)) == [2]
    assert badly_versioned("VERSION >= (0, 11, 0)\nVERSION < FLOOR", (0, 10, 0)) == []


def test_the_floor_is_the_one_that_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    floor = ".".join(map(str, _jax.FLOOR))
    requirements = setup["options"]["install_requires"].split()
    assert {f"jax>={floor}", f"jaxlib>={floor}"} <= set(requirements)
    assert floor in SOURCES["_jax.version"].split("raise ImportError(")[1].split(")\n")[0]


RELEASES = {
    "0.10.2": (0, 10, 2),
    "0.10.2.dev3": (0, 10, 2),
    "0.12.0.1": (0, 12, 0, 1),
    "1.0rc1": (1, 0),
    "0.9": (0, 9),
}


@pytest.mark.parametrize(("text", "release"), RELEASES.items())
def test_versions_are_compared_as_numbers(text, release):
    assert _jax.parse_version(text) == release


# A version, what JAX of that age lacked, and how the package is met.
OLD = [
    ("0.8.3", "", "from xmap_compat import xmap"),
    ("0.8.3", "", "import xmap_compat.lax"),
    ("0.8.99.dev20260101", "", "xmap_compat.install()"),
    ("0.4.30", "jax.extend", "from xmap_compat import xmap"),
    ("0.4.30", "jax.extend", "from xmap_compat import numpy"),
    ("0.2.20", "jax._src", "xmap_compat.install()"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("version", "missing", "statement"), OLD)
def test_a_jax_that_is_too_old_is_refused_clearly(version, missing, statement):
    program = f"import sys, jax; jax.__version__ = {version!r}; sys.modules[{missing!r}] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{program}\nimport xmap_compat; {statement}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: xmap_compat needs jax >= 0.9.0, but found jax {version}. "
        "Upgrade it with: pip install -U 'jax>=0.9.0'"
    )


def imports_under(version, switch):
    """What Python prints when the package is imported and used, twice, under a JAX of this version."""
    program = (
        f"import jax; jax.__version__ = {version!r}\nfor _ in range(2):\n"
        "    from xmap_compat import xmap; print(xmap(lambda x: 2 * x, ['i'], ['i'])(jax.numpy.ones(1)))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XMAP_COMPAT_UNTESTED_JAX": switch}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[2.]\n[2.]\n", done.stderr
    return done.stderr


@pytest.mark.skipif(
    any(
        type(r) is tuple and r > _jax.VERSION
        for source in FENCE.values()
        for _, _, r in version_tests(source)
    ),
    reason="needs the newest supported JAX: with another one, branches for newer releases would be taken",
)
@pytest.mark.parametrize(
    ("found", "switch", "times"), [("99.1.0.dev20990101", "", 1), ("99.1.0", "1", 0)]
)
def test_a_jax_that_is_newer_than_what_was_tested_is_met_with_one_warning(found, switch, times):
    printed = imports_under(found, switch)
    text = f"RuntimeWarning: Found jax {found}; this xmap_compat is tested up to jax {version.NEWEST_TESTED}."
    assert (printed.count(text), printed.count("Warning")) == (times, times)


@pytest.mark.parametrize(
    ("tested", "warned"), [("0.8.99", True), (_jax.RELEASE, False), ("99.0", False)]
)
def test_only_a_newer_jax_is_warned_of(tested, warned, monkeypatch):
    monkeypatch.delenv("XMAP_COMPAT_UNTESTED_JAX")
    monkeypatch.setattr(version, "NEWEST_TESTED", tested)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        version.warn_if_untested()
    assert [w.category for w in caught] == [RuntimeWarning] * warned


def test_the_newest_tested_jax_is_the_one_that_ci_pins():
    pins = dict(
        line.split("==")
        for line in (ROOT / ".ci" / "newest.txt").read_text().splitlines()
        if "==" in line
    )
    assert {pins["jax"], pins["jaxlib"]} == {version.NEWEST_TESTED}
    assert "-c .ci/newest.txt" in (ROOT / ".ci" / "run").read_text()
    assert '".ci" / "newest.txt"' in (ROOT / "noxfile.py").read_text()


# ------------------------------------------------------------------------------ the folders


def without_type_checking(tree):
    """The statements of a file that run, those of ``if TYPE_CHECKING:`` left out."""

    class Remover(ast.NodeTransformer):
        def visit_If(self, node):
            return (
                None
                if dotted(node.test, {}).endswith("TYPE_CHECKING")
                else self.generic_visit(node)
            )

    return Remover().visit(ast.parse(ast.unparse(tree)))


def at_import(tree):
    """The statements of a file that run when it is imported: the bodies of functions left out."""

    class Remover(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return ast.Pass()

    return Remover().visit(without_type_checking(tree))


def own_modules(tree, sources):
    """Which modules of the package a file imports; ``__init__`` stands for the package itself."""
    for name in imported_modules(tree):
        package, _, rest = name.partition(".")
        if package == "xmap_compat":
            parts = rest.split(".")
            longest = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            yield next((module for module in longest if module in sources), "__init__")


FACE = [
    "api",
    "xmapped",
    "errors",
    "vocabulary",
    "lax",
    "numpy",
    "random",
    "braces",
    "einsum_spec",
    "testing",
    "processes",
    "__main__",
]
# Who may import what, also inside of functions: folder -> folders and modules that it must not know.
MUST_NOT_KNOW = {
    "_jax": ["core", "tools", "legacy", *FACE],
    "core": ["tools", "legacy", *FACE],
    "tools": ["legacy"],
}
MAY_ALL_THE_SAME = {
    ("_jax", "core.errors"),  # the words for what JAX does not let us do
    ("tools.explain", "legacy"),  # runs a program that stays as it is
    ("tools.leave", "legacy"),  # the same, twice
    ("tools.check", "legacy"),  # reads the table of what is put back
}


def forbidden_imports(sources):
    for name, source in sources.items():
        unknown = [
            other
            for folder, others in MUST_NOT_KNOW.items()
            if in_folder(name, folder)
            for other in others
        ]
        for imported in (
            own_modules(without_type_checking(ast.parse(source)), sources) if unknown else ()
        ):
            allowed = any(
                in_folder(name, a) and in_folder(imported, b) for a, b in MAY_ALL_THE_SAME
            )
            if in_folder(imported, *unknown) and not allowed:
                yield name, imported


def circles(sources):
    """Modules that import themselves, directly or through others, when they are imported."""
    return in_circles(
        {
            name: set(own_modules(at_import(ast.parse(source)), sources))
            for name, source in sources.items()
        }
    )


def in_circles(imports):
    """The modules that lead back to themselves; ``imports`` has those that each imports."""
    known = {name: imported - {name} for name, imported in imports.items()}
    reached = dict(known)
    while True:
        grown = {name: below.union(*(reached[n] for n in below)) for name, below in reached.items()}
        if grown == reached:
            return sorted(name for name, below in reached.items() if name in below)
        reached = grown


def private_imports(sources):
    """Names with an underscore that one module takes from another."""
    for name, source in sources.items():
        for imported in imported_modules(ast.parse(source)):
            *_, module, last = ["", *imported.split(".")]
            if (
                imported.startswith("xmap_compat.")
                and is_private(last)
                and last != "_jax"
                and module != "xmap_compat"
            ):
                yield name, imported


def test_each_folder_knows_only_what_it_may():
    assert sorted(forbidden_imports(SOURCES)) == []


def test_no_module_imports_itself_through_others():
    assert circles(SOURCES) == []


def arrows_of_tools(sources):
    """What each tool imports of the others anywhere, for type checkers too; the folders are one tool each."""
    arrows = {}
    for name in (name for name in sources if in_folder(name, "tools")):
        imported = (
            other
            for other in own_modules(ast.parse(sources[name]), sources)
            if in_folder(other, "tools")
        )
        arrows.setdefault(tool_of(name), set()).update(map(tool_of, imported))
    return arrows


def tool_of(name):
    return ".".join(name.split(".")[:2])


def test_no_tool_leads_back_to_itself_and_values_know_no_views():
    arrows = arrows_of_tools(SOURCES)
    assert in_circles(arrows) == []
    for values in ("tools.plan", "tools.search"):
        assert not arrows[values] & {"tools.plan_text", "tools.picture", "tools.grid"}


def test_the_fence_around_tools_holds():
    plan = "def f():\n    from xmap_compat.tools import plan_text"
    text = "if TYPE_CHECKING:\n    from xmap_compat.tools.plan import Plan"
    assert in_circles(arrows_of_tools({"tools.plan": plan, "tools.plan_text": text})) == [
        "tools.plan",
        "tools.plan_text",
    ]
    inside = {"tools.check.a": "from xmap_compat.tools.check import b", "tools.check.b": ""}
    assert in_circles(arrows_of_tools(inside)) == []


def test_modules_share_public_names_only():
    assert sorted(private_imports(SOURCES)) == []


def test_the_fences_around_folders_hold():
    sources = {
        "api": "",
        "tools.plan": "from xmap_compat import api",
        "core.call": "",
        "core": "",
        "__init__": "",
    }
    assert (list(forbidden_imports(sources)), circles(sources), list(private_imports(sources))) == (
        [],
        [],
        [],
    )
    lazily = {**sources, "core.call": "def f():\n    from xmap_compat.tools import plan"}
    assert list(forbidden_imports(lazily)) == [("core.call", "tools.plan")]
    assert circles(lazily) == []
    around = {**sources, "api": "from xmap_compat.tools import plan"}
    assert circles(around) == ["api", "tools.plan"]
    typed = {**sources, "api": "if TYPE_CHECKING:\n    from xmap_compat.tools import plan"}
    assert circles(typed) == []
    assert list(private_imports({**sources, "api": "from xmap_compat.core.call import _secret"}))


LOADED = """
import sys
from xmap_compat import xmap
tools = lambda: sorted(name for name in sys.modules if name.startswith(("xmap_compat.tools", "xmap_compat.legacy")))
print(tools())
import numpy as np
f = xmap(lambda x: x, ["i"], ["i"])
f(np.ones(2))
print(tools())
f.plan(np.ones(2))
print("xmap_compat.tools.plan" in tools())
"""


def test_xmap_loads_no_tool_until_it_is_asked_for_a_plan():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120
    )
    tools = done.stdout.splitlines()
    assert tools == ["[]", "[]", "True"], done.stderr


# ------------------------------------------------------------------------------ sizes

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 600, 50


def test_files_are_short():
    lengths = {name: source.count("\n") for name, source in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_functions_are_short():
    long = {}
    for name, tree in TREES.items():
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef):
                documented = (ast.get_docstring(node, clean=False) or "").count("\n") + 1
                length = node.end_lineno - node.lineno + 1 - documented
                if length > MOST_LINES_OF_A_FUNCTION:
                    long[f"{name}.{node.name}"] = length
    assert long == {}


def definitions(tree):
    """The functions and classes at the top level of a file; an assigned lambda is one."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def unused_definitions(tree):
    """Functions and classes with an underscore that their own file does not use, nor a decorator registers."""
    used = {
        node.id
        for node in nodes(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    used |= {node.name for node in tree.body if getattr(node, "decorator_list", ())}
    return [name for name in definitions(tree) if is_private(name) and name not in used]


def test_private_definitions_are_used():
    assert {
        module: unused for module, tree in TREES.items() if (unused := unused_definitions(tree))
    } == {}


def test_the_fence_around_definitions_holds():
    tree = ast.parse(
        "f = lambda: _h()\ndef _g(): pass\n@f\ndef _r(): pass\ndef _h(): pass\nclass C: pass\nx = _y = 1"
    )
    assert unused_definitions(tree) == ["_g"]


def test_what_must_wait_for_the_program_does_not_import_jax():
    parts = ("__main__", "tools.check", "legacy.removed", "legacy.import_hook")
    imported = ", ".join(f"xmap_compat.{part}" for part in parts)
    program = f"import sys, {imported}; print('jax' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


# ---------------------------------------------------------------------------- public names

NAMESPACES = ["xmap_compat", "xmap_compat.lax", "xmap_compat.numpy", "xmap_compat.random"]
PUBLIC = [
    (namespace, name)
    for namespace in NAMESPACES
    for name in importlib.import_module(namespace).__all__
]


def own_public_names(module):
    """Public functions and classes of this package that can be found in a module."""
    for name in dir(module):
        value = getattr(module, name)
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(
            "xmap_compat"
        ):
            yield name


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_lists_what_a_namespace_offers(namespace):
    module = importlib.import_module(namespace)
    assert module.__all__ == sorted(module.__all__)
    modules = {
        name for name in module.__all__ if isinstance(getattr(module, name), types.ModuleType)
    }
    assert {*own_public_names(module), *modules} == set(module.__all__)


def test_the_lazy_namespace_agrees_with_what_type_checkers_see():
    seen = {
        name
        for name in imported_modules(TREES["__init__"])
        if re.match(r"xmap_compat\.[a-z]", name)
    }
    homes = [f"{home}.{name}" for name, home in xmap_compat._HOMES.items()]
    assert seen == {f"xmap_compat.{name}" for name in [*homes, *xmap_compat._MODULES]}
    with pytest.raises(
        AttributeError, match="module 'xmap_compat' has no attribute 'nonsense'"
    ) as caught:
        _ = xmap_compat.nonsense
    assert (caught.value.name, caught.value.obj) == (
        "nonsense",
        xmap_compat,
    )  # what Python suggests names by


def test_dir_shows_what_is_public_and_imports_nothing():
    program = "import sys, xmap_compat; print(*dir(xmap_compat)); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    names, loaded = done.stdout.splitlines()
    shown = [name for name in names.split() if not name.startswith("__")]
    assert (shown, loaded) == (sorted([*xmap_compat.__all__, *xmap_compat._MODULES]), "False")
    assert all(hasattr(xmap_compat, name) for name in shown)


@pytest.mark.parametrize(("namespace", "name"), PUBLIC, ids=str)
def test_every_public_name_has_a_docstring_with_an_example(namespace, name):
    """Which test_docstrings.py runs."""
    assert re.search(
        r"^ *>>> ", getattr(importlib.import_module(namespace), name).__doc__, re.MULTILINE
    )


GUIDES = {
    str(path): path.read_text()
    for path in (ROOT / "README.md", ROOT / "migration_guide.md", *(ROOT / "docs").rglob("*.md"))
}


def code_in(markdown):
    """The code of a document: fenced blocks and spans."""
    blocks = re.findall(r"^```.*?^```", markdown, re.DOTALL | re.MULTILINE)
    return "\n".join(
        [
            *blocks,
            *re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.M)),
        ]
    )


@pytest.mark.parametrize("name", sorted({name for _, name in PUBLIC}))
def test_every_public_name_is_documented(name):
    assert any(re.search(rf"\b{name}\b", code_in(text)) for text in GUIDES.values())


def names_mentioned(markdown):
    """``(namespace, name)`` for each mention of something of this package in the code of a document."""
    code = code_in(markdown)
    for namespace, imported in re.findall(r"from (xmap_compat[\w.]*) import ([\w, ]+)", code):
        yield from ((namespace, part.split(" as ")[0].strip()) for part in imported.split(","))
    for path in re.findall(r"(?<![\w/.-])xmap_compat(?:\.\w+)+", code):
        namespace, _, name = path.rpartition(".")
        yield namespace, name


MENTIONS = sorted({mention for text in GUIDES.values() for mention in names_mentioned(text)})


def resolves(namespace, name):
    try:
        exec(f"from {namespace} import {name}", {})
    except ImportError:
        return False
    return True


def test_every_documented_name_exists():
    assert ("xmap_compat", "xmap") in MENTIONS
    assert [mention for mention in MENTIONS if not resolves(*mention)] == []


def test_the_fence_around_documented_names_holds():
    text = (
        "`from xmap_compat import xmap, nonsense` and\n"
        "```python\nxmap_compat.numpy.sum_of(x)\n```\nxmap_compat.prose"
    )
    found = list(names_mentioned(text))
    assert [name for _, name in found] == ["xmap", "nonsense", "sum_of"]
    assert [resolves(*mention) for mention in found] == [True, False, False]


def docstrings(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes(tree) if isinstance(node, kinds)]


def unknown_in_docstrings(tree):
    """What docstrings refer to, and what is not there: names after a role of Sphinx, and files of a folder."""
    own = {*names_defined_in(tree), *bindings(tree)}
    for text in docstrings(tree):
        for name in re.findall(r":\w+:`~?([\w.]+)`", text):
            package, _, last = name.rpartition(".")
            known = resolves(package, last) if package else name in own or name in OWN_NAMES
            yield from [] if known else [name]
        files = re.findall(r"`((?:\w+/)+\w+\.\w+)`", text)
        yield from (
            name
            for name in files
            if not any((folder / name).exists() for folder in (ROOT, PACKAGE))
        )


@pytest.mark.parametrize("name", SOURCES)
def test_what_docstrings_refer_to_is_there(name):
    assert list(unknown_in_docstrings(TREES[name])) == []


def test_the_fence_around_docstrings_holds():
    text = "def f():\n    '''See :mod:`xmap_compat.undeclared`, :func:`f`, :func:`g_of_f`, ``tests/x.py``.'''"
    assert list(unknown_in_docstrings(ast.parse(text))) == [
        "xmap_compat.undeclared",
        "g_of_f",
        "tests/x.py",
    ]


# -------------------------------------------------------------------------------- messages


MESSAGES = {name: tree for name, tree in TREES.items() if name.endswith("errors")}


@functools.cache
def messages_taken(tree):
    """``(module, name)`` of each message that a file takes from a module of messages."""
    return {*_messages_taken(tree)}


def _messages_taken(tree):
    names = {
        k: v.removeprefix("xmap_compat.")
        for k, v in bindings(tree).items()
        if v.startswith("xmap_compat.")
    }
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id in names):
            module, _, name = dotted(node, names).rpartition(".")
            if module in MESSAGES:
                yield module, name


def test_every_message_is_used_and_every_used_message_exists():
    defined = {
        (m, n.name)
        for m, tree in MESSAGES.items()
        for n in tree.body
        if isinstance(n, ast.FunctionDef)
    }
    used = {message for tree in TREES.values() for message in messages_taken(tree)}
    used |= {
        (m, n.id) for m, tree in MESSAGES.items() for n in nodes(tree) if isinstance(n, ast.Name)
    }
    assert len(MESSAGES) == 3
    assert sorted(defined - used) == []
    defined.add(("core.errors", "LEGACY"))
    assert (
        sorted(message for tree in TREES.values() for message in messages_taken(tree) - defined)
        == []
    )


def users_outside(module):
    """Which modules outside of its room take something from a module of messages."""
    room = module.rpartition(".")[0]
    return {
        n
        for n, tree in TREES.items()
        if any(m == module for m, _ in messages_taken(tree)) and not in_folder(n, room)
    }


@pytest.mark.parametrize("room", ["tools", "legacy"])
def test_the_messages_of_a_room_are_for_that_room(room):
    assert users_outside(f"{room}.errors") == set()
    assert users_outside("core.errors") > {"api", "lax"}


# ------------------------------------------------------------------------------- leftovers

WRITTEN = [
    path
    for pattern in (
        "xmap_compat/**/*",
        "tests/**/*.py",
        "examples/*",
        "benchmarks/*",
        ".ci/*",
        "*.md",
        "*.yml",
        "docs/**/*",
        "*.cfg",
        "*.toml",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path.suffix not in (".pyc", ".png", ".svg")
]


def leftovers(text):
    return re.findall("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3 + r"\b")), text)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_left_to_do(path):
    assert leftovers(path.read_text()) == []


def test_the_fence_around_leftovers_holds():
    assert leftovers("# TO" + "DO: later") and leftovers("FIX" + "ME")
    assert PACKAGE / "_jax" / "version.py" in WRITTEN and Path(__file__) in WRITTEN
