"""Try public programs again: ``python -m benchmarks.public_programs FOLDER [--write]``.

FOLDER holds checkouts, each called ``owner+name``. None of their code is in this repository, and
nothing here fetches or builds it. A program runs under ``python -m xmap_compat`` by its recipe in
``public_recipes.py``. With ``--old PYTHON`` (of an environment with jax 0.4.30), the recipe also
runs under JAX's own xmap. With ``--leave``, the program also goes through ``leave``. ``--write``
records the outcomes in ``public_programs.json``, and the table of ``docs/programs.md`` with them;
otherwise outcomes are compared with the recorded ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).parent
RECIPES = HERE / "public_recipes.py"
RECORDED = HERE / "public_programs.json"
PAGE = HERE.parent / "docs" / "programs.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
SECONDS = 180
TOLERANCE = 0.03  # bfloat16 has 8 bits, and an older XLA compiled legacy's code


@dataclasses.dataclass(frozen=True)
class Program:
    """A repository, what it is, and the recipe that runs it.

    Attributes:
      about: what the program is, for the page.
      recipe: the function of ``public_recipes.py``.
      files: what the program consists of; checkouts in which these are the same are tried once.
      replaced: what the recipe replaces besides data.
      oracle: what the numbers are compared with where jax 0.4.30 does not run the recipe.
    """

    about: str
    recipe: str = "mesh_transformer"
    files: str = "mesh_transformer"
    replaced: str = ""
    oracle: str = ""


PROGRAMS = {
    "kingoflolz/mesh-transformer-jax": Program("GPT-J: training, evaluation, generation"),
    "sholtodouglas/scalingExperiments": Program(
        "minGPT, sharded: training",
        "min_transformer",
        "minTransformerSharded",
        oracle="no placement",
    ),
    "KoboldAI/KoboldAI-Client": Program(
        "the story writer's sampler",
        "kobold",
        "tpu_mtj_backend.py",
        "needs the VE-FORBRYDERNE fork",
    ),
    "zphang/minimal-gpt-neox-20b": Program(
        "GPT-NeoX: generation",
        "gpt_neox",
        "minimal20b_flax",
        "one flax layer, whose `__init__` flax now refuses",
        "no placement",
    ),
    "fattorib/ZeRO-transformer": Program(
        "GPT: data-parallel steps of ZeRO", "zero_transformer", "src"
    ),
    "hpc4cmb/toast": Program(
        "telescopes: polynomial filter",
        "toast",
        "src/toast/ops/polyfilter",
        "one file, without the compiled package",
        "its NumPy kernel",
    ),
    "NVIDIA/TransformerEngine": Program(
        "what placed each operator, around a product",
        "transformer_engine",
        "transformer_engine/jax/sharding.py",
        "one file, without the compiled package",
        "NumPy",
    ),
    "VE-FORBRYDERNE/mesh-transformer-jax": Program("KoboldAI's fork"),
    "EC3-Gang/mesh-transformer-jax": Program("fork, 2023"),
    "mosmos6/Large-MTJ": Program("fork of KoboldAI's"),
    "jroakes/mesh-transformer-jax": Program("fork with a repetition penalty"),
    "AstraliteHeart/mesh-transformer-jax": Program("fork with merged projections"),
    "albertqjiang/thor_paper_anon": Program("Thor, a prover"),
    "bobbyjaros/mesh-transformer-jax": Program("fork with masked backgrounds (losses 0 here)"),
    "webaverse/mesh-transformer-jax": Program("fork, July 2021"),
    "finetuneanon/mesh-transformer-jax": Program("fork, June 2021"),
    "sahil280114/gptj-retraining-service": Program("a service that trains GPT-J"),
    "leogao2/mesh-transformer-jax": Program("fork, May 2021"),
    "albertqjiang/mesh-transformer-jax": Program("fork with dropout"),
    "mosmos6/mesh-transformer-jax8": Program("fork, 2023"),
    "vyomkeshj/mesh-transformer": Program("fork with other `out_axes`"),
    "ghomasHudson/mesh-transformer-jax": Program("fork for long documents"),
    "NovelAI/mesh-transformer-jax": Program("fork that loads for fine-tuning"),
    "okbuddyhololive/mesh-transformer-jax": Program("fork with another generation loop"),
    "M-Konar/mesh-transformer-jax": Program("fork, 2022"),
    "ezelikman/STaR": Program("STaR: bootstrapped reasoning"),
    "mosmos6/mesh-transformer-jax": Program("fork, 2023"),
    "harubaru/mesh-transformer-jax": Program("fork with a repetition penalty"),
    "celsopitta/mesh-transformer-jax": Program("fork with other `out_axes`"),
    "raogsm7/mesh-transformer-jax": Program("fork with remat"),
    "nostalgebraist/mesh-transformer-jax": Program("fork with another top-k"),
    "shahbuland/mesh-transformer-jax": Program("CARP: encodes text"),
    "Lisennlp/mesh_easy_jax": Program("fork for easier training"),
}


def main() -> int:
    options = parse()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    differing = []
    for name in PROGRAMS:
        folder = options.folder / name.replace("/", "+")
        if options.only not in name or not folder.exists():
            continue
        if options.missing and name in recorded:
            continue
        old = recorded.get(name, {})
        outcome = {"leave": old.get("leave")} | tried(name, folder, options, recorded)
        if not same(old, outcome):
            differing.append(name)
        print(json.dumps({name: outcome}), flush=True)
        recorded[name] = outcome
        if options.write:
            write(recorded)
    if not options.write:
        print(f"other than recorded: {', '.join(differing) or 'none'}")
    return 1 if differing and not options.write else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="checkouts, each called owner+name")
    parser.add_argument(
        "--write", action="store_true", help="record outcomes, and the page's table"
    )
    parser.add_argument("--only", metavar="NAME", default="", help="names that contain NAME")
    parser.add_argument("--missing", action="store_true", help="programs without an outcome")
    parser.add_argument("--old", metavar="PYTHON", help="run recipes there too, under jax 0.4.30")
    parser.add_argument("--leave", action="store_true", help="also leave xmap, which takes minutes")
    return parser.parse_args()


def tried(name: str, folder: pathlib.Path, options: Any, recorded: Any) -> dict[str, Any]:
    program = PROGRAMS[name]
    outcome = {
        "commit": git(folder, "rev-parse", "HEAD")[:7],
        "same": same_files(name, options.folder),
        "check": count_of_findings(folder),
    }
    outcome |= numbers_or_error([sys.executable, "-m", "xmap_compat"], folder, program.recipe)
    legacy = legacy_of_the_same(outcome, recorded)
    if options.old and not legacy:
        legacy = numbers_or_error([options.old], folder, program.recipe)
    outcome["legacy"] = legacy or recorded.get(name, {}).get("legacy", {})
    outcome["difference"] = difference(outcome.get("numbers", {}), outcome["legacy"].get("numbers"))
    if options.leave:
        outcome["leave"] = left(folder, program.recipe)
    return outcome


def legacy_of_the_same(outcome: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """What jax 0.4.30 found for a program whose numbers are these, to the last digit."""
    for other in recorded.values():
        if "numbers" in outcome and other.get("numbers") == outcome["numbers"]:
            return other["legacy"]
    return {}


def git(folder: pathlib.Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    return done.stdout.strip()


def same_files(name: str, folder: pathlib.Path) -> list[str]:
    """Other checkouts whose files of the program are the same, to the last byte."""
    own = folder / name.replace("/", "+")
    files = PROGRAMS[name].files
    wanted = python_files(own, files)
    others = []
    for other in sorted(folder.glob("*+*")):
        is_another = other.name.replace("+", "/", 1) not in PROGRAMS
        if is_another and python_files(other, files) == wanted:
            others.append(other.name.replace("+", "/", 1))
    return others


def python_files(checkout: pathlib.Path, files: str) -> str:
    chosen = [files]
    if files == "mesh_transformer":
        names = ("layers", "transformer_shard", "util", "sampling")
        chosen = [f"{files}/{name}.py" for name in names]
    return git(checkout, "ls-tree", "-r", "HEAD", "--", *chosen)


def environment() -> dict[str, str]:
    flags = "--xla_force_host_platform_device_count=8"
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    own = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_THREEFRY_PARTITIONABLE": "0"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def count_of_findings(folder: pathlib.Path) -> int | None:
    words = [sys.executable, "-m", "xmap_compat", "check", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    found = re.search(r"^(\d+) uses? of removed names?", done.stdout, re.MULTILINE)
    return int(found[1]) if found else None


def numbers_or_error(start: list[str], folder: pathlib.Path, recipe: str) -> dict[str, Any]:
    words = [*start, str(RECIPES), recipe]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=folder, env=environment(), timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"still running after {SECONDS} s"}
    if found := re.search(r"^OUTCOME (.*)$", done.stdout, re.MULTILINE):
        return {"numbers": json.loads(found[1])}
    errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+: ", line)]
    return {"error": errors[-1][:200] if errors else f"exit code {done.returncode}"}


def difference(numbers: dict[str, Any], legacy: dict[str, Any] | None) -> float | None:
    """The largest difference from legacy's numbers or the oracle's, relative to the largest."""
    pairs = []
    if "oracle" in numbers:
        placed = [value for key, value in numbers.items() if key != "oracle"]
        pairs = [(value, numbers["oracle"]) for value in placed]
    elif legacy:
        pairs = [(numbers[key], legacy[key]) for key in legacy if key in numbers]
    if not pairs:
        return None
    return round(max(relative(found, wanted) for found, wanted in pairs), 5)


def relative(found: Any, wanted: Any) -> float:
    if isinstance(wanted, str) or isinstance(found, str):
        return 0.0 if found == wanted else 1.0
    if len(found) != len(wanted):
        return 1.0
    scale = max([abs(value) for value in wanted] + [1e-9])
    return max(abs(one - other) / scale for one, other in zip(found, wanted))


def left(folder: pathlib.Path, recipe: str) -> list[int] | str:
    """How many of the program's constructions `leave` verifies, of how many, in a copy."""
    with tempfile.TemporaryDirectory() as copies:
        copy = pathlib.Path(copies) / "program"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git"))
        shutil.copy(RECIPES, copy)
        words = [sys.executable, "-m", "xmap_compat", "leave", RECIPES.name, recipe]
        done = subprocess.run(words, capture_output=True, text=True, cwd=copy, env=environment())
    own = rf"^\d+ +(?! |{RECIPES.name}).+:\d+ .*?(not verified|verified)"
    verdicts = re.findall(own, done.stdout, re.MULTILINE)
    if not verdicts:
        return f"exit code {done.returncode}"
    return [verdicts.count("verified"), len(verdicts)]


