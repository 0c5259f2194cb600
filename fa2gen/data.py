"""Where files lie: those that ship with fa2gen (kernel templates and tuned tables), and the user's own.

In a checkout they are top-level folders; in an installed package they are the sub-packages ``fa2gen.templates`` and
``fa2gen.tuned_tables``. An editable install maps the second onto the first.
"""

from __future__ import annotations

import importlib.resources
import os
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


def user_folder(variable: str, base_variable: str, base: str) -> Path | None:
    """A folder of the user's own files: ``$variable``, else ``fa2gen`` in an XDG base directory.

    Args:
        variable: fa2gen's own environment variable.
        base_variable: That of the base directory; a relative path in it is ignored, by the XDG rules.
        base: The base directory without it, below ``~``.

    Returns:
        The folder, which need not exist; None for a user without a home, see :func:`expand_home`.

    Raises:
        Fa2genError: ``$variable`` names the home of an unknown user, or of this one, who has none.
    """
    chosen = os.environ.get(variable)
    if chosen:
        folder = expand_home(chosen)
        if folder is None:
            raise Fa2genError(f"{variable} is {chosen}, which names no folder: there is no such user, or no home")
        return Path(folder)
    parent: str | None = os.environ.get(base_variable, "")
    if not parent or not os.path.isabs(parent):
        parent = expand_home(base)
    return None if parent is None else Path(parent, "fa2gen")


def expand_home(path: str) -> str | None:
    """The path with the home that ``~`` or ``~user`` at its start stands for; None where there is no such home.

    A user has no home where $HOME is no absolute path: relative, the files would lie wherever a command happens to
    start; empty, at the root of the file system (``os.path.expanduser`` makes ``/.cache`` of it). Nor has a user whom
    the system does not know, as in a container that runs under any uid, without $HOME.
    """
    if path != "~" and not path.startswith("~/"):
        folder = os.path.expanduser(path)
        return None if folder.startswith("~") else folder
    home = os.environ.get("HOME")
    if home is None:
        home = os.path.expanduser("~")
    return os.path.join(home, path[2:]) if os.path.isabs(home) else None
