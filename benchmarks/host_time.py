"""What a call costs the CPU: fa2gen beside torch's SDPA in one run, and what a new kernel costs before its first call.

    python benchmarks/host_time.py [--calls 200] [--bursts 50] [--no-cold]

Host time is the wall time of issuing calls without waiting for them. The problem is so small that the GPU keeps up, and
a burst is shorter than the launch queue, so no call waits for a slot. The calls take turns, burst by burst; the median
over bursts is reported with p20 and p80.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from fa2gen.driver import unavailable_reason  # noqa: E402
from fa2gen.runtime import attention, describe, warmup  # noqa: E402

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


def burst_times(calls: Sequence[Callable[[], object]], *, count: int, bursts: int) -> list[list[float]]:
    """Seconds per call of every burst, for each function; the functions take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for burst in range(bursts + 5):
        for call, seconds in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            elapsed = (time.perf_counter() - start) / count
            # The first five warm caches, allocator and clocks.
            if burst >= 5:
                seconds.append(elapsed)
    torch.cuda.synchronize()
    return times


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """p20, median and p80 in microseconds."""
    p20, median, p80 = (torch.tensor(seconds, dtype=torch.float64) * 1e6).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return p20.item(), median.item(), p80.item()


def warm_calls(count: int, bursts: int) -> None:
    """Print host time per call on the default and on a side stream."""
    shapes = {
        "contiguous": torch.randn(1, 64, 1, 64, device="cuda").bfloat16(),
        "view of (B, H, S, D)": torch.randn(1, 4, 64, 64, device="cuda").bfloat16().transpose(1, 2),
    }
    sdpa = torch.nn.functional.scaled_dot_product_attention
    print(f"{'stream':8} {'tensors':22} {'call':14} {'us (p20 - p80)':22} of SDPA")
    for name, q in shapes.items():
        heads_first = q.transpose(1, 2)
        calls: dict[str, Callable[[], object]] = {
            "SDPA": lambda x=heads_first: sdpa(x, x, x),  # type: ignore[misc]
            "fa2gen": lambda x=q: attention(x, x, x),  # type: ignore[misc]
            "fa2gen + LSE": lambda x=q: attention(x, x, x, return_lse=True),  # type: ignore[misc]
            "torch.empty": lambda x=q: torch.empty(x.shape, dtype=x.dtype, device=x.device),  # type: ignore[misc]
        }
        warmup(q, q, q)
        for stream_name, stream in (("default", torch.cuda.default_stream()), ("side", torch.cuda.Stream())):
            with torch.cuda.stream(stream), torch.no_grad():
                results = [quantiles(x) for x in burst_times(list(calls.values()), count=count, bursts=bursts)]
            for call, (p20, median, p80) in zip(calls, results, strict=True):
                text = f"{median:6.2f} ({p20:.2f} - {p80:.2f})"
                print(f"{stream_name:8} {name:22} {call:14} {text:22} {median / results[0][1]:.2f}")
    print(describe(q, q, q))


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
    parser.add_argument("--calls", type=int, default=200, help="calls a burst")
    parser.add_argument("--bursts", type=int, default=50, help="bursts of each call")
    parser.add_argument("--no-cold", action="store_true", help="leave out compiling, which takes seconds")
    options = parser.parse_args()
    reason = unavailable_reason()
    if reason is not None:
        print(f"host_time: no GPU can be used: {reason}", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    warm_calls(options.calls, options.bursts)
    new_sizes(options.calls)
    if not options.no_cold:
        first_calls()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
