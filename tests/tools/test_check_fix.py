"""check --fix gives programs that run under plain Python: the grid of imports and uses, each run."""

import contextlib
import io
import re
import textwrap

import pytest
from test_check import ends_of

from xmap_compat.__main__ import main

USED = "import numpy as np\nprint({}(lambda v: v * 2, ['i'], ['i'])(np.arange(3)).tolist())\n"
UNUSED = "print('unused')\n"
# The import, and how a program calls xmap after it.
IMPORTS = {
    "import a.b": ("import jax.experimental.maps", "jax.experimental.maps.xmap"),
    "import a.b as c": ("import jax.experimental.maps as maps", "maps.xmap"),
    "from a import b": ("from jax.experimental import maps", "maps.xmap"),
    "from a import b as c": ("from jax.experimental import maps as M", "M.xmap"),
    "from a.b import c": ("from jax.experimental.maps import xmap", "xmap"),
    "from a.b import c as d": ("from jax.experimental.maps import xmap as each", "each"),
    "several names": ("from jax.experimental import maps, PartitionSpec as P, pjit", "maps.xmap"),
    "parentheses": (
        "from jax.experimental.maps import (  # of 2021\n    xmap,  # the map\n    Mesh as M,\n"
        "    thread_resources,  # last\n)",
        "xmap",
    ),
    "several modules": ("import os, jax.experimental.maps as maps, sys", "maps.xmap"),
    "semicolons": ("import os; from jax.experimental import maps; import sys", "maps.xmap"),
    "unused ones beside": (
        "from jax.experimental import maps\nfrom jax.experimental import host_callback\n"
        "from jax.experimental import global_device_array as gda",
        "maps.xmap",
    ),
    "what only install gives": (
        "from jax.experimental import maps\nmaps.thread_resources.env",
        "maps.xmap",
    ),
    "try": (
        "try:\n    from jax.experimental.maps import xmap\nexcept ImportError:\n    xmap = None",
        "xmap",
    ),
    "try, a module": (
        "try:\n    from jax.experimental import maps\nexcept ImportError:\n    maps = None",
        "maps.xmap",
    ),
    "type checking": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jax.experimental.maps import ResourceEnv\n"
        "from jax.experimental.maps import xmap\nenv: 'ResourceEnv'",
        "xmap",
    ),
    "docstring and future": (
        '"""A program."""\nfrom __future__ import annotations\nfrom jax.experimental.maps import xmap, Mesh',
        "xmap",
    ),
}


def programs():
    """Each import at the top of a program and in a function, used and not."""
    for name, (imports, xmap) in IMPORTS.items():
        for call in (USED.format(xmap), UNUSED):
            text = f"{imports}\n{call}"
            inside = textwrap.indent(
                text.replace("from __future__ import annotations\n", ""), "    "
            )
            yield f"{name}, {call[:5]}", text
            yield f"{name}, in a function, {call[:5]}", f"def main():\n{inside}main()\n"


GRID = dict(programs())


