"""Where the files that ship with fa2gen lie: kernel templates and tuned tables.

In a checkout they are top-level folders; in an installed package they are the sub-packages ``fa2gen.templates`` and
``fa2gen.tuned_tables``. An editable install maps the second onto the first.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from .errors import Fa2genError

_FOLDERS = ("templates", "tuned_tables")


def data_dir(name: str) -> Path:
    """Folder of shipped data files; read-only by convention, since it may belong to another user.

    Args:
        name: ``"templates"`` or ``"tuned_tables"``.

    Returns:
        An existing folder, the same whether fa2gen is installed (plainly, editable, from an sdist), run with
        ``python cli.py`` from a checkout or imported by pytest from the repository's root.

    Raises:
        Fa2genError: The folder is not there, so the installation is incomplete.
    """
    if name not in _FOLDERS:
        raise ValueError(f"name must be one of {', '.join(_FOLDERS)}, got {name!r}")
    try:
        folder = Path(str(importlib.resources.files(f"fa2gen.{name}")))
    except ModuleNotFoundError:
        folder = Path(__file__).resolve().parent.parent / name
    if not folder.is_dir():
        raise Fa2genError(f"fa2gen's {name} folder is missing ({folder}); install fa2gen again")
    return folder
