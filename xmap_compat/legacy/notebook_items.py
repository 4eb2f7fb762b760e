"""``pytest -p xmap_compat.pytest_plugin notebook.ipynb``: the cells of a notebook as tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from xmap_compat.legacy import notebook


class NotebookFile(pytest.File):
    """A notebook: its cells run in order, in one kernel, and are compared with its stored outputs."""

    def collect(self) -> Iterator[NotebookCell]:
        self._stack = contextlib.ExitStack()
        self._kernel: Any = None
        self._differences: dict[int, str] = {}
        try:
            self.notebook = notebook.Notebook(str(self.path))
        except notebook.CannotRun as error:
            raise self.CollectError(str(error)) from None
        for index in self.notebook.code:
            yield NotebookCell.from_parent(self, name=f"cell {index + 1}", index=index)

    def difference_in(self, index: int) -> str:
        """The difference in a cell, which is run after all cells before it."""
        if self._kernel is None:
            self._kernel = self._stack.enter_context(self.notebook.kernel())
        for before in self.notebook.code:
            if before <= index and before not in self._differences:
                self._differences[before] = notebook.compare_cell(self.notebook, self._kernel, before)
        return self._differences[index]

    def teardown(self) -> None:
        self._stack.close()
        self._kernel = None


class Difference(Exception):
    """A cell does not show its stored output."""


class NotebookCell(pytest.Item):
    def __init__(self, *, index: int, **options: Any):
        super().__init__(**options)
        self.index = index

    def runtest(self) -> None:
        assert isinstance(self.parent, NotebookFile)
        text = self.parent.difference_in(self.index)
        if text:
            raise Difference(text)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        worded = excinfo.errisinstance((Difference, notebook.CannotRun))
        return str(excinfo.value) if worded else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"