def fixed_of(programs, folder):
    """What the files of a folder hold after they were rewritten; nothing is left."""
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["check", "--fix", str(folder)]) == 0
    assert re.findall(r".*:\d+:\d+: .*", printed.getvalue()) == []
    return {name: (folder / f"{name}.py").read_text() for name in programs}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    return fixed_of(GRID, tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def ends(grid, tmp_path_factory):
    return ends_of(grid, tmp_path_factory.mktemp("run"), plain=True)


@pytest.mark.parametrize("name", GRID)
def test_a_fixed_program_runs_under_plain_python(ends, name):
    expected = "unused\n" if name.endswith("print") else "[0, 2, 4]\n"
    assert ends[name] == {"lines": [], "printed": expected}


def test_what_is_unused_is_dropped_and_comments_stay(grid):
    assert grid["unused ones beside, print"] == UNUSED
    with_comments = "# of 2021\n# the map\n# last\nfrom xmap_compat import xmap\n"
    assert grid["parentheses, impor"].startswith(with_comments)


# ------------------------------------------------------------------------- edits, letter by letter

PJIT = "import jax\nfrom jax.experimental.pjit import pjit\nfrom jax.sharding import PartitionSpec as P\n"
INSTALL = "import xmap_compat; xmap_compat.install()\n"
DOCSTRING = '"""It has\nimport jax\n"""\n'
SHAPED = "import jax\nfrom jax.core import ShapedArray\n\ndef rule(x):\n    return [\n"
# A program, and what is written.
EDITS = {
    "an alias of jax beside a variable": (
        "import jax as J\nfrom os import sep, path\ndef f(tree):\n    return J.tree_map(abs, tree)",
        "import jax as J\nfrom os import sep, path\ndef f(tree):\n    return J.tree.map(abs, tree)",
    ),
    "a variable of the name that would be imported": (
        "import jax.experimental.maps\nxmap = jax.experimental.maps.xmap",
        "import xmap_compat\nxmap = xmap_compat.xmap",
    ),
    "a name of JAX that other modules have now": (
        "import jax\ndef f(Primitive, core):\n    return jax.core.Primitive, jax.jit",
        "import jax\nimport jax.extend.core\n"
        "def f(Primitive, core):\n    return jax.extend.core.Primitive, jax.jit",
    ),
    "the last use of a module": (
        "import jax.experimental.maps\njax.jit(jax.experimental.maps.xmap)",
        "import jax\nfrom xmap_compat import xmap\njax.jit(xmap)",
    ),
    "another use of a module": (
        "import jax.experimental.maps\n"
        "jax.experimental.maps.xmap, jax.experimental.maps.thread_resources",
        f"{INSTALL}import jax.experimental.maps\nfrom xmap_compat import xmap\n"
        "xmap, jax.experimental.maps.thread_resources",
    ),
    "a module of numpy or JAX": (
        "import jax\ntry:\n    import jax.numpy as np\nexcept ImportError:\n    import numpy as np\n"
        "x = np.product",
        f"{INSTALL}import jax\ntry:\n    import jax.numpy as np\nexcept ImportError:\n"
        "    import numpy as np\nx = np.product",
    ),
    "some of an import": (
        "from jax import tree_map, jit, tree_leaves as leaves\n__all__ = ['tree_map']\nleaves",
        "from jax import jit\nfrom jax.tree import leaves, map as tree_map\n__all__ = ['tree_map']\nleaves",
    ),
    "a mesh class that is compared": (
        f"{DOCSTRING}from jax.experimental import maps\nf = lambda m: isinstance(m, maps.Mesh)",
        f"{DOCSTRING}{INSTALL}from jax.experimental import maps\n"
        "f = lambda m: isinstance(m, maps.Mesh)",
    ),
    "the same names from elsewhere": (
        "from jax.experimental import maps\nfrom jax.sharding import Mesh\nmaps.Mesh, maps.xmap",
        "from jax.sharding import Mesh\nfrom xmap_compat import xmap\nimport xmap_compat\n"
        "xmap_compat.Mesh, xmap",
    ),
    "shardings": (
        f"{PJIT}pjit(f, in_axis_resources=(P('x', None), {{'a': None}}), out_axis_resources=None)",
        f"{PJIT}pjit(f, in_shardings=(P('x', None), {{'a': P()}}), out_shardings=P())",
    ),
    "shardings of a variable": (
        f"{PJIT}lambda s: pjit(f, in_axis_resources=s)",
        f"{INSTALL}{PJIT}lambda s: pjit(f, in_axis_resources=s)",
    ),
    "names of a type": (
        f"{SHAPED}        ShapedArray(x.shape, x.dtype, named_shape=x.named_shape),\n"
        "        ShapedArray((), x.dtype, named_shape=x.aval.named_shape, weak_type=True),\n"
        "        ShapedArray(\n            x.shape,  # of a row\n            x.dtype,\n"
        "            named_shape=dict(x.named_shape),  # as in\n        ),\n"
        "        ShapedArray(x.shape, x.dtype,\n                    named_shape={}),\n"
        "        jax.ShapeDtypeStruct(\n            x.shape,\n            x.dtype,\n"
        "            named_shape=x.named_shape,\n        ),\n    ]\n",
        f"{SHAPED}        ShapedArray(x.shape, x.dtype),\n"
        "        ShapedArray((), x.dtype, weak_type=True),\n"
        "        ShapedArray(\n            x.shape,  # of a row\n            x.dtype,  # as in\n        ),\n"
        "        ShapedArray(x.shape, x.dtype),\n"
        "        jax.ShapeDtypeStruct(\n            x.shape,\n            x.dtype,\n        ),\n    ]\n",
    ),
    "names of a type below a comment": (
        "from jax.core import ShapedArray\nShapedArray(\n    (2,),  # rows\n    named_shape={},\n)",
        f"{INSTALL}from jax.core import ShapedArray\n"
        "ShapedArray(\n    (2,),  # rows\n    named_shape={},\n)",
    ),
    "names of a type that moved": (
        "from jax.abstract_arrays import ShapedArray\nf = lambda x: ShapedArray(x.shape, named_shape={})\n",
        "from jax.core import ShapedArray\nf = lambda x: ShapedArray(x.shape)\n",
    ),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return fixed_of(
        {name: before for name, (before, _) in EDITS.items()}, tmp_path_factory.mktemp("edits")
    )


@pytest.mark.parametrize("name", EDITS)
def test_only_the_names_change(edited, name):
    _, after = EDITS[name]
    assert edited[name] == after


@pytest.mark.usefixtures("asked_in_forks")
def test_an_import_stays_for_the_file_that_takes_it(tmp_path):
    compat, user = "from jax.experimental import maps\n", "from compat import maps\nmaps.xmap\n"
    fixed = fixed_of({"compat": compat, "user": user}, tmp_path)
    assert fixed == {"compat": INSTALL + compat, "user": user}


@pytest.mark.usefixtures("asked_in_forks")
@pytest.mark.parametrize(("taken", "kept"), [("Mesh", "Mesh"), ("*", "Mesh, xmap")])
def test_an_import_stays_for_the_file_that_only_imports_it(tmp_path, taken, kept):
    lib, user = "from jax.experimental.maps import Mesh, xmap\n", f"from lib import {taken}\n"
    fixed = fixed_of({"lib": lib, "user": user}, tmp_path)
    assert fixed == {"lib": f"from xmap_compat import {kept}\n", "user": user}
