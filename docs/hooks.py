"""What mkdocs does to the pages before it renders them, so that they also read well in the repository.

- The migration guide and the changelog, which lie at the top of the repository, are pages too.
- Links to files that are no pages (``../xmap_compat/api.py``) lead to the repository, if it has a public address, and
  become their paths if not: the site has no copy of them.
- ``python raises`` and the like, which tell the tests what to expect, become plain ``python``.
- The list and the table of ``errors.md`` become a section for each message.
- The migration guide loses its list of contents, which stands beside each page of the site.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from for_index import ROOT, blob, home

AT_THE_TOP = ("migration_guide.md", "CHANGELOG.md")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]+)((?:#[^)\s]*)?)\)")
# The list of messages: each entry becomes a section, for search finds sections.
ENTRIES = re.compile(r"^- (`.*?`)(?:; legacy: (`.*`))?$", re.MULTILINE)
ROWS = re.compile(r"^\| (`.*?`) \| (.*) \|$", re.MULTILINE)
HEADS = re.compile(r"^\| message \| what to do \|\n\|---\|---\|\n", re.MULTILINE)
CONTENTS = re.compile(r"^1\. \[.*?(?=^## )", re.DOTALL | re.MULTILINE)
FENCES = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def on_config(config):
    config.repo_url, config.repo_name = home(), config.site_name


def on_files(files, config):
    for name in AT_THE_TOP:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    # Seen from docs/, for the files that lie above it.
    folder = "" if uri in AT_THE_TOP else posixpath.join("docs", posixpath.dirname(uri))
    if uri == "migration_guide.md":
        markdown = CONTENTS.sub("", markdown, count=1)
    if uri == "errors.md":
        # Who pastes a message wants its section, not a page that speaks of it.
        page.meta["search"] = {"boost": 3}
        markdown = ENTRIES.sub(r"#### \1\n\n\2\n", markdown)
        markdown = ROWS.sub(r"#### \1\n\n\2\n", HEADS.sub("", markdown))
    parts = FENCES.split(markdown)
    parts[::2] = [
        LINK.sub(lambda match: _link(match, folder, uri, files), text) for text in parts[::2]
    ]
    before = ["", *parts[1::2]]
    parts[1::2] = [
        _fence(text, raised=_FAILS.match(other) is not None)
        for other, text in zip(before, parts[1::2])
    ]
    return "".join(parts)


def _link(match, folder, uri, files):
    text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join(folder, target))
    own = path if path in AT_THE_TOP else path.removeprefix("docs/")
    if (path in AT_THE_TOP or path.startswith("docs/")) and files.get_file_from_path(own):
        return f"[{text}]({posixpath.relpath(own, posixpath.dirname(uri) or '.')}{anchor})"
    if not (ROOT / path).exists():
        return match[0]  # mkdocs says that it leads nowhere
    if home():
        return f"[{text}]({blob(home(), path)}{anchor})"
    plain = text.replace("`", "")
    return f"`{path}`" if path.endswith(plain) else f"{text} (`{path}`)"


_FAILS = re.compile(" *```python (raises|warns)")


def _fence(block, raised):
    """What is printed, or raised, is shown as belonging to the code above it."""
    first, rest = block.split("\n", 1)
    language = first.strip().removeprefix("```")
    if raised:
        rest = re.sub(
            r"^(.{90,})\n(?!\n|```)", r"\1 ", rest, flags=re.MULTILINE
        )  # as long as the page is wide
    output = "text { .output .raised }" if raised else "text { .output }"
    shown = {"console": "console", "text": output}.get(language, language.split(" ")[0])
    title = ""
    if language.startswith("python file "):
        title = f' title="{language.removeprefix("python file ")}"'
    elif language == "python legacy":
        title = ' title="until jax 0.4.30"'
    return f"{first[: first.index('`')]}```{shown}{title}\n{rest}"
