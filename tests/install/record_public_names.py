"""Record which public names of old JAX are gone from JAX today: ``python record_public_names.py``.

Writes ``gone.json``.  Sources are downloaded with pip and read with ``ast``, never imported: the jaxlibs of the old
releases are not to be had any more.

Public is, in modules of JAX without an underscore or tests: what a module defines, what it imports under the same name
(``a as a``), and, where it defines no functions, what it imports from JAX.  Gone is what a module of today does
not bind at all.
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

    def public(self, everything=False):
        """The names that are public, such as 'jax.lax.psum'; or everything that is bound."""
        names = set()
        for module in filter(is_public, self.files):
            names.add(module)
            bound = self.bound(module)
            is_facade = not any(
                isinstance(node, ast.FunctionDef) for name, node in bound.items() if is_public(name)
            )
            for name, node in bound.items():
                of_jax = is_facade and isinstance(node, str) and node.startswith("jax.")
                is_exported = (
                    of_jax or not isinstance(node, str) or f"{module}.{name}" in self.reexported
                )
                if is_public(name) and (is_exported or everything):
                    names.add(f"{module}.{name}")
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


def read(version):
    with tempfile.TemporaryDirectory() as folder:
        return Release(download(version, folder)).public(everything=version in SUPPORTED)


def main():
    today = set.intersection(*map(read, SUPPORTED))
    last_had = {}
    counts = {}
    for version in OLD:
        names = read(version)
        counts[version] = len(names)
        last_had.update(dict.fromkeys(names - today, version))
    homes = {version: {} for version in OLD}
    for name in sorted(last_had):
        home, _, attribute = name.rpartition(".")
        homes[last_had[name]].setdefault(home, []).append(attribute)
    gone = {}
    for version, names in homes.items():
        gone[version] = {home: " ".join(attributes) for home, attributes in names.items()}
    record = {"supported": SUPPORTED, "names looked at": counts, "names": gone}
    (HERE / "gone.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
