"""Kills a process at random moments, many times: what a crash, an out-of-memory killer or a power cut do."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def kill_at_random(
    target: str, arguments: Mapping[str, Any], *, kills: int, longest: float, seed: int = 0, env: Mapping[str, str] = {}
) -> int:
    """Runs ``target(round=n, **arguments)`` over and over, each time in a new process that SIGKILL ends.

    Args:
        target: ``"module:function"``; the function should work for ever, or longer than ``longest``.
        arguments: Keyword arguments, as JSON takes them.
        kills: How often.
        longest: Each process is killed after a random time up to this, seconds.
        seed: Of the times.
        env: Extra environment.

    Returns:
        How many processes were killed while they ran; one that returned by itself does not count, one that raised
        fails the caller.
    """
    task = json.dumps([target, dict(arguments), kills, longest, seed])
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, task],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def _main(target: str, arguments: dict[str, Any], kills: int, longest: float, seed: int) -> int:
    # Imported once, so that a fork costs milliseconds and the random time is spent in the function.
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    generator = random.Random(seed)
    killed = 0
    for number in range(kills):
        child = os.fork()
        if child == 0:
            os.setsid()
            function(round=number, **arguments)
            os._exit(0)
        time.sleep(generator.uniform(0, longest))
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            # Not yet a group of its own.
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status) != 0:
            raise SystemExit(f"round {number} failed by itself")
    return killed


if __name__ == "__main__":
    print(_main(*json.loads(sys.argv[1])))