def same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    ran = ("error" in old) == ("error" in new)
    close = difference(new.get("numbers", {}), old.get("numbers"))
    return ran and (close or 0) <= TOLERANCE and old.get("check") == new.get("check")


def write(recorded: dict[str, Any]) -> None:
    ordered = {name: recorded[name] for name in PROGRAMS if name in recorded}
    RECORDED.write_text(json.dumps(ordered, indent=1) + "\n")
    if PAGE.exists():
        PAGE.write_text(with_table(PAGE.read_text(), ordered))


def with_table(page: str, recorded: dict[str, Any]) -> str:
    lines = ["", *rows(recorded), "", *same_elsewhere(recorded), ""]
    table = "".join(line + "\n" for line in lines)
    return TABLE.sub(lambda _: table, page)


def rows(recorded: dict[str, Any]) -> list[str]:
    head = "| repository, commit | what it is | how it runs | numbers | `check` | `leave` |"
    lines = [head, "|---|---|---|---|---|---|"]
    return lines + [row(name, PROGRAMS[name], outcome) for name, outcome in recorded.items()]


def same_elsewhere(recorded: dict[str, Any]) -> list[str]:
    """The repositories that were not tried, because their files are those of another."""
    lines = []
    for name, outcome in recorded.items():
        if outcome["same"]:
            lines.append(f"- The same files as {name}: {', '.join(outcome['same'])}.")
    return lines


def row(name: str, program: Program, outcome: dict[str, Any]) -> str:
    cells = [
        f"[{name}](https://github.com/{name}) {outcome['commit']}",
        program.about,
        how_it_runs(program, outcome),
        compared(program, outcome),
        str(outcome["check"]),
        what_left(outcome.get("leave")),
    ]
    return f"| {' | '.join(cells)} |"


def how_it_runs(program: Program, outcome: dict[str, Any]) -> str:
    if "error" in outcome:
        return f"stops: `{outcome['error']}`"
    if program.replaced:
        return program.replaced
    return "as it is"


def compared(program: Program, outcome: dict[str, Any]) -> str:
    gap = outcome.get("difference")
    if gap is None:
        return "–"
    size = "equal" if gap == 0 else f"within {gap:.5f}".rstrip("0")
    return f"{size}: {program.oracle or 'jax 0.4.30'}"


def what_left(leave: Any) -> str:
    if isinstance(leave, list):
        return f"{leave[0]} of {leave[1]}"
    return leave or "–"


if __name__ == "__main__":
    raise SystemExit(main())
