"""Every example of README.md, the migration guide and the pages in docs/ runs, and shows what it says.

A fence says what its code is:

- ``python``: runs.  An expression with a comment ``# -> value`` has that value; what the block prints is
  the ``text`` block after it, if there is one.
- ``python raises`` and ``python warns``: the error, or the warning, is the ``text`` block after it.
- ``python legacy``: code for JAX before 0.4.31; it is only parsed.
- ``python file NAME``: code for JAX before 0.4.31, which lies in a file for what follows.
- ``console``: commands after ``$``, which are executed, each with what it prints.

``...`` in what is shown stands for anything, and white space does not count.  A page of docs/ is one program, from
its top to its end.  Of the documents in which readers look things up, each section begins with the names that the
first section and the beginning of its chapter leave.

Each block is typed into Python's console, as readers do: line by line, and one empty line at its end.
"""

import ast
import code
import contextlib
import dataclasses
import functools
import importlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import forks
import jax
import numpy as np
import pytest

import xmap_compat
from xmap_compat import __main__ as command_line

ROOT = Path(__file__).parent.parent
LOOKED_UP = ("README.md", "migration_guide.md", "docs/errors.md")
PAGES = sorted(
    {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} - {*LOOKED_UP}
)
DOCUMENTS = (*LOOKED_UP, *PAGES)
LANGUAGES = (
    "bash",
    "console",
    "python",
    "python legacy",
    "python file",
    "python raises",
    "python warns",
    "text",
)
REGENERATE = bool(os.environ.get("XMAP_COMPAT_REGENERATE"))
ERRORS_PAGE = "docs/errors.md"


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
            if block.language.startswith(("python", "console")):
                yield block, shown


def read_sections(document):
    """The sections of a document in order."""
    chapter, title, blocks, fence = "", "", [], None
    for number, line in enumerate((ROOT / document).read_text().splitlines(), start=1):
        if fence is not None and line.strip() == "```":
            blocks.append(Block(fence[0], textwrap.dedent("\n".join(fence[1])), fence[2]))
            fence = None
        elif fence is not None:
            fence[1].append(line)
        elif line.strip().startswith("```"):
            fence = (line.strip()[3:].strip(), [], number + 1)
        elif line.startswith("##"):
            yield Section(document, chapter, title, tuple(blocks))
            title, blocks = line.lstrip("#").strip(), []
            chapter = title if line.startswith("## ") else chapter
    assert fence is None, f"{document}:{fence[2]}: this block does not end"
    yield Section(document, chapter, title, tuple(blocks))


SECTIONS = [section for document in DOCUMENTS for section in read_sections(document)]
WITH_CODE = [section for section in SECTIONS if any(section.pairs())]
ERROR_SECTIONS = [
    section
    for section in SECTIONS
    if section.document == ERRORS_PAGE and section.title.startswith("`")
]
ERROR_SECTIONS = [section for section in ERROR_SECTIONS if section in WITH_CODE]


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
        arrows = (
            (number, *line.partition("# -> ")[1:])
            for number, line in enumerate(text.splitlines(), start=1)
        )
        self.shown = {number: value for number, arrow, value in arrows if arrow}

    def visit_Expr(self, node):
        shown = self.shown.pop(node.end_lineno, None)
        if shown is None:
            return node
        compare = ast.Call(
            ast.Name("compare_with_shown", ast.Load()), [node.value, ast.Constant(shown)], []
        )
        return ast.fix_missing_locations(
            ast.copy_location(ast.Expr(ast.copy_location(compare, node)), node)
        )


def compare_with_shown(found, shown):
    assert any(agrees(shown, as_text(found)) for as_text in (repr, str)), (
        f"shown: {shown}\nfound: {found!r}"
    )


def show_code_to_readers_of_sources(document):
    """Have ``linecache`` take the code of a document, in its places, for the lines of that file."""
    path = ROOT / document
    lines = [""] * len(path.read_text().splitlines())
    for section in SECTIONS:
        if section.document == document:
            for block in section.blocks:
                own = block.text.splitlines()
                lines[block.line - 1 : block.line - 1 + len(own)] = own
    linecache.cache[str(path)] = (len(lines), None, [f"{line}\n" for line in lines], str(path))


class Console(code.InteractiveConsole):
    """Python's console, which compares the values that are shown, and lets errors pass.

    Frames are those of the document itself, so that messages point into it, and its functions have sources.
    """

    line = 1  # of the document, at which what is typed begins

    def type(self, block):
        for number, line in enumerate([*block.text.splitlines(), ""], start=block.line):
            self.line = self.line if self.buffer else number
            more = self.push(line)
        assert not more, "the console waits for more after one empty line"

    def runsource(self, source, filename="<input>", symbol="single"):
        if self.compile(source, filename, symbol) is None:
            return True
        if any(
            line and not line.isspace() and not line.lstrip().startswith("#")
            for line in source.splitlines()
        ):
            comparisons = Comparisons(source)
            tree = comparisons.visit(ast.parse(source, mode=symbol))
            assert not comparisons.shown, f"these are no values of expressions: {comparisons.shown}"
            ast.increment_lineno(tree, self.line - 1)
            exec(compile(tree, filename, symbol), self.locals)
        return False


