"""Every example of README.md and migration_guide.md runs, and shows what it says.

A fence says what its code is:

- ``python``: runs.  An expression with a comment ``# -> value`` has that value; what the block prints is
  the ``text`` block after it, if there is one.
- ``python raises`` and ``python warns``: the error, or the warning, is the ``text`` block after it.
- ``python legacy``: code for JAX before 0.4.31; it is only parsed.

``...`` in what is shown stands for anything, and white space does not count.  Each section begins with the names
that the first section of its document and the beginning of its chapter leave.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import re
import warnings
from pathlib import Path

import pytest

from xmap_compat import __main__ as command_line

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "migration_guide.md", "docs/architecture.md")
LANGUAGES = ("bash", "python", "python legacy", "python raises", "python warns", "text")
ERRORS_CHAPTER = "Error messages"


# ------------------------------------------------------------------------------ reading


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: what its fence says, its text, and the line of the document on which that begins."""

    language: str
    text: str
    line: int


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, the heading of the chapter (level 2) that it is in, and the blocks below it."""

    document: str
    chapter: str
    title: str
    blocks: tuple[Block, ...]

    def pairs(self):
        """Each block of code with the text that follows it, or None."""
        following = [*self.blocks, None][1:]
        for block, after in zip(self.blocks, following, strict=True):
            shown = after.text if after is not None and after.language == "text" else None
            if block.language.startswith("python"):
                yield block, shown


def read_sections(document):
    """The sections of a document in order."""
    chapter, title, blocks, fence = "", "", [], None
    for number, line in enumerate((ROOT / document).read_text().splitlines(), start=1):
        if fence is not None and line.strip() == "```":
            blocks.append(Block(fence[0], "\n".join(fence[1]), fence[2]))
            fence = None
        elif fence is not None:
            fence[1].append(line)
        elif line.startswith("```"):
            fence = (line[3:].strip(), [], number + 1)
        elif line.startswith("##"):
            yield Section(document, chapter, title, tuple(blocks))
            title, blocks = line.lstrip("#").strip(), []
            chapter = title if line.startswith("## ") else chapter
    assert fence is None, f"{document}:{fence[2]}: this block does not end"
    yield Section(document, chapter, title, tuple(blocks))


SECTIONS = [section for document in DOCUMENTS for section in read_sections(document)]
WITH_CODE = [section for section in SECTIONS if any(section.pairs())]
ERROR_SECTIONS = [
    section for section in SECTIONS if section.chapter == ERRORS_CHAPTER and section.title.startswith("`")
]


def section_id(section):
    return f"{section.document}-{section.title[:50]}"


# ------------------------------------------------------------------------------ running


def words(text):
    """White space made equal, inside of brackets too."""
    return re.sub(r"(?<=[\[(]) | (?=[\])])", "", " ".join(text.split()))


def agrees(shown, found):
    pattern = ".*".join(map(re.escape, words(shown).split("...")))
    return re.fullmatch(pattern, words(found), re.DOTALL) is not None


class Comparisons(ast.NodeTransformer):
    """Has every expression with a comment ``# -> value`` compared with that value."""

    def __init__(self, text):
        arrows = ((number, *line.partition("# -> ")[1:]) for number, line in enumerate(text.splitlines(), start=1))
        self.shown = {number: value for number, arrow, value in arrows if arrow}

    def visit_Expr(self, node):
        shown = self.shown.pop(node.end_lineno, None)
        if shown is None:
            return node
        compare = ast.Call(ast.Name("compare_with_shown", ast.Load()), [node.value, ast.Constant(shown)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(ast.copy_location(compare, node)), node))


def compare_with_shown(found, shown):
    assert any(agrees(shown, as_text(found)) for as_text in (repr, str)), f"shown: {shown}\nfound: {found!r}"


def run_code(section, block, names):
    """Run a block and compare the values that it shows.

    Frames are those of the document itself, so that messages (and inspect) point into it.
    """
    comparisons = Comparisons(block.text)
    tree = comparisons.visit(ast.parse(block.text))
    assert not comparisons.shown, f"these are no values of expressions: {comparisons.shown}"
    ast.increment_lineno(tree, block.line - 1)
    names["compare_with_shown"] = compare_with_shown
    exec(compile(tree, str(ROOT / section.document), "exec"), names)


