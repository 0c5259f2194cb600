"""What a new kernel costs before its first call, and a loaded one at new sizes.

    python benchmarks/first_call.py [--sizes 200]

What a warm call costs the CPU is measured by `fa2gen bench`, beside other libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from fa2gen.driver import unavailable_reason  # noqa: E402
from fa2gen.runtime import attention  # noqa: E402

# One child process, once without and once with the cubins in the cache: from a spec to a loaded kernel for the first
# kernel of the process (PyCUDA's import and the templates' parsing included) and for the next one.
_CHILD = """
import time, torch
from fa2gen.runtime import warmup
q = torch.ones(1, 64, 2, {head_dim}, device="cuda").half()
torch.cuda.synchronize()
for k in (q, q[:, :, :1]):
    start = time.perf_counter()
    warmup(q, k, k, gate=False)
    torch.cuda.synchronize()
    print(time.perf_counter() - start)
"""


def first_calls() -> None:
    """Print the time from a spec to a loaded kernel: compiled, then read from the cache."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "FA2GEN_CACHE_DIR": cache, "PYTHONPATH": path}
        for head_dim in (64, 128):
            for label in ("compiled", "from the cache"):
                done = subprocess.run(
                    [sys.executable, "-c", _CHILD.format(head_dim=head_dim)],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=environment,
                )
                first, second = (1e3 * float(line) for line in done.stdout.split())
                print(
                    f"spec to loaded kernel, head_dim {head_dim}, {label}: {first:.0f} ms, the next one {second:.0f} ms"
                )


def new_sizes(count: int) -> None:
    """Print the host time of calls whose kernel is loaded but whose sizes are new."""
    keys = torch.randn(1, 64 + count, 1, 64, device="cuda").bfloat16()
    attention(keys[:, :32], keys[:, :32], keys[:, :32])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for length in range(64, 64 + count):
        attention(keys[:, :64], keys[:, :length], keys[:, :length])
    elapsed = (time.perf_counter() - start) / count
    torch.cuda.synchronize()
    print(f"call of new sizes, kernel loaded: {elapsed * 1e6:.0f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", type=int, default=200, help="lengths to call a loaded kernel with")
    options = parser.parse_args()
    reason = unavailable_reason()
    if reason is not None:
        print(f"first_call: no GPU can be used: {reason}", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    new_sizes(options.sizes)
    first_calls()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