def run_code(section, block, names):
    """Type a block into a console, which compares the values that it shows."""
    show_code_to_readers_of_sources(section.document)
    names["compare_with_shown"] = compare_with_shown
    hook, sys.displayhook = sys.displayhook, lambda value: None
    try:
        Console(names, str(ROOT / section.document)).type(block)
    finally:
        sys.displayhook = hook


def run_block(section, block, shown, names):
    """Run a block in a namespace, and compare what it shows with what it does."""
    if block.language == "python legacy":
        ast.parse(block.text)
    elif block.language.startswith("python file "):
        Path(block.language.removeprefix("python file ")).write_text(block.text + "\n")
    elif block.language == "console":
        run_commands(block.text)
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


def run_commands(text):
    """Run the lines after ``$``, and compare what each prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        python, *arguments = shlex.split(command)
        assert python == "python", command
        ours = arguments[:2] == ["-m", "xmap_compat"]
        done = forks.run(
            *arguments[2 * ours :],
            cwd=Path.cwd(),
            plain=not ours,
            warn="error" if ours else "default",  # of an old program, the page shows one
            XLA_FLAGS=os.environ["XLA_FLAGS"],
        )
        found = f"{done.stdout}{done.stderr}"
        assert agrees(shown, found), f"$ {command}\n{found}"


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page in {section.document for section in WITH_CODE}]
)
def test_the_code_of_a_page_runs_and_shows_what_it_says(page, tmp_path, monkeypatch):
    """And the pictures that it saves are those that are shown."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for section in WITH_CODE:
        if section.document == page:
            run_section(section, names)
    for drawn in sorted(tmp_path.glob("*.svg")):
        kept = ROOT / "docs" / "plans" / drawn.name
        svg = re.sub(
            r"(?<=\.md):\d+", "", drawn.read_text()
        )  # without the lines of its collectives
        if REGENERATE:
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(svg)
        assert svg == kept.read_text(), f"{kept.name} is shown as it was (XMAP_COMPAT_REGENERATE=1)"
    assert "compare_with_shown" in names


@pytest.mark.parametrize(
    "section", [s for s in WITH_CODE if s.document in LOOKED_UP], ids=section_id
)
def test_the_code_of_a_section_runs_and_shows_what_it_says(section):
    given = names_after(*(other for other in before(section) if other != section))
    assert run_section(section, dict(given)).keys() >= given.keys()


ON_ONE_DEVICE = """
import test_docs
names = {"__name__": "__main__"}
for section in test_docs.WITH_CODE:
    for block, shown in section.pairs():
        if section.document == "README.md":
            try:
                test_docs.run_block(section, block, shown and "...", names)
            except ValueError as error:
                assert "XLA_FLAGS=--xla_force_host_platform_device_count=8" in str(error)
"""


