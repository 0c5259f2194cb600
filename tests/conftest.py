"""Settings of every test: user folders redirected, GPU tests skipped with a reason.

Tests read and write only below a temporary folder. ``FA2GEN_TEST_CACHE_DIR`` names a folder that keeps compiled kernels
and emulator builds between runs; both are keyed by their content, so an old folder is never wrong, only large.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_SESSION_DIR = Path(tempfile.mkdtemp(prefix="fa2gen-tests-"))


def _redirect_user_folders() -> None:
    # At import, before any test module is imported: a module may read these variables once.
    for variable, folder in (("XDG_CACHE_HOME", "cache"), ("XDG_DATA_HOME", "data"), ("XDG_STATE_HOME", "state")):
        path = _SESSION_DIR / folder
        path.mkdir(mode=0o700)
        os.environ[variable] = str(path)
    kept = os.environ.get("FA2GEN_TEST_CACHE_DIR")
    os.environ["FA2GEN_CACHE_DIR"] = str(Path(kept).resolve() if kept else _SESSION_DIR / "cache" / "fa2gen")
    for variable in ("FA2GEN_STRICT", "FA2GEN_TABLES_DIR", "FA2GEN_STATE_DIR"):
        os.environ.pop(variable, None)


_redirect_user_folders()

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so; tests of Ctrl-C need the usual
# handler, and so do the processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _gpu_unavailable_reason() -> str | None:
    from fa2gen import driver

    return driver.unavailable_reason()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_dir = Path(__file__).parent / "gpu"
    gpu_items = [item for item in items if gpu_dir in item.path.parents or item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = _gpu_unavailable_reason()
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: to share small matrices costs more than to multiply them, 20 times as much on busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_SESSION_DIR, ignore_errors=True)
