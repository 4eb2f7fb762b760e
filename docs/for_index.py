"""README.md for a package index, which has no other files of the repository: its links and pictures lead to a home.

The home is the ``Repository`` among ``project_urls`` in ``setup.cfg``, or an option of the build
(``nox -s docs release -- --home URL``), which nox hands on in the environment.  Until there is one, links become
their text, and pictures go: a link that leads nowhere is worse than none.
"""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)\s]+)\)")


def home() -> str | None:
    """The public address of the repository, if the build or the package's metadata gives one."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    stated = re.search(r"^Repository = (\S+)", settings["metadata"]["project_urls"], re.MULTILINE)
    if "XMAP_COMPAT_HOME" in os.environ:
        return os.environ["XMAP_COMPAT_HOME"]
    return stated[1] if stated else None


def blob(home: str, path: str, kind: str = "blob") -> str:
    """Where the repository shows a file (a picture is ``raw``)."""
    return f"{home.rstrip('/')}/{kind}/main/{path}"


def for_index(text: str, home: str | None) -> str:
    """A page of the top of the repository with absolute links, or without a home with none."""

    def link(match: re.Match[str]) -> str:
        picture, shown, target = match.groups()
        if home is None:
            return "" if picture else shown
        return f"{picture}[{shown}]({blob(home, target, 'raw' if picture else 'blob')})"

    return _LINK.sub(link, text)
