"""``python -m xmap_compat``: run a program as it ran when JAX had xmap, or ask something about one.

Installed, it is also the command `xmap-compat`.  A program runs as it does without `-m
xmap_compat`: with its sys.argv, sys.path, __main__ module, tracebacks and exit code.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from xmap_compat import __version__
from xmap_compat.legacy import import_hook, notebook, runner

# The modules of the subcommands, which have `add_arguments(parser)` and `main(options)`: it returns
# the exit code.
COMMANDS = {
    "check": (
        "xmap_compat.tools.check.command",
        "list what a program uses that JAX removed",
        "--fix train.py",
    ),
    "explain": (
        "xmap_compat.tools.explain",
        "run a program, and print the plans of its xmaps",
        "--brief train.py",
    ),
    "leave": (
        "xmap_compat.tools.leave.command",
        "edit a program into plain JAX, verified by runs",
        "--write train.py",
    ),
}
USAGE = """python -m xmap_compat [run] SCRIPT [ARGS...]      (or -m MODULE, or NOTEBOOK.ipynb)
       python -m xmap_compat {check,explain,leave} [-h] ..."""


def main(args: Sequence[str]) -> int | None:
    args = list(args)
    if args[:1] and args[0] in COMMANDS:
        home, about, example = COMMANDS[args[0]]
        module, name = importlib.import_module(home), f"python -m xmap_compat {args[0]}"
        parser = argparse.ArgumentParser(
            name, description=about, epilog=f"example: {name} {example}"
        )
        parser.set_defaults(error=parser.error)
        module.add_arguments(parser)
        return module.main(parser.parse_args(args[1:]))
    args = args[args[:1] == ["run"] :]
    if not args or args == ["-m"] or (args[0] != "-m" and args[0].startswith("-")):
        commands = "".join(f"{name:10}{about}\n" for name, (_, about, _) in COMMANDS.items())
        example = f"{commands}\nexample: python -m xmap_compat run train.py --steps 2"
        formatter = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(
            usage=USAGE, description=__doc__, epilog=example, formatter_class=formatter
        )
        parser.add_argument("--version", action="version", version=_versions())
        parser.parse_args(
            args[: args != ["-m"]]
        )  # prints the help or the version, or says what is wrong
        parser.error("no program is given")
    if (
        meant := difflib.get_close_matches(args[0], [*COMMANDS, "run"], n=1)
    ) and not os.path.exists(args[0]):
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
    """``xmap-compat``: the same as ``python -m xmap_compat``, which also looks for modules in the
    working directory.
    """
    runner.replace_first_path(os.getcwd())
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
