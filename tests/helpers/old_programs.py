"""The whole old programs and their roles, as the table in ``old_programs/README.md`` lists them."""

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "old_programs"


class OldProgram(NamedTuple):
    """A row of the table.

    Attributes:
      path: the program, or the folder that holds it.
      recorded_with: the JAX whose numbers it must print, if they were recorded.
      patched: how many xmap calls ``leave`` patches, which are all of them; 0 if it is not left.
    """

    path: Path
    recorded_with: str
    patched: int


def read_table():
    programs = {}
    for line in (FOLDER / "README.md").read_text().splitlines():
        if not line.startswith("| `"):
            continue
        _, name, _, jax, patched, _ = (cell.strip(" `") for cell in line.split("|"))
        programs[name] = OldProgram(FOLDER / name, jax, int(patched or 0))
    return programs


PROGRAMS = read_table()
RECORDED = [program.path for program in PROGRAMS.values() if program.recorded_with]
LEFT = [program for program in PROGRAMS.values() if program.patched]
