"""The program that a command is given."""

from __future__ import annotations

import argparse


def add_program(parser: argparse.ArgumentParser, words: str) -> None:
    """The program of a command: ``SCRIPT [ARGS...]`` or ``-m MODULE [ARGS...]``, which ends the
    command's options.
    """
    about = "a module, and its arguments"
    parser.add_argument("-m", metavar="MODULE", dest="module", nargs=argparse.REMAINDER, help=about)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=words)


def program_arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of ``runner.run_program``; empty if no program is given."""
    if options.module:
        return ["-m", *options.module]
    if options.module is not None:
        return []
    return options.program[options.program[:1] == ["--"] :]