def test_readme_on_one_device():
    """Every block runs, or ends in our sentence about eight devices."""
    flags = re.sub(r"(device_count=)\d+", r"\g<1>1", os.environ["XLA_FLAGS"])
    here = Path(__file__).parent
    path = f"{here}{os.pathsep}{here / 'helpers'}"
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    command = [sys.executable, "-c", ON_ONE_DEVICE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------- what is promised


def test_every_block_says_what_it_is():
    for section in SECTIONS:
        for block in section.blocks:
            language = re.sub("(python file) .*", r"\1", block.language)
            assert language in LANGUAGES, (section.document, block.line)


@pytest.mark.parametrize("section", ERROR_SECTIONS, ids=section_id)
def test_a_heading_that_is_an_error_message_is_in_the_error_that_is_shown(section):
    shown = [
        text
        for block, text in section.pairs()
        if block.language in ("python raises", "python warns")
    ]
    assert any(agrees(f"...{section.title.strip('` ')}...", text) for text in shown)


def test_the_table_of_messages_is_that_of_the_functions_that_make_them():
    """``python docs/messages.py`` writes it."""
    assert (ROOT / ERRORS_PAGE).read_text() == importlib.import_module("messages").page()


def anchors(document):
    """The anchors of a document's headings, as they are made for readers of Markdown in repositories."""
    return {anchor(section.title) for section in SECTIONS if section.document == document}


def anchor(title):
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def prose(document):
    """A document without its blocks of code."""
    return re.sub(
        r"^ *```.*?^ *```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_links_between_files_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", prose(document))
    assert links or document in (
        *PAGES,
        "README.md",
    )  # that of an archive has absolute ones, or none
    for target, heading in links:
        path = ((ROOT / document).parent / target).resolve() if target else ROOT / document
        assert path.exists(), target
        assert not heading or heading in anchors(path.relative_to(ROOT).as_posix()), heading


@pytest.mark.parametrize("home", ["", "https://example.org/xmap_compat"])
def test_the_readme_of_a_package_index_has_no_link_that_leads_nowhere(home, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    readme = (ROOT / "README.md").read_text()
    made = importlib.import_module("for_index").for_index(readme, home or None)
    relative = r"\]\((?!https?:)"
    assert re.search(relative, readme) and not re.search(relative, made)
    assert (f"]({home}/raw/main/docs/plans/one_function.svg)" in made) == bool(home)


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["one_function", "one_function_narrow"])
def test_the_first_figure_shows_what_its_function_does(name):
    """Its numbers are those of the call, under the two assignments that it names."""
    figure = ElementTree.parse(ROOT / "docs" / "plans" / f"{name}.svg")
    texts = [(t.get("class", ""), t.text) for t in figure.iter(f"{SVG}text")]

    def numbers(kind):
        found = [text.replace("−", "-") for of, text in texts if of == f"on {kind}"]
        return np.float32(found).reshape(-1, 8)

    names = {"lax": jax.lax}
    exec("\n".join(text for of, text in texts if "source" in of), names)
    batch = numbers("in")[0]
    assert (numbers("in") == batch).all()
    assert (numbers("out") == batch - batch.mean()).all()
    titles = [text for _, text in texts if text.startswith("axis_resources=")]
    assert len(titles) == 2
    for title in titles:
        resources = eval(title.removeprefix("axis_resources="))
        centred = xmap_compat.xmap(names["centred"], ["batch"], ["batch"], axis_resources=resources)
        with xmap_compat.mesh(np.array(jax.devices()[:4]), ("x",)):
            assert (numbers("out") == centred(batch)).all()


def test_every_page_has_its_place_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"(?m)^ *- [^#\n]*?([\w/]+\.md)$", site)
    pages = {page.removeprefix("docs/") for page in [*PAGES, "docs/errors.md"]}
    assert sorted(shown) == sorted([*pages, "migration_guide.md", "CHANGELOG.md"])


REFERENCE = "\n".join(
    path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))
)


@pytest.mark.parametrize("name", xmap_compat.__all__)
def test_every_public_function_has_a_page(name):
    assert re.search(rf"^::: xmap_compat\.{name}\b", REFERENCE, re.MULTILINE)


def test_the_contents_of_the_guide_are_its_headings_to_the_second_level():
    text = prose("migration_guide.md")
    shown = re.findall(
        r"^(1|\d+|    -)\.? \[(.*)\]\(#(.*)\)$", text[: text.index("\n## ")], re.MULTILINE
    )
    headings = re.findall(r"^(##|###) (.*?) *$", text, re.MULTILINE)
    assert [(("##" if mark.isdigit() else "###"), title) for mark, title, _ in shown] == headings
    assert [link for *_, link in shown] == [anchor(title) for _, title in headings]


def docstrings():
    """Each docstring of the package, with the place of what it describes."""
    for path in sorted((ROOT / "xmap_compat").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                yield place, ast.get_docstring(node) or ""


def entries_without_a_name(docstring):
    """Lines of ``Args:`` and its like at the indent of entries that begin none.

    The site reads such a line as an entry, and its build ends: what continues is indented further.
    """
    indent = None
    for line in docstring.splitlines():
        if re.fullmatch("(Args|Attributes|Raises|Yields|Warns):", line):
            indent = 2
        elif line and not line.startswith(" "):
            indent = None
        begins_no_entry = not re.match(r" *[\w*`.][\w*`., ]*( \(.*?\))?: ", line)
        if indent and re.match(r"  \S", line) and begins_no_entry:
            yield line


def test_entries_of_docstrings_have_names():
    assert list(entries_without_a_name("Args:\n  x: an array\n  of two axes.")) == [
        "  of two axes."
    ]
    for place, docstring in docstrings():
        assert not list(entries_without_a_name(docstring)), place


def test_the_commands_that_are_named_exist():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        named = re.findall(r"python -m xmap_compat ([a-z]+)\b(?![./])", text)
        assert {*named} <= {*command_line.COMMANDS}, document


def test_workflows_run_sessions_that_exist():
    nox = (ROOT / "noxfile.py").read_text()
    functions = {*re.findall(r"^def (\w+)\(session", nox, re.MULTILINE)}
    pairs = {
        f"python {python}, jax {jax}" for python, jax in re.findall(r'\("(3\.\d+)", "(\S+)"\)', nox)
    }
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        sessions = re.findall(r"^          - (\w+)(?:\((.*)\))?$", path.read_text(), re.MULTILINE)
        assert {name for name, _ in sessions} <= functions
        assert {pair for _, pair in sessions if pair} == (pairs if sessions else set())
