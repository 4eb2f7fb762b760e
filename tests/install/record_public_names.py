"""Record which public names and keywords of old JAX are gone from JAX today: ``python record_public_names.py``.

Writes ``gone.json``.  Sources are downloaded with pip and read with ``ast``, never imported: the jaxlibs of the old
releases are not to be had any more.

Public is, in modules of JAX without an underscore or tests: what a module defines, what it imports under the same name
(``a as a``), and, where it defines no functions, what it imports from JAX.  Gone is what a module of today does
not bind at all, and a keyword that a function does not take by name.
"""

import ast
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).parent
OLD = ("0.2.20", "0.3.25", "0.4.14", "0.4.30")
SUPPORTED = ("0.9.2", "0.10.0", "0.10.2", "0.11.0", "0.12.0.1")
TESTS = ("test_util", "tests", "testing", "tools", "test_harnesses", "mock_", "_test")


def download(version, folder):
    """The folder of the package ``jax`` of a release."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--ignore-requires-python",
    ]
    subprocess.run([*command, f"jax=={version}", "-d", folder], check=True)
    (archive,) = pathlib.Path(folder).iterdir()
    (tarfile.open if archive.suffix == ".gz" else zipfile.ZipFile)(archive).extractall(folder)
    return next(
        path
        for path in (pathlib.Path(folder) / "jax", *pathlib.Path(folder).glob("*/jax"))
        if path.is_dir()
    )


class Release:
    """The sources of a release of JAX, by module."""

    def __init__(self, root):
        self.files = {}
        for path in root.rglob("*.py"):
            parts = path.relative_to(root.parent).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._bound = {}
        self.reexported = set()

    def bound(self, module):
        """What a module binds at its top: a definition, or the dotted name that it imports, or None."""
        if module not in self._bound:
            self._bound[module] = found = {}
            if module in self.files:
                path = self.files[module]
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                for node in statements(ast.parse(path.read_text()).body):
                    found.update(bindings(node, package))
                    self.reexported |= {
                        f"{module}.{a.name}"
                        for a in getattr(node, "names", [])
                        if is_reexport(node, a)
                    }
        return self._bound[module]

    def function(self, module, name, depth=8):
        """The definition of a function, through the modules that import it."""
        node = self.bound(module).get(name)
        if isinstance(node, str) and depth:
            home, _, name = node.rpartition(".")
            return self.function(home, name, depth - 1)
        return node

    def public(self, everything=False):
        """``{'jax.lax.psum': the keywords that it takes, or None}``; of everything that is bound, or what is public."""
        names = {}
        for module in filter(is_public, self.files):
            bound = self.bound(module)
            facade = not any(
                isinstance(node, ast.FunctionDef) for name, node in bound.items() if is_public(name)
            )
            for name, node in bound.items():
                of_jax = facade and isinstance(node, str) and node.startswith("jax.")
                public = (
                    of_jax or not isinstance(node, str) or f"{module}.{name}" in self.reexported
                )
                if is_public(name) and (public or everything):
                    names[f"{module}.{name}"] = keywords(self.function(module, name))
            names.setdefault(module, None)
        return names


def is_public(name):
    return not any(
        part.startswith(("_", *TESTS)) or part.endswith("_test") for part in name.split(".")
    )


def statements(body):
    """Those of a module, also below ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from statements(getattr(node, part, []))


def bindings(node, package):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name, node
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        each = [t for target in targets for t in getattr(target, "elts", [target])]
        yield from ((t.id, None) for t in each if isinstance(t, ast.Name))
    elif isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
    elif isinstance(node, ast.ImportFrom):
        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        home = ".".join([*up, *([node.module] if node.module else [])])
        yield from ((alias.asname or alias.name, f"{home}.{alias.name}") for alias in node.names)


def is_reexport(node, alias):
    return isinstance(node, (ast.Import, ast.ImportFrom)) and alias.asname == alias.name


def keywords(node):
    """What a function takes by keyword; None if it takes any, or is not seen to be one."""
    if not isinstance(node, ast.FunctionDef) or node.args.kwarg:
        return None
    return [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if not a.arg.startswith("_")]


def read(version):
    with tempfile.TemporaryDirectory() as folder:
        return Release(download(version, folder)).public(everything=version in SUPPORTED)


def gone(old, new):
    """The names of one release that another lacks, and the keywords of functions that both have."""
    names = sorted(name for name in old if name not in new)
    both = (
        (name, old[name], new[name])
        for name in sorted(old)
        if old[name] and new.get(name) is not None
    )
    return names, sorted(f"{name}({k}=)" for name, had, has in both for k in had if k not in has)


def main():
    new = [read(version) for version in SUPPORTED]
    last = {"names": {}, "keywords": {}}
    counts = {}
    for version in OLD:
        old = read(version)
        counts[version] = len(old), sum(map(len, filter(None, old.values())))
        for names, words in (gone(old, release) for release in new):
            last["names"].update(dict.fromkeys(names, version))
            last["keywords"].update(dict.fromkeys(words, version))
    record = {"supported": SUPPORTED, "names and keywords looked at": counts}
    for kind, found in last.items():
        record[kind] = {v: {} for v in OLD}
        for name in sorted(found):
            home, _, attribute = name.rpartition(".")
            record[kind][found[name]].setdefault(home, []).append(attribute)
        record[kind] = {
            v: {home: " ".join(names) for home, names in r.items()} for v, r in record[kind].items()
        }
    (HERE / "gone.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
