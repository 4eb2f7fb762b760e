"""Lines that the package draws for itself: what may import what, where JAX's insides are touched, what is documented.

Sources are read with ``ast``.  A fence is a function from a source to what it finds, and is shown a bad source too.
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
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


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
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
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
        elif isinstance(node, ast.Call) and dotted(node.func, {}).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_of_jax(name):
    return name.split(".")[0] in ("jax", "jaxlib")


def names_defined_in(tree):
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


# -------------------------------------------------------------- one folder for JAX's insides

OF_PYTHON = {"_replace", "_fields", "_initializing"}  # of named tuples and module specs
OWN_NAMES = OF_PYTHON.union(*map(names_defined_in, TREES.values()))


def private_uses(source):
    """Private names of JAX: imported, as attributes of its modules, or of objects whose class is not ours."""
    tree = ast.parse(source)
    names = bindings(tree)
    libraries = {name.split(".")[0] for name in names.values()} - {"jax", "jaxlib"}
    for name in imported_modules(tree):
        if is_of_jax(name) and any(map(is_private, name.split("."))):
            yield name
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            name = dotted(node, names)
            known = node.attr in OWN_NAMES or name.split(".")[0] in libraries
            if is_of_jax(name) or not known:
                yield name
        elif isinstance(node, ast.Call) and dotted(node.func, names) in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            attribute = node.args[1]
            text = attribute.value if isinstance(attribute, ast.Constant) else ""
            if is_private(text) and text not in OWN_NAMES:
                yield text


ASKS = re.compile(
    r"jax(lib)?(\.version)?\.__version(_info)?__|xmap_compat\._jax\.(VERSION|FLOOR)"
    r"|importlib\.metadata\.version"
)


def version_questions(source):
    """Where a source asks which JAX this is: its version, or whether it has a name."""
    tree = ast.parse(source)
    names = bindings(tree)
    yield from filter(ASKS.match, imported_modules(tree))
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and ASKS.match(dotted(node, names)):
            yield node.attr
        if isinstance(node, ast.Call) and is_existence_question(node, names):
            yield dotted(node.args[0], names)


def is_existence_question(call, names):
    """``hasattr(jax.lax, 'x')``; ``getattr`` with a default, too, asks whether there is something."""
    function = dotted(call.func, names)
    asks = function == "hasattr" or (function == "getattr" and len(call.args) == 3)
    return asks and is_of_jax(dotted(call.args[0], names))


@pytest.mark.parametrize("name", OTHERS)
def test_one_folder_knows_jaxs_insides_and_its_version(name):
    assert [*private_uses(OTHERS[name]), *version_questions(OTHERS[name])] == []


PRIVATE = """
from jax._src import core
import jax._src.core as core
from jaxlib import _jax
import importlib; importlib.import_module('jax._src.mesh')
import jax; jax._src.core
from jax import lax; lax._convert_element_type(x)
import jax; jax.jit(f)._fun
tracer._trace_of_jax
getattr(mesh, '_name_of_jax')
"""
VERSIONS = """
import jax; jax.__version__ > '0.10'
from jax import __version__
from jax import version; version.__version__
from xmap_compat import _jax; _jax.VERSION >= (0, 11)
from xmap_compat._jax import VERSION
import jax; hasattr(jax.lax, 'pcast')
from jax import lax; getattr(lax, 'pcast', None)
from importlib import metadata; metadata.version('jax')
"""


@pytest.mark.parametrize(
    ("fence", "bad"),
    [(private_uses, PRIVATE), (version_questions, VERSIONS)],
    ids=["private uses", "questions of a version"],
)
def test_the_fences_around_jaxs_insides_hold(fence, bad):
    assert [line for line in bad.strip().splitlines() if not list(fence(line))] == []


def comparisons_with_versions(source):
    """``(how, release)`` of each: ``('VERSION >=', (0, 11))``."""
    pattern = r"(VERSION [<>=!]=|VERSION [<>]|[<>=!]+ VERSION) (\(.*?\)|\w+)"
    for how, release in re.findall(pattern, re.sub("#.*", "", source)):
        yield how, ast.literal_eval(release) if release.startswith("(") else release


def test_every_version_branch_is_newer_than_the_floor():
    found = [
        compared for source in FENCE.values() for compared in comparisons_with_versions(source)
    ]
    assert {how for how, _ in found} == {"VERSION >=", "VERSION <"}
    releases = [release for _, release in found if release != "FLOOR"]
    assert releases and min(releases) > _jax.FLOOR


def test_the_floor_is_the_one_that_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    floor = ".".join(map(str, _jax.FLOOR))
    requirements = setup["options"]["install_requires"].split()
    assert {f"jax>={floor}", f"jaxlib>={floor}"} <= set(requirements)


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.10.2.dev3", (0, 10, 2)), ("0.12.0.1", (0, 12, 0, 1)), ("1.0rc1", (1, 0))],
)
def test_versions_are_compared_as_numbers(text, release):
    assert _jax.parse_version(text) == release


def printed_by(program, **environment):
    """What a program prints in a process of its own, and on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout.splitlines(), done.stderr