def run_block(section, block, shown, names):
    """Run a block in a namespace, and compare what it shows with what it does."""
    if block.language == "python legacy":
        ast.parse(block.text)
    elif block.language == "python raises":
        assert shown is not None, "the error is not shown"
        with pytest.raises(Exception) as raised:
            run_code(section, block, names)
        assert agrees(shown, f"{raised.type.__name__}: {raised.value}"), raised.value
    elif block.language == "python warns":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_code(section, block, names)
        assert [w for w in caught if agrees(shown, f"{w.category.__name__}: {w.message}")], caught
    else:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_code(section, block, names)
        assert agrees(shown or "", printed.getvalue()), printed.getvalue()


def run_section(section, names):
    for block, shown in section.pairs():
        try:
            run_block(section, block, shown, names)
        except BaseException as error:
            error.add_note(f"in the block at {section.document}:{block.line}")
            raise
    return names


def before(section):
    """The sections that a section is read after: the first of its document that has code, and its chapter's own."""
    own = [other for other in WITH_CODE if other.document == section.document]
    chapter = [other for other in own if other.title == section.chapter]
    return tuple(dict.fromkeys([*own[:1], *chapter])) if section != own[0] else ()


@functools.cache
def names_after(*sections):
    names = {"__name__": "__main__"}
    for section in sections:
        run_section(section, names)
    return names


@pytest.mark.parametrize("section", WITH_CODE, ids=section_id)
def test_the_code_of_a_section_runs_and_shows_what_it_says(section):
    given = names_after(*(other for other in before(section) if other != section))
    assert run_section(section, dict(given)).keys() >= given.keys()


# --------------------------------------------------------------------------- what is promised


def test_every_block_says_what_it_is():
    unknown = [(s.document, b.line, b.language) for s in SECTIONS for b in s.blocks if b.language not in LANGUAGES]
    assert unknown == []


@pytest.mark.parametrize("section", ERROR_SECTIONS, ids=section_id)
def test_a_heading_that_is_an_error_message_is_in_the_error_that_is_shown(section):
    shown = [text for block, text in section.pairs() if block.language in ("python raises", "python warns")]
    assert any(agrees(f"...{section.title.strip('` ')}...", text) for text in shown)


def fragments(function):
    """The fixed parts of the message that a function of errors.py makes, the longest first."""
    docstring = ast.get_docstring(function, clean=False)
    texts = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return sorted((words(t) for t in texts if t != docstring), key=len, reverse=True)


ERRORS = [
    node
    for node in ast.parse((ROOT / "xmap_compat" / "core" / "errors.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and "Error" in ast.unparse(node.returns or ast.Constant(None))
]


@pytest.mark.parametrize("function", ERRORS, ids=lambda function: function.name)
def test_every_error_is_in_the_guide(function):
    """By at least a few of its words that are its own."""
    guide = words((ROOT / "migration_guide.md").read_text())
    own = [fragment for fragment in fragments(function) if len(fragment) > 12]
    others = {f for other in ERRORS if other is not function for f in fragments(other)}
    own = [fragment for fragment in own if fragment not in others] or own
    parts = {" ".join(fragment.split()[k : k + 4]) for fragment in own for k in range(len(fragment.split()) - 3)}
    parts |= {fragment for fragment in own if len(fragment.split()) < 4}
    assert any(part.strip("`.,: ") in guide for part in parts), own


def anchors(document):
    """The anchors of a document's headings, as they are made for readers of Markdown in repositories."""
    titles = [s.title for s in SECTIONS if s.document == document]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_files_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", (ROOT / document).read_text())
    assert links
    for target, anchor in links:
        path = ((ROOT / document).parent / target).resolve() if target else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.relative_to(ROOT).as_posix()), anchor


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_that_are_named_exist(document):
    named = re.findall(r"python -m xmap_compat ([a-z]+)\b(?![./])", (ROOT / document).read_text())
    assert set(named) <= {*command_line.COMMANDS}
