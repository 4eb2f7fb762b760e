"""Run a program as it ran when JAX had xmap, or ask something about one.

usage:
  python -m xmap_compat SCRIPT [ARGS...]      run a script under xmap_compat.install()
  python -m xmap_compat -m MODULE [ARGS...]   run a module under xmap_compat.install()
  python -m xmap_compat NOTEBOOK.ipynb [--compare]
                                              run the cells of a notebook in order, and write nothing;
                                              or compare what they show with what it stores
  python -m xmap_compat check [--fix] PATH... list what a program uses that JAX removed; rewrite what is safe
  python -m xmap_compat explain [--brief] SCRIPT [ARGS...]      (or -m MODULE)
                                              run a program, list its calls of xmapped functions and
                                              print their plans
  python -m xmap_compat leave [--write] [--diff FILE] SCRIPT [ARGS...]         (or -m MODULE, or a notebook)
                                              run a program twice in a copy, and edit it into plain JAX
  python -m xmap_compat --version             the versions of xmap_compat, JAX and Python

Installed, it is also the command `xmap-compat`.  A program runs as it does without `-m xmap_compat`:
with its sys.argv, sys.path, __main__ module, tracebacks and exit code.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from xmap_compat import __version__
from xmap_compat.legacy import import_hook, notebook, runner

# The subcommands: module and function, called with the arguments that follow; it returns the exit code.
COMMANDS = {
    "check": ("xmap_compat.tools.check.command", "run"),
    "explain": ("xmap_compat.tools.explain", "main"),
    "leave": ("xmap_compat.tools.leave.command", "main"),
}


def main(args: Sequence[str]) -> int | None:
    if args and args[0] in COMMANDS:
        module, function = COMMANDS[args[0]]
        return getattr(importlib.import_module(module), function)(args[1:])
    if args and args[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if args and args[0] == "--version":
        print(_versions())
        return 0
    unknown = bool(args) and args[0] != "-m" and args[0].startswith("-")
    if not args or unknown or list(args) == ["-m"]:
        print(*([f"unknown option: {args[0]}"] if unknown else []), __doc__, sep="\n", file=sys.stderr)
        return 2
    if (meant := difflib.get_close_matches(args[0], COMMANDS, n=1)) and not os.path.exists(args[0]):
        print(f"{args[0]} is taken for a program; the command is {meant[0]}", file=sys.stderr)
    if args[0].endswith(".ipynb"):
        return notebook.main(args)
    import_hook.install_with_jax()
    runner.run_program(args)
    return None


def _versions() -> str:
    # The installed versions, for a report: JAX is not imported, and nothing depends on the answer.
    jax = importlib.import_module("importlib.metadata").distribution("jax")
    return f"xmap_compat {__version__}, jax {jax.version}, Python {sys.version.split()[0]}"


def command() -> int | None:
    """``xmap-compat``: the same as ``python -m xmap_compat``, which also looks for modules in the working directory."""
    runner.replace_first_path(os.getcwd())
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