# A version, what JAX of that age lacked, and how the package is imported.
OLD = [
    ("0.8.3", "", "from xmap_compat import xmap"),
    ("0.8.99.dev20260101", "", "xmap_compat.install()"),
    ("0.4.30", "jax.extend", "from xmap_compat import numpy"),
    ("0.2.20", "jax._src", "xmap_compat.install()"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("version", "missing", "statement"), OLD)
def test_a_jax_that_is_too_old_is_refused_clearly(version, missing, statement):
    pretend = f"import sys, jax; jax.__version__ = {version!r}; sys.modules[{missing!r}] = None"
    printed, error = printed_by(f"{pretend}\nimport xmap_compat; {statement}")
    assert printed == []
    assert error.splitlines()[-1] == (
        f"ImportError: xmap_compat needs jax >= 0.9.0, but found jax {version}. "
        "Upgrade it with: pip install -U 'jax>=0.9.0'"
    )


@pytest.mark.parametrize(
    ("tested", "switch", "warned"),
    [("0.8.99", "", True), ("0.8.99", "1", False), (_jax.RELEASE, "", False), ("99.0", "", False)],
)
def test_only_a_newer_jax_is_warned_of(tested, switch, warned, monkeypatch):
    monkeypatch.setenv("XMAP_COMPAT_UNTESTED_JAX", switch)
    monkeypatch.setattr(version, "NEWEST_TESTED", tested)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        version.warn_if_untested()
    found = f"Found jax {_jax.RELEASE}; this xmap_compat is tested up to jax {tested}."
    assert [found in str(warning.message) for warning in caught] == [True] * warned


@pytest.mark.skipif(
    _jax.parse_version(version.NEWEST_TESTED) > _jax.VERSION,
    reason="branches for newer releases would be taken",
)
def test_the_first_import_warns_of_a_newer_jax():
    program = (
        "import jax; jax.__version__ = '99.1'\nfor _ in range(2): from xmap_compat import xmap"
    )
    _, errors = printed_by(program, XMAP_COMPAT_UNTESTED_JAX="")
    assert errors.count("RuntimeWarning: Found jax 99.1") == 1


def test_the_newest_tested_jax_is_the_one_that_ci_pins():
    pins = (ROOT / ".ci" / "newest.txt").read_text().splitlines()
    newest = version.NEWEST_TESTED
    assert {f"jax=={newest}", f"jaxlib=={newest}"} <= set(pins)
    assert "-c .ci/newest.txt" in (ROOT / ".ci" / "run").read_text()
    assert '".ci" / "newest.txt"' in (ROOT / "noxfile.py").read_text()


# ------------------------------------------------------------------------------ the folders


class Runs(ast.NodeTransformer):
    """Takes ``if TYPE_CHECKING:`` out of a file, and the bodies of functions unless they are to stay."""

    def __init__(self, functions):
        self.functions = functions

    def visit_If(self, node):
        if dotted(node.test, {}).endswith("TYPE_CHECKING"):
            return None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        return node if self.functions else ast.Pass()


def own_imports(source, sources, functions):
    """Which modules of the package a file imports; ``__init__`` stands for the package itself."""
    tree = Runs(functions).visit(ast.parse(source))
    for name in imported_modules(tree):
        package, _, rest = name.partition(".")
        while rest and rest not in sources:
            rest = rest.rpartition(".")[0]
        if package == "xmap_compat":
            yield rest or "__init__"


FACE = (
    "api xmapped errors vocabulary lax numpy random braces einsum_spec testing processes __main__"
)
# Who may import what, also inside of functions: folder -> folders and modules that it must not know.
MUST_NOT_KNOW = {
    "_jax": ["core", "tools", "legacy", *FACE.split()],
    "core": ["tools", "legacy", *FACE.split()],
    "tools": ["legacy"],
}
MAY_ALL_THE_SAME = [
    ("_jax", "core.errors"),  # the words for what JAX does not let us do
    ("tools.explain", "legacy"),  # runs a program that stays as it is
    ("tools.leave", "legacy"),  # the same, twice
    ("tools.check", "legacy"),  # reads the table of what is put back
]


def forbidden_imports(sources):
    for name, source in sources.items():
        unknown = MUST_NOT_KNOW.get(name.split(".")[0], [])
        for imported in own_imports(source, sources, functions=True):
            allowed = [b for a, b in MAY_ALL_THE_SAME if in_folder(name, a)]
            if in_folder(imported, *unknown) and not in_folder(imported, *allowed):
                yield name, imported


def circles(sources):
    """Modules that import themselves, directly or through others, when they are imported."""
    reached = {}
    for name, source in sources.items():
        reached[name] = {*own_imports(source, sources, functions=False)} - {name}
    for _ in range(len(reached).bit_length()):
        reached = {name: seen.union(*map(reached.get, seen)) for name, seen in reached.items()}
    return sorted(name for name, seen in reached.items() if name in seen)


def private_imports(sources):
    """Names with an underscore that one module takes from another."""
    for name, source in sources.items():
        for imported in imported_modules(ast.parse(source)):
            module, _, last = imported.rpartition(".")
            if module.startswith("xmap_compat.") and is_private(last):
                yield name, imported


def test_modules_import_only_what_they_may():
    assert sorted(forbidden_imports(SOURCES)) == []
    assert circles(SOURCES) == []
    assert sorted(private_imports(SOURCES)) == []


BAD_IMPORTS = [
    (forbidden_imports, {"core.call": "def f():\n    from xmap_compat.tools import plan"}),
    (circles, {"api": "from xmap_compat.tools import plan"}),
    (private_imports, {"api": "from xmap_compat.core.call import _secret"}),
]


@pytest.mark.parametrize(("fence", "bad"), BAD_IMPORTS, ids=["upwards", "circle", "private"])
def test_the_fences_around_folders_hold(fence, bad):
    plan = "if TYPE_CHECKING:\n    from xmap_compat import core\nfrom xmap_compat import api"
    good = {"api": "", "tools.plan": plan, "core.call": "", "core": "", "__init__": ""}
    assert list(fence(good)) == []
    assert len(list(fence(good | bad))) == (2 if fence is circles else 1)


LOADED = """
import sys
tools = lambda: [name for name in sys.modules if name.startswith(("xmap_compat.tools", "xmap_compat.legacy"))]
from xmap_compat import xmap
import numpy as np
f = xmap(lambda x: x, ["i"], ["i"])
f(np.ones(2))
print(tools())
f.plan(np.ones(2))
print("xmap_compat.tools.plan" in tools())
"""
WITHOUT_JAX = """
import sys, xmap_compat
print(*sorted(name for name in dir(xmap_compat) if not name.startswith("__")))
import xmap_compat.__main__, xmap_compat.tools.check
import xmap_compat.legacy.removed, xmap_compat.legacy.import_hook
print("jax" in sys.modules, "numpy" in sys.modules)
"""


def test_xmap_loads_no_tool_until_it_is_asked_for_a_plan():
    printed, errors = printed_by(LOADED)
    assert printed == ["[]", "True"], errors


def test_what_must_wait_for_the_program_does_not_import_jax():
    printed, errors = printed_by(WITHOUT_JAX)
    names = sorted([*xmap_compat.__all__, *xmap_compat._MODULES])
    assert printed == [" ".join(names), "False False"], errors


def test_private_definitions_are_used():
    """By their own file, or by a decorator that registers them."""
    unused = []
    for module, tree in TREES.items():
        names = {node.id for node in nodes(tree) if isinstance(node, ast.Name)}
        for node in tree.body:
            defines = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and is_private(node.name)
            if defines and not node.decorator_list and node.name not in names:
                unused.append(f"{module}.{node.name}")
    assert unused == []


def test_every_message_is_used():
    """Type checkers find those that are used and do not exist."""
    modules = [name for name in SOURCES if name.endswith("errors")]
    words = re.findall(r"\w+", "\n".join(SOURCES.values()))
    defined = [
        node.name
        for name in modules
        for node in TREES[name].body
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(modules) == 3 and len(defined) > 30
    assert [name for name in defined if words.count(name) < 2] == []


# ---------------------------------------------------------------------------- public names

NAMESPACES = ["xmap_compat", "xmap_compat.lax", "xmap_compat.numpy", "xmap_compat.random"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_lists_what_a_namespace_offers(namespace):
    module = importlib.import_module(namespace)
    offered = set()
    for name in dir(module):
        value = getattr(module, name)
        ours = str(getattr(value, "__module__", "")).startswith("xmap_compat")
        listed_module = isinstance(value, types.ModuleType) and name in module.__all__
        if listed_module or (ours and not name.startswith("_")):
            offered.add(name)
    assert module.__all__ == sorted(offered)


def test_the_lazy_namespace_agrees_with_what_type_checkers_see():
    seen = set(filter(re.compile(r"xmap_compat\.[a-z]").match, imported_modules(TREES["__init__"])))
    homes = [f"{home}.{name}" for name, home in xmap_compat._HOMES.items()]
    assert seen == {f"xmap_compat.{name}" for name in [*homes, *xmap_compat._MODULES]}
    with pytest.raises(AttributeError, match="'xmap_compat' has no attribute 'no'") as caught:
        _ = xmap_compat.no
    # What Python suggests names by.
    assert (caught.value.name, caught.value.obj) == ("no", xmap_compat)


DOCUMENTS = [ROOT / "README.md", ROOT / "migration_guide.md", *(ROOT / "docs").rglob("*.md")]


def code_in(markdown):
    """The code of a document: fenced blocks and spans."""
    block = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`[^`\n]+`", block.sub("", markdown))
    return "\n".join([*block.findall(markdown), *spans])


DOCUMENTED = "\n".join(code_in(path.read_text()) for path in DOCUMENTS)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_is_documented_and_has_an_example(namespace):
    """Which test_docstrings.py runs."""
    module = importlib.import_module(namespace)
    for name in module.__all__:
        assert re.search(rf"\b{name}\b", DOCUMENTED), name
        assert ">>> " in getattr(module, name).__doc__, name


def resolves(namespace, name):
    try:
        exec(f"from {namespace} import {name}", {})
    except ImportError:
        return False
    return True


def unknown_names(code):
    """What a document mentions of this package, and what is not there."""
    mentioned = set()
    for path in re.findall(r"(?<![\w/.-])xmap_compat(?:\.\w+)+", code):
        namespace, _, name = path.rpartition(".")
        mentioned.add((namespace, name))
    for namespace, names in re.findall(r"from (xmap_compat[\w.]*) import ([\w, ]+)", code):
        for name in names.split(","):
            mentioned.add((namespace, name.split(" as ")[0].strip()))
    return sorted(name for namespace, name in mentioned if not resolves(namespace, name))


def test_every_documented_name_exists():
    assert unknown_names(DOCUMENTED) == []
    assert unknown_names("from xmap_compat import xmap, no\nxmap_compat.numpy.sum_of(x)") == [
        "no",
        "sum_of",
    ]


def unknown_in_docstrings(tree):
    """What docstrings refer to, and what is not there: names after a role of Sphinx, and files of a folder."""
    here = {*names_defined_in(tree), *bindings(tree), *OWN_NAMES}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in nodes(tree):
        text = (isinstance(node, documented) and ast.get_docstring(node)) or ""
        for name in re.findall(r":\w+:`~?([\w.]+)`", text):
            package, _, last = name.rpartition(".")
            if not (resolves(package, last) if package else name in here):
                yield name
        for path in re.findall(r"`((?:\w+/)+\w+\.\w+)`", text):
            if not (ROOT / path).exists() and not (PACKAGE / path).exists():
                yield path


def test_what_docstrings_refer_to_is_there():
    assert {name: list(unknown_in_docstrings(tree)) for name, tree in TREES.items()} == (
        {name: [] for name in TREES}
    )
    bad = (
        "def f():\n    '''See :mod:`xmap_compat.no`, :func:`f`, :func:`g_of_f`, ``tests/x.py``.'''"
    )
    assert list(unknown_in_docstrings(ast.parse(bad))) == ["xmap_compat.no", "g_of_f", "tests/x.py"]


# ------------------------------------------------------------------------------- leftovers

WRITTEN = "xmap_compat/**/*.py tests/**/*.py examples/*.* benchmarks/*.py docs/**/*.md docs/*.py *.md *.py *.cfg"


def test_nothing_is_left_to_do():
    marks = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3 + r"\b"]))
    paths = [path for pattern in WRITTEN.split() for path in ROOT.glob(pattern)]
    assert PACKAGE / "_jax" / "version.py" in paths
    assert [path for path in paths if path.is_file() and marks.search(path.read_text())] == []
