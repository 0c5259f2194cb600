"""Every table file in the folders that look-ups read, the unreadable ones included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fa2gen.errors import TableError

from . import store
from .document import NewerSchemaError
from .schema import Table


@dataclass(frozen=True)
class TableFile:
    """A file of tuned entries.

    Attributes:
        path: The file.
        root: The folder of tables that it lies in.
        table: What it holds; None if it cannot be read.
        problem: Why it cannot be read, in a sentence that begins with the path; else ``""``.
        newer: It is whole, but of a newer schema.
    """

    path: Path
    root: Path
    table: Table | None
    problem: str = ""
    newer: bool = False

    @property
    def gpu(self) -> str:
        """The GPU that its folder names."""
        return self.path.parent.name

    @property
    def source(self) -> str:
        """``"user"``, ``"package"``, or the folder."""
        if self.root == store.package_dir():
            return "package"
        return "user" if self.root in store.search_dirs() else str(self.root)


def scan_tables(gpu: str | None = None, roots: Sequence[Path] | None = None) -> list[TableFile]:
    """The table files, in the order in which look-ups read them.

    Args:
        gpu: Only this GPU's.
        roots: Folders of tables; default the user's and the package's.
    """
    files = []
    for root in store.search_dirs() if roots is None else roots:
        for path in sorted(root.glob(f"{gpu or '*'}/*.json")):
            try:
                table = store.load_table(path)
                problem = "" if table else f"{path} is a link that leads nowhere"
                files.append(TableFile(path, root, table, problem))
            except TableError as error:
                files.append(TableFile(path, root, None, str(error), isinstance(error, NewerSchemaError)))
    return files
