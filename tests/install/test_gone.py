"""What JAX had and has no more (``record_public_names.py``) is restored, or there is a reason why not."""

import json
from pathlib import Path

import pytest

from xmap_compat.legacy import removed
from xmap_compat.legacy.not_restored import REASONS, why_not_restored
from xmap_compat.tools.check import findings, table

GONE = json.loads((Path(__file__).parent / "gone.json").read_text())
MOVED = {row.name for row in removed.TABLE if row.kind == removed.MODULE}


def recorded(kind):
    for homes in GONE[kind].values():
        yield from (f"{home}.{name}" for home, names in homes.items() for name in names.split())


NAMES, KEYWORDS = set(recorded("names")), set(recorded("keywords"))


def is_restored(name):
    home = name.rpartition(".")[0]
    if name.endswith("=)"):
        return tuple(name[:-2].split("(")) in removed.KEYWORDS_BY_NAME
    return (
        name in {*removed.NAMES, *removed.GONE_MODULES, *table.NAMES, table.MAPS} or home in MOVED
    )


def test_every_name_that_is_gone_is_restored_or_there_is_a_reason():
    assert len(NAMES) > 1800 and len(KEYWORDS) > 200
    assert (
        sorted(
            name
            for name in NAMES | KEYWORDS
            if not is_restored(name) and not why_not_restored(name)
        )
        == []
    )


def test_every_reason_is_needed():
    left = [name for name in NAMES | KEYWORDS if not is_restored(name)]
    assert {why_not_restored(name) for name in left} == set(REASONS.values())


def test_the_record_was_made_for_every_release_of_the_table():
    assert set(GONE["names and keywords looked at"]) == {"0.2.20", "0.3.25", "0.4.14", "0.4.30"}
    assert all(names > 2000 for names, _ in GONE["names and keywords looked at"].values())
    assert {
        "jax.ad_checkpoint.checkpoint",
        "jax.tree_map",
        "jax.api.vmap",
        f"{table.MAPS}.xmap",
    } <= NAMES


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("import jax; jax.spmd_mode", "jax.spmd_mode", "there is one behaviour"),
        ("from jax.dlpack import to_dlpack", "jax.dlpack.to_dlpack", "pass the array itself"),
        ("import jax; jax.numpy.square(x=1)", "jax.numpy.square(x=)", "pass it by position"),
    ],
)
def test_check_says_why_a_name_is_not_restored(tmp_path, source, name, reason):
    (tmp_path / "program.py").write_text(source)
    (finding,) = findings.check([tmp_path / "program.py"]).reported
    assert (finding.dies, finding.gone.kind, finding.gone.name) == (True, table.GONE, name)
    assert reason in finding.gone.remedy
