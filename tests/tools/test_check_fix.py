"""check --fix gives programs that run under plain Python: the grid of imports and uses, each run."""

import pytest
from test_check import ends_of

from xmap_compat.tools.check import editor, findings

USED = "import numpy as np\n{indent}print({xmap}(lambda v: v * 2, ['i'], ['i'])(np.arange(3)).tolist())\n"
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


def programs(used):
    for name, (imports, xmap) in IMPORTS.items():
        yield (
            f"{name}, {used}",
            imports + "\n" + (USED.format(indent="", xmap=xmap) if used else "print('unused')\n"),
        )
        body = "\n".join(f"    {line}" for line in imports.splitlines() if "__future__" not in line)
        call = USED.format(indent="    ", xmap=xmap) if used else "print('unused')\n"
        yield f"{name}, in a function, {used}", f"def main():\n{body}\n    {call}main()\n"


GRID = {**dict(programs(True)), **dict(programs(False))}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The folder of the fixed programs, and what could not be mended."""
    folder = tmp_path_factory.mktemp("grid")
    for number, source in enumerate(GRID.values()):
        (folder / f"p{number}.py").write_text(source)
    fixed = editor.fixed(findings.check([folder]))
    for path, text in fixed.contents.items():
        path.write_bytes(text)
    return folder, fixed


@pytest.fixture(scope="module")
def ends(grid, tmp_path_factory):
    folder, _ = grid
    fixed = {f"p{number}": (folder / f"p{number}.py").read_text() for number in range(len(GRID))}
    return ends_of(fixed, tmp_path_factory.mktemp("run"), plain=True)


def test_each_import_in_the_grid_is_fixed_and_nothing_is_left(grid):
    _, fixed = grid
    assert fixed.left == () and len(fixed.contents) == len(GRID)


@pytest.mark.parametrize("number", range(len(GRID)), ids=GRID)
def test_a_fixed_program_runs_under_plain_python(ends, number):
    expected = "[0, 2, 4]\n" if list(GRID)[number].endswith("True") else "unused\n"
    assert ends[f"p{number}"] == {"lines": [], "printed": expected}


def test_what_is_unused_is_dropped_and_comments_stay(grid):
    folder, _ = grid
    names = list(GRID)
    unused = (folder / f"p{names.index('unused ones beside, False')}.py").read_text()
    assert unused == "print('unused')\n"
    parentheses = (folder / f"p{names.index('parentheses, True')}.py").read_text()
    assert parentheses.startswith("# of 2021\n# the map\n# last\nfrom xmap_compat import xmap\n")


# ------------------------------------------------------------- what calls of xmap and pjit say

XMAP = "from jax.experimental.maps import xmap\n"
PJIT = "from jax.experimental.pjit import pjit\nfrom jax.sharding import PartitionSpec as P\n"
WITH_INSTALL = "import xmap_compat; xmap_compat.install()\n"
SHAPED = (
    "import jax\nfrom jax.core import ShapedArray\n\ndef rule(x):\n    return [\n"
    "        ShapedArray(x.shape, x.dtype, "
)
# A program, what is written, and what the output says.
CALLS = {
    "all declared": (
        f"{XMAP}xmap(f, in_axes=['i'], out_axes=['i'], axis_resources={{'i': 'x'}})",
        "from xmap_compat import xmap\n"
        "xmap(f, in_axes=['i'], out_axes=['i'], axis_resources={'i': 'x'})",
        "",
    ),
    "a name is left out, and nothing reduces over it": (
        f"{XMAP}xmap(lambda v: lax.psum(v, 'j'), ['i', 'j'], {{}}, axis_resources={{'i': 'x'}})",
        f"{WITH_INSTALL}{XMAP}"
        "xmap(lambda v: lax.psum(v, 'j'), ['i', 'j'], {}, axis_resources={'i': 'x'})",
        "line 2: its result may vary over i, which out_axes lack",
    ),
    "a name is left out, and a psum is over it": (
        f"{XMAP}xmap(lambda v: lax.psum(v, 'i'), ['i'], {{}}, axis_resources={{'i': 'x'}})",
        "from xmap_compat import xmap\n"
        "xmap(lambda v: lax.psum(v, 'i'), ['i'], {}, axis_resources={'i': 'x'})",
        "",
    ),
    "the only entry is of no axis": (
        f"{XMAP}xmap(f, in_axes=['i'], out_axes=['i'], axis_resources={{'batch': 'x'}})",
        "from xmap_compat import xmap\nxmap(f, in_axes=['i'], out_axes=['i'], axis_resources={})",
        "",
    ),
    "entries are of no axis": (
        f"{XMAP}xmap(f, ['i'], ['i'], axis_resources={{'a': 'x', 'i': 'y',\n  'b': 'z', 'c': 'x'}})",
        "from xmap_compat import xmap\nxmap(f, ['i'], ['i'], axis_resources={'i': 'y'})",
        "",
    ),
    "an entry of a variable is of no axis": (
        f"{XMAP}on = {{'batch': 'x'}}\nxmap(f, ['i'], ['i'], axis_resources=on)",
        f"{WITH_INSTALL}{XMAP}on = {{'batch': 'x'}}\nxmap(f, ['i'], ['i'], axis_resources=on)",
        "line 3: its axis_resources are no literal, and name batch, which no spec names",
    ),
    "a decorator": (
        f"import functools\n{XMAP}"
        "@functools.partial(xmap, in_axes=['i'], out_axes=['i'], axis_resources={'b': 'x'})\ndef f(v): ...",
        "import functools\nfrom xmap_compat import xmap\n"
        "@functools.partial(xmap, in_axes=['i'], out_axes=['i'], axis_resources={})\ndef f(v): ...",
        "",
    ),
    "shardings": (
        f"{PJIT}pjit(f, in_axis_resources=(P('x', None), None), out_axis_resources=None)",
        f"{PJIT}pjit(f, in_shardings=(P('x', None), P()), out_shardings=P())",
        "",
    ),
    "names of a type": (
        f"{SHAPED}named_shape=x.named_shape),\n"
        "        ShapedArray((), x.dtype, named_shape=x.aval.named_shape, weak_type=True),\n"
        "        ShapedArray(\n            x.shape,  # of a row\n            x.dtype,\n"
        "            named_shape=dict(x.named_shape),  # as in\n        ),\n"
        "        ShapedArray(x.shape, x.dtype,\n                    named_shape={}),\n"
        "        jax.ShapeDtypeStruct(\n            x.shape,\n            x.dtype,\n"
        "            named_shape=x.named_shape,\n        ),\n    ]\n",
        f"{SHAPED[:-2]}),\n"
        "        ShapedArray((), x.dtype, weak_type=True),\n"
        "        ShapedArray(\n            x.shape,  # of a row\n            x.dtype,\n"
        "            # as in\n        ),\n"
        "        ShapedArray(x.shape, x.dtype),\n"
        "        jax.ShapeDtypeStruct(\n            x.shape,\n            x.dtype,\n        ),\n    ]\n",
        "",
    ),
    "names of a type that moved": (
        "from jax.abstract_arrays import ShapedArray\nf = lambda x: ShapedArray(x.shape, x.dtype, named_shape={})\n",
        "from jax.core import ShapedArray\nf = lambda x: ShapedArray(x.shape, x.dtype)\n",
        "",
    ),
    "shardings of a variable": (
        f"{PJIT}lambda s: pjit(f, in_axis_resources=s)",
        f"{WITH_INSTALL}{PJIT}lambda s: pjit(f, in_axis_resources=s)",
        "",
    ),
}


@pytest.fixture(scope="module")
def of_calls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    for number, (source, _, _) in enumerate(CALLS.values()):
        (folder / f"call{number}.py").write_text(source)
    return folder, editor.fixed(findings.check([folder]))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=CALLS)
def test_what_a_call_says_decides_its_import(of_calls, number):
    folder, fixed = of_calls
    _, expected, note = list(CALLS.values())[number]
    path = folder / f"call{number}.py"
    assert fixed.contents[path].decode() == expected and fixed.left == ()
    notes = [line for line in fixed.notes if line.startswith(str(path))]
    assert len(notes) == bool(note)
    assert all("jax.experimental.maps.xmap: last in jax 0.4.30; needs" in n for n in notes)
    assert all(line.endswith(note) for line in notes)


def test_without_install_the_reason_takes_the_place_of_another_name(of_calls):
    folder, _ = of_calls
    left = editor.fixed(findings.check([folder]), install=False).left
    reasons = [finding.gone.remedy for finding in left if finding.gone.name.endswith(".xmap")]
    assert len(reasons) == 2 and all("needs xmap_compat.install(): " in why for why in reasons)
