"""``python -m xmap_compat``: run a program as it ran when JAX had xmap, or ask something about one.

Installed, it is also the command `xmap-compat`.  A program runs as it does without `-m xmap_compat`:
with its sys.argv, sys.path, __main__ module, tracebacks and exit code.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from xmap_compat import __version__
from xmap_compat.legacy import import_hook, notebook, runner


class Command(NamedTuple):
    """A subcommand: a module with ``add_arguments(parser)`` and ``main(options)``, which returns the exit code."""

    module: str
    about: str
    example: str


COMMANDS = {
    "check": Command(
        "xmap_compat.tools.check.report",
        "list what a program uses that JAX removed, and rewrite what is safe",
        "python -m xmap_compat check --fix train.py",
    ),
    "explain": Command(
        "xmap_compat.tools.explain",
        "run a program, list its calls of xmapped functions, and print their plans",
        "python -m xmap_compat explain --brief train.py",
    ),
    "leave": Command(
        "xmap_compat.tools.leave.command",
        "edit a program into plain JAX, and verify the edits by running it",
        "python -m xmap_compat leave --write train.py",
    ),
}
RUN = "run a script, a module or a notebook under xmap_compat.install(); the word `run` may be left out"
USAGE = """python -m xmap_compat [run] SCRIPT [ARGS...]      (or -m MODULE, or NOTEBOOK.ipynb [--compare])
       python -m xmap_compat {check,explain,leave} [-h] ..."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m xmap_compat", USAGE, __doc__.partition("\n\n")[2])
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(title="commands")
    commands.add_parser("run", help=RUN)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about)
    return parser


def main(args: Sequence[str]) -> int | None:
    args = list(args)
    if args[:1] and args[0] in COMMANDS:
        name, command = args[0], COMMANDS[args[0]]
        if not hasattr(importlib.import_module(command.module), "add_arguments"):
            return importlib.import_module(command.module).main(args[1:])
        parser = argparse.ArgumentParser(
            f"python -m xmap_compat {name}", description=command.about, epilog=f"example: {command.example}"
        )
        module = importlib.import_module(command.module)
        module.add_arguments(parser)
        parser.set_defaults(error=parser.error)
        return module.main(parser.parse_args(args[1:]))
    if args[:1] == ["run"]:
        args = args[1:]
        if args[:1] in (["-h"], ["--help"]):
            print(f"usage: {USAGE}\n\n{RUN}\n\nexample: python -m xmap_compat run train.py --steps 2")
            return 0
    if not args or args == ["-m"] or (args[0] != "-m" and args[0].startswith("-")):
        _parser().parse_args(args[:1] or ["--no-program"])  # prints the help or the version, or says what is wrong
        _parser().error("no program is given")
    if (meant := difflib.get_close_matches(args[0], [*COMMANDS, "run"], n=1)) and not os.path.exists(args[0]):
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
