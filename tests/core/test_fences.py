"""Lines that the package draws for itself: what may import what, where JAX's insides are touched, what is documented.

Sources are read with ``ast``.  A fence is a function from a source to what it finds, and is shown a bad source too.
"""

import ast
import collections
import configparser
import functools
import importlib
import os
import re
import subprocess
import sys
import types
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
    return imports_of(nodes(tree))


def imports_of(nodes):
    """The dotted names that nodes import, also by ``importlib.import_module('...')``."""
    for node in nodes:
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
        if isinstance(node, ast.Call) and node.args:
            function = dotted(node.func, names)
            asks = function == "hasattr" or (function == "getattr" and len(node.args) == 3)
            asked_of = dotted(node.args[0], names)
            if asks and is_of_jax(asked_of):
                yield asked_of


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


def test_every_version_branch_is_newer_than_the_floor():
    sources = re.sub("#.*", "", "\n".join(FENCE.values()))
    compared = re.findall(r"VERSION ([<>]=?|[=!]=) (\(.*?\)|\w+)", sources)
    assert {how for how, _ in compared} == {">=", "<"}
    for _, release in compared:
        assert release == "FLOOR" or ast.literal_eval(release) > _jax.FLOOR


def test_the_floor_is_the_one_that_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    floor = ".".join(map(str, _jax.FLOOR))
    requirements = setup["options"]["install_requires"].split()
    assert {f"jax>={floor}", f"jaxlib>={floor}"} <= set(requirements)


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


# What JAX of that age lacked, and how the package is imported.
OLD = {
    "0.8.3": ("", "from xmap_compat import xmap"),
    "0.4.30": ("jax.extend", "xmap_compat.install()"),
}


@pytest.mark.parametrize("version", OLD)
def test_a_jax_that_is_too_old_is_refused_clearly(version):
    missing, statement = OLD[version]
    pretend = f"import sys, jax; jax.__version__ = {version!r}; sys.modules[{missing!r}] = None"
    printed, error = printed_by(f"{pretend}\nimport xmap_compat; {statement}")
    assert printed == []
    assert error.splitlines()[-1] == (
        f"ImportError: xmap_compat needs jax >= 0.9.0, but found jax {version}. "
        "Upgrade it with: pip install -U 'jax>=0.9.0'"
    )


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
    assert f"jax=={version.NEWEST_TESTED}" in pins


# ------------------------------------------------------------------------------ the folders


