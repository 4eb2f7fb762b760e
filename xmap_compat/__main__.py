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
from typing import NoReturn

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
        "train.py",
    ),
    "leave": (
        "xmap_compat.tools.leave.two_runs",
        "edit a program into plain JAX, verified by runs",
        "--write train.py",
    ),
}
USAGE = """python -m xmap_compat [run] SCRIPT [ARGS...]      (or -m MODULE, or NOTEBOOK.ipynb)
       python -m xmap_compat [run] --old-random SCRIPT [ARGS...]
       python -m xmap_compat {check,explain,leave} [-h] ..."""
OLD_RANDOM = "--old-random"


def main(args: Sequence[str]) -> int | None:
    args = list(args)
    if args and args[0] in COMMANDS:
        return _command(args[0], args[1:])
    if args and args[0] == "run":
        del args[0]
    if args and args[0] == OLD_RANDOM:
        runner.use_old_random()
        del args[0]
    if not args or args == ["-m"] or (args[0] != "-m" and args[0].startswith("-")):
        _usage(args)
    meant = difflib.get_close_matches(args[0], [*COMMANDS, "run"], n=1)
    if meant and not os.path.exists(args[0]):
        print(f"{args[0]} is taken for a program; the command is {meant[0]}", file=sys.stderr)
    if args[0].endswith(".ipynb"):
        return notebook.main(args)
    import_hook.install_with_jax()
    runner.run_program(args)
    return None


def _command(command: str, args: Sequence[str]) -> int:
    """Run a subcommand."""
    home, about, example = COMMANDS[command]
    module = importlib.import_module(home)
    name = f"python -m xmap_compat {command}"
    parser = argparse.ArgumentParser(name, description=about, epilog=f"example: {name} {example}")
    parser.set_defaults(error=parser.error)
    module.add_arguments(parser)
    options = parser.parse_args(args)
    try:
        code = module.main(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _usage(args: Sequence[str]) -> NoReturn:
    """Print the help or the version, or say what is wrong."""
    commands = "".join(f"{name:10}{about}\n" for name, (_, about, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description=__doc__,
        epilog=f"{commands}\nexample: python -m xmap_compat run train.py --steps 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    about_random = "draw the random numbers of jax 0.4 (jax_threefry_partitionable off)"
    parser.add_argument(OLD_RANDOM, action="store_true", help=about_random)
    parser.parse_args([arg for arg in args if arg != "-m"])
    parser.error("no program is given")


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
