"""The edits that tests must find (mutants.py): each names tests that exist, and few survive."""

from mutants import MOST_SURVIVORS, MUTANTS, ROOT, chosen, modules_of


def test_every_edit_has_tests():
    for mutant in MUTANTS:
        assert all((ROOT / test.partition("::")[0]).is_file() for test in modules_of(mutant)), (
            mutant
        )


def test_the_edits_are_many_and_survivors_have_reasons():
    assert len(MUTANTS) >= 80
    assert len({(m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
    known = [m for m in MUTANTS if m.survives]
    assert len(known) <= MOST_SURVIVORS * len(MUTANTS)


def test_parts_of_the_edits_make_all_of_them():
    parts = [chosen(f"{k}/8") for k in range(8)]
    assert sorted(m for part in parts for m in part) == sorted(MUTANTS)