def runs(node, functions):
    """The nodes below one that run: not those under ``if TYPE_CHECKING:``, nor perhaps those in functions."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        is_left_out = isinstance(child, ast.FunctionDef) and not functions
        if not is_for_types and not is_left_out:
            yield child
            yield from runs(child, functions)


def own_imports(source, sources, functions):
    """Which modules of the package a file imports; ``__init__`` stands for the package itself."""
    for name in imports_of(runs(ast.parse(source), functions)):
        package, _, rest = name.partition(".")
        while rest and rest not in sources:
            rest = rest.rpartition(".")[0]
        if package == "xmap_compat":
            yield rest or "__init__"


FACE = "api xmapped vocabulary lax numpy random braces einsum_spec testing processes __main__"
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


def test_every_message_is_used():
    """Type checkers find those that are used and do not exist."""
    words = re.findall(r"\w+", "\n".join(SOURCES.values()))
    for name, tree in TREES.items():
        for node in tree.body:
            is_message = isinstance(node, ast.FunctionDef) and name.endswith("errors")
            assert not is_message or words.count(node.name) > 1, f"{name}.{node.name}"


# Of sizes these are bounded: what a reader holds at once.
MOST_LINES = {"function": 50, "file": 600}


def test_functions_and_files_are_short():
    too_long = []
    for name, tree in TREES.items():
        if len(SOURCES[name].splitlines()) > MOST_LINES["file"]:
            too_long.append(name)
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef) and lines_of(node) > MOST_LINES["function"]:
                too_long.append(f"{name}.{node.name}")
    assert too_long == []


def lines_of(function):
    """How many lines a function has, without its docstring."""
    first = function.lineno
    if ast.get_docstring(function):
        first = function.body[0].end_lineno
    return function.end_lineno - first + 1


def repeated_file_names(paths):
    """File names that occur more than once: one name should mean one subject."""
    count = collections.Counter(path.name for path in paths)
    return sorted(name for name, times in count.items() if times > 1 and name != "__init__.py")


def test_a_file_name_occurs_once():
    assert repeated_file_names(PACKAGE.rglob("*.py")) == []


def test_the_fence_around_file_names_holds():
    files = ["core/mesh.py", "_jax/mesh.py", "core/__init__.py", "_jax/__init__.py", "api.py"]
    assert repeated_file_names(map(Path, files)) == ["mesh.py"]


# ---------------------------------------------------------------------------- public names

NAMESPACES = ["xmap_compat", "xmap_compat.lax", "xmap_compat.numpy", "xmap_compat.random"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_all_lists_what_a_namespace_offers(namespace):
    module = importlib.import_module(namespace)
    offered = set()
    for name in dir(module):
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            is_ours = name in module.__all__
        else:
            is_ours = str(getattr(value, "__module__", "")).startswith("xmap_compat")
        if is_ours and not name.startswith("_"):
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


def resolves(path):
    namespace, _, name = path.rpartition(".")
    try:
        exec(f"from {namespace} import {name}", {})
    except ImportError:
        return False
    return True


def test_every_documented_name_exists():
    mentioned = set(re.findall(r"(?<![\w/.-])xmap_compat(?:\.\w+)+", DOCUMENTED))
    for namespace, names in re.findall(r"from (xmap_compat[\w.]*) import ([\w, ]+)", DOCUMENTED):
        for name in names.split(","):
            mentioned.add(f"{namespace}.{name.split(' as ')[0].strip()}")
    assert len(mentioned) > 20
    assert [path for path in sorted(mentioned) if not resolves(path)] == []


# -------------------------------------------------------------------- what tests may import

TESTS = {path.relative_to(ROOT / "tests"): path for path in (ROOT / "tests").rglob("*.py")}
# Tests of what no public call shows, and two helpers.  All other tests ask by public calls.
IMPORT_INTERNALS = """
core/test_comparison.py core/test_fences.py core/test_nice_parts.py core/test_private_names.py
helpers/forks.py helpers/process_faults.py install/test_removed_names.py tools/test_check.py
tools/test_explain.py tools/test_leave.py tools/test_leave_edits.py tools/test_mapped.py
"""


def internal_imports(source):
    """What a test imports of the package, other than its public names, modules and command."""
    public = {"__main__", "__version__", *xmap_compat.__all__, *xmap_compat._MODULES}
    for name in imported_modules(ast.parse(source)):
        package, _, rest = name.partition(".")
        if package == "xmap_compat" and rest and rest.split(".")[0] not in public:
            yield name


def test_most_tests_ask_by_public_calls():
    found = [str(name) for name, path in TESTS.items() if [*internal_imports(path.read_text())]]
    assert sorted(found) == IMPORT_INTERNALS.split()
    assert len(found) <= 12


INTERNAL = """
from xmap_compat import _jax
from xmap_compat.core import watch
def f(): import xmap_compat.legacy.maps as maps
import importlib; importlib.import_module('xmap_compat.tools.check.facts')
"""
PUBLIC = "import xmap_compat.testing\nfrom xmap_compat import lax, xmap\nfrom xmap_compat.random import NamedShape"


def test_the_fence_around_tests_holds():
    assert [line for line in INTERNAL.strip().splitlines() if not [*internal_imports(line)]] == []
    assert [*internal_imports(PUBLIC)] == []


# ------------------------------------------------------------------------------- leftovers

WRITTEN = "xmap_compat/**/*.py tests/**/*.py examples/*.* benchmarks/*.py docs/**/*.md docs/*.py *.md *.py *.cfg"


def test_nothing_is_left_to_do():
    marks = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3 + r"\b"]))
    paths = [path for pattern in WRITTEN.split() for path in ROOT.glob(pattern)]
    assert PACKAGE / "_jax" / "version.py" in paths
    assert [path for path in paths if path.is_file() and marks.search(path.read_text())] == []
