"""Docstrings are written for ``help()`` in a terminal; this turns their examples into Markdown, for the site."""

from __future__ import annotations

import inspect
import re

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]*)`")
TITLE = re.compile(r"^Examples?::?$")


class Examples(griffe.Extension):
    """``Example:`` becomes a title, what stands after ``>>>`` a block of code, and a role of Sphinx what it marks."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            text = ROLE.sub(r"`\1`", inspect.cleandoc(obj.docstring.value))
            obj.docstring.value = with_blocks(text)
        if (
            obj.is_function and obj.overloads
        ):  # users see these types, not those of the code below them
            first, *_ = obj.overloads
            obj.parameters, obj.returns = first.parameters, first.returns


def with_blocks(text: str) -> str:
    lines, at = text.splitlines(), 0
    done: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        if TITLE.match(line):
            below = at
            while below < len(lines) and (not lines[below].strip() or lines[below].startswith(" ")):
                below += 1
            own = inspect.cleandoc("\n".join(["", *lines[at:below]]))
            is_code = line.endswith("::")
            done += [
                "**Example**",
                "",
                *(["```python", own, "```"] if is_code else [with_blocks(own)]),
                "",
            ]
            at = below
        elif line.startswith(">>>"):
            below = at
            while below < len(lines) and lines[below].strip():
                below += 1
            done += ["```pycon", line, *lines[at:below], "```"]
            at = below
        else:
            done.append(line)
    return "\n".join(done)
