"""Where the cache of compiled kernels lies, and whose files are trusted there.

What lies in the cache is run, so its folder must belong to this user or to root, and nobody else may be able to write
to it; the same holds for every entry and every file that is read from it.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from pathlib import Path

from ..data import expand_home
from ..errors import CacheError

_HOW_TO_REPAIR = "repair it, or set FA2GEN_CACHE_DIR to a folder of your own"


def cache_root() -> Path | None:
    """The folder of all caches, made if need be; None where there is none that can be trusted or made.

    $FA2GEN_CACHE_DIR, else ``fa2gen`` in the user's cache folder ($XDG_CACHE_HOME, else ``~/.cache``). Where that
    belongs to somebody else, as in a cache folder that users share, it is ``fa2gen-<uid>`` beside it. Without any,
    kernels are kept in memory. A folder that exists must belong to this user or to root (a read-only cache that came
    with an image), and nobody else may be able to write to it.

    Raises:
        CacheError: $FA2GEN_CACHE_DIR names a folder that fails that test, or a home that there is not.
    """
    explicit = os.environ.get("FA2GEN_CACHE_DIR")
    if explicit:
        root = _explicit_root(explicit)
        reason = _unusable_reason(root)
        if reason is not None:
            raise CacheError(f"FA2GEN_CACHE_DIR is {root}, which {reason}; use a folder of your own with mode 0700")
        return root if _is_there(root) else None
    base: str | None = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is ignored.
    if not base or not os.path.isabs(base):
        base = expand_home("~/.cache")
    if base is None:
        warn_once("home", "there is no home folder for a cache: kernels are kept in memory only; set FA2GEN_CACHE_DIR")
        return None
    root, own = Path(base, "fa2gen"), Path(base, f"fa2gen-{os.geteuid()}")
    reason = _unusable_reason(root)
    if reason is None:
        return root if _is_there(root) else None
    if _unusable_reason(own) is None and own.is_dir():
        warn_once(str(root), f"the cache folder {root} {reason}: {own} is used instead")
        return own
    warn_once(str(root), f"the cache folder {root} {reason}: kernels are kept in memory only; {_HOW_TO_REPAIR}")
    return None


def _explicit_root(text: str) -> Path:
    folder = expand_home(text)
    if folder is None:
        raise CacheError(f"FA2GEN_CACHE_DIR is {text}, which names no folder: there is no such user, or no home")
    try:
        return Path(folder).absolute()
    except OSError as error:  # no current folder
        raise CacheError(f"FA2GEN_CACHE_DIR is {text}, which names no folder ({error})") from None


def _unusable_reason(root: Path) -> str | None:
    """Why the folder cannot be trusted; it is made first. None also where it cannot be made, after a warning."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Root's own, after a `sudo` that kept $HOME, is as good as a stranger's.
        return unsafe_reason(root.stat()) or (None if os.access(root, os.R_OK | os.X_OK) else "you cannot read")
    except OSError as error:
        warn_once(
            f"{root} made",
            f"the cache folder {root} cannot be made ({error.strerror}): kernels are kept in memory only",
        )
        return None


def _is_there(root: Path) -> bool:
    try:
        return root.is_dir()
    except OSError:  # no access to a folder above it
        return False


def unsafe_reason(status: os.stat_result) -> str | None:
    """Why a file or folder of this status may not be trusted: a predicate for a message, None if it may."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


_warned: set[str] = set()
_warned_lock = threading.Lock()


def warn_once(topic: str, message: str) -> None:
    """Warns, but once a process for each topic."""
    with _warned_lock:
        if topic in _warned:
            return
        _warned.add(topic)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
