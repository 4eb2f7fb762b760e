"""Notebooks as programs: ``python -m xmap_compat notebook.ipynb`` runs the cells in order, in a
kernel of their own.

No file is written.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

MISSING = (
    "Running a notebook needs nbclient and ipykernel, which are not installed here. "
    "Install them with: pip install '.[notebooks]'"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _CannotRun(Exception):
    """A notebook that cannot be read, or whose kernel has died."""


def run_cells(path: str) -> Iterator[tuple[int, Any, list[Any]]]:
    """The index of each cell of code, the cell as it is stored, and the outputs of running it.

    The cells run in a fresh kernel of this Python, with all installed once it has imported JAX.
    """
    try:
        nbclient = importlib.import_module("nbclient")
        nbformat = importlib.import_module("nbformat")
        importlib.import_module("ipykernel")
    except ImportError:
        raise ModuleNotFoundError(MISSING) from None
    try:
        stored = nbformat.read(path, as_version=4)
    except Exception as error:  # of nbformat and jsonschema, of several bases
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _CannotRun(f"{path} cannot be read as a notebook: {reason}") from None
    sockets = tempfile.TemporaryDirectory(prefix="xmap_compat")
    config = importlib.import_module("traitlets.config").Config()
    if os.name == "posix":  # nothing listens to a network
        config.KernelManager.update(transport="ipc", ip=os.path.join(sockets.name, "kernel"))
    client = nbclient.NotebookClient(
        copy.deepcopy(stored),
        timeout=None,
        config=config,
        kernel_name="python3",
        allow_errors=True,
        extra_arguments=[
            "--InteractiveShellApp.extra_extensions=['xmap_compat']",
            "--InlineBackend.rc={}",
        ],
        resources={"metadata": {"path": os.path.dirname(os.path.abspath(path))}},
    )
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    search = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
    with sockets, client.setup_kernel(env={**os.environ, "PYTHONPATH": search}):
        for index, cell in enumerate(stored.cells):
            if cell.cell_type == "code" and cell.source.strip():
                try:
                    client.execute_cell(client.nb.cells[index], index)
                except nbclient.exceptions.DeadKernelError:
                    raise _CannotRun(
                        f"{path}: cell {index + 1}: the kernel has died, and cells after it cannot "
                        "be run"
                    ) from None
                yield index, cell, client.nb.cells[index].outputs


def main(args: Sequence[str]) -> int:
    """Run a notebook and show what its cells print and return; the exit code.

    The first exception that the notebook does not expect ends it.
    """
    path, *more = args
    if more:
        print("usage: python -m xmap_compat NOTEBOOK.ipynb", file=sys.stderr)
        return 2
    if not os.path.exists(path):
        print(f"can't open file {path!r}", file=sys.stderr)
        return 2
    shown = False
    try:
        for index, cell, outputs in run_cells(path):
            shown = True
            for output in outputs:
                _show(output)
            errors = [output for output in outputs if output["output_type"] == "error"]
            expected = "raises-exception" in cell.metadata.get("tags", ()) or _has_error(
                cell.outputs
            )
            if errors and not expected:
                trace = COLOURS.sub("", "\n".join(errors[0]["traceback"]))
                print(f"{path}: cell {index + 1}:\n{trace}", file=sys.stderr)
                return 1
    except (ModuleNotFoundError, _CannotRun) as error:
        print(error, file=sys.stderr)
        return 1 if shown else 2
    return 0


def _show(output: Any) -> None:
    if output["output_type"] == "stream" and output["name"] == "stdout":
        print(output["text"], end="", flush=True)
    elif output["output_type"] in ("execute_result", "display_data"):
        print(output["data"].get("text/plain", ""), flush=True)


def _has_error(outputs: Sequence[Any]) -> bool:
    return any(output["output_type"] == "error" for output in outputs)
