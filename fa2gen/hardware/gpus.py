"""Products that fa2gen knows by name (``gpus.toml``), and the one at hand."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fa2gen.errors import ArgumentError

from .arch import ArchLimits, arch_limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOML = Path(__file__).with_name("gpus.toml")


@dataclass(frozen=True)
class Gpu:
    """One product, or a device that is none of the known ones (:func:`match_device`).

    Attributes:
        name: Slug that the command line and the tables use, e.g. ``"a100"``.
        title: Name for people.
        compute_capability: ``(major, minor)``.
        num_sms: Streaming multiprocessors.
        boost_ghz: Maximum boost clock, GHz.
        hbm_gbs: Memory bandwidth, GB/s.
        l2_bytes: L2 cache, bytes.
        source: Where the figures come from.
        device_names: What the CUDA driver calls the whole device.
        tensor_rate: Share of the architecture's ``mma.sync`` rate that the product grants (GeForce: 0.5).
        memory_gb: Memory as the product is named, GB; None for a device that is not listed.
    """

    name: str
    title: str
    compute_capability: tuple[int, int]
    num_sms: int
    boost_ghz: float
    hbm_gbs: float
    l2_bytes: int
    source: str
    device_names: tuple[str, ...] = ()
    tensor_rate: float = 1.0
    memory_gb: int | None = None

    @property
    def arch(self) -> ArchLimits:
        """Limits of the product's compute capability."""
        return arch_limits(self.compute_capability)

    @property
    def target(self) -> str:
        """nvcc's target, e.g. ``"sm_80"``."""
        return self.arch.target

    @property
    def mma_tflops(self) -> float:
        """Peak of ``mma.sync`` with 16-bit inputs and float32 accumulation at the boost clock, TFLOP/s."""
        return 2e-3 * self.arch.tensor_fma_per_clk * self.tensor_rate * self.num_sms * self.boost_ghz

    @property
    def wgmma_tflops(self) -> float:
        """The same of ``wgmma``; 0 where there is none."""
        return 2e-3 * self.arch.wgmma_fma_per_clk * self.num_sms * self.boost_ghz


@functools.lru_cache(maxsize=1)
def _rows() -> dict[str, Gpu]:
    rows = {}
    for name, row in tomllib.loads(_TOML.read_text(encoding="utf-8")).items():
        major, minor = row["compute_capability"].split(".")
        rows[name] = Gpu(
            name=name,
            title=row["title"],
            compute_capability=(int(major), int(minor)),
            num_sms=row["num_sms"],
            boost_ghz=float(row["boost_ghz"]),
            hbm_gbs=float(row["hbm_gbs"]),
            l2_bytes=int(row["l2_mb"] * 1024 * 1024),
            source=row["source"],
            device_names=tuple(row["device_names"]),
            tensor_rate=float(row.get("tensor_rate", 1.0)),
            memory_gb=row["memory_gb"],
        )
    return rows


def list_gpus() -> tuple[Gpu, ...]:
    """Every known product, in the order of ``gpus.toml``."""
    return tuple(_rows().values())


def get_gpu(name: str) -> Gpu:
    """The product with this slug (case does not matter).

    Raises:
        ArgumentError: No such product; the message names the nearest ones.
    """
    rows = _rows()
    slug = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    if slug in rows:
        return rows[slug]
    near = difflib.get_close_matches(slug, rows, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ArgumentError(f"gpu {name!r} is unknown; {hint}known are {', '.join(rows)}")


def device_slug(device_name: str) -> str:
    """Slug of a device that is not in the list: ``"NVIDIA RTX 4000 Ada"`` becomes ``"dev-rtx-4000-ada"``.

    The prefix keeps it apart from every listed product, so that a table of one is never an exact hit for the other.
    """
    words = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return "dev-" + (words.removeprefix("nvidia-").removeprefix("geforce-") or "unknown")


def match_device(
    device_name: str,
    compute_capability: tuple[int, int],
    num_sms: int,
    l2_bytes: int,
    *,
    boost_ghz: float | None = None,
    hbm_gbs: float | None = None,
) -> Gpu:
    """The listed product that this device is, or a row made from what the driver reports.

    A listed name whose SM count or capability differs (a MIG slice, a cut-down board) is not that product. Drivers
    before release 470 report names without "NVIDIA ".

    Args:
        device_name: As the driver reports it.
        compute_capability: ``(major, minor)``.
        num_sms: SMs the device shows.
        l2_bytes: L2 cache, bytes.
        boost_ghz: Maximum clock, if known; 1.5 GHz is assumed for an unlisted device.
        hbm_gbs: Memory bandwidth, if known; 6 GB/s per SM is assumed for an unlisted device.

    Raises:
        UnsupportedError: The compute capability is unknown.
    """
    capability = (int(compute_capability[0]), int(compute_capability[1]))
    arch_limits(capability)
    name = device_name.strip()
    bare = name.removeprefix("NVIDIA ")
    namesakes = [gpu for gpu in list_gpus() if bare in (known.removeprefix("NVIDIA ") for known in gpu.device_names)]
    for gpu in namesakes:
        if gpu.compute_capability == capability and gpu.num_sms == num_sms:
            return gpu
    slug = device_slug(name)
    if namesakes:
        slug = f"{slug}-{num_sms}sm"
    return Gpu(
        name=slug,
        title=name,
        compute_capability=capability,
        num_sms=num_sms,
        boost_ghz=boost_ghz or 1.5,
        hbm_gbs=hbm_gbs or 6.0 * num_sms,
        l2_bytes=l2_bytes,
        source="the driver's report of the device; clock and bandwidth assumed where it gives none",
        device_names=(name,),
    )
