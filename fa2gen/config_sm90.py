"""How the sm90 family's kernels compute (TMA, mbarriers, wgmma): their tunables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ArgumentError
from .identity import Canonical, require_bool, require_int, require_one_of

GROUP_ROWS = 64
"""Query rows of a consumer warpgroup: those of one wgmma."""

SCHEDULERS = ("static", "dynamic")
EPILOGUES = ("tma", "direct")


@dataclass(frozen=True)
class FwdSm90Config(Canonical):
    """How the forward kernel of the sm90 family computes it: the tunables.

    A block has a producer, which loads tiles by TMA, and consumer warpgroups with 64 query rows each. As many blocks as
    there are SMs walk over all query tiles.

    Attributes:
        block_m: Query rows of a tile (B_r): 64 for each consumer warpgroup, 1 to 3 of them.
        block_n: Keys of a tile (B_c), a multiple of 16.
        num_stages: K and V tiles in shared memory.
        q_stages: Q tiles in shared memory. With 2 the next one arrives while this one is in use.
        p_in_smem: P is the left operand of P V in shared memory, not in registers.
        overlap: A warpgroup computes Q K of a key tile while P V of the tile before runs.
        ping_pong: Warpgroups issue their products in turns, so that one's softmax runs under the others' products.
        scheduler: Which query tile a block takes next: ``"static"``, every n-th of n blocks; ``"dynamic"``, the first
            that nobody has taken.
        epilogue: How the output leaves: ``"tma"``, through Q's place in shared memory; ``"direct"``, from registers.
    """

    family: str = "sm90"
    block_m: int = 128
    block_n: int = 128
    num_stages: int = 2
    q_stages: int = 1
    p_in_smem: bool = False
    overlap: bool = True
    ping_pong: bool = True
    scheduler: str = "static"
    epilogue: str = "tma"

    _always = (
        "family",
        "block_m",
        "block_n",
        "num_stages",
        "q_stages",
        "overlap",
        "ping_pong",
        "scheduler",
        "epilogue",
    )

    def __post_init__(self) -> None:
        require_one_of("family", self.family, ("sm90",))
        for name in ("block_m", "block_n", "num_stages", "q_stages"):
            require_int(name, getattr(self, name), 1)
        for name in ("p_in_smem", "overlap", "ping_pong"):
            require_bool(name, getattr(self, name))
        require_one_of("scheduler", self.scheduler, SCHEDULERS)
        require_one_of("epilogue", self.epilogue, EPILOGUES)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; ``block_m`` may not give them whole rows (see ``constraints``)."""
        return self.block_m // GROUP_ROWS

    @property
    def num_threads(self) -> int:
        """The consumers' and the producer's warpgroup."""
        return 128 * (self.warpgroups + 1)

    # What is asked of every forward's config.

    @property
    def num_warps(self) -> int:
        return self.num_threads // 32

    @property
    def min_blocks(self) -> int:
        """Blocks of an SM that must fit: one fills it."""
        return 1

    @property
    def step_n(self) -> int:
        """Keys of a softmax step: those of a tile."""
        return self.block_n

    @property
    def softmax(self) -> str:
        """With the running maximum of every step."""
        return "online"

    @property
    def pack_gqa(self) -> bool:
        """Query tiles hold rows of one head."""
        return False

    @classmethod
    def from_slug(cls, slug: str) -> FwdSm90Config:
        """Inverse of :meth:`slug`.

        Raises:
            ArgumentError: Not a config's slug, or a value that is not legal.
        """
        match = re.fullmatch(
            r"sm90_(\d{1,6})x(\d{1,6})_st(\d{1,6})_q(\d{1,6})(_ps)?(_ov)?(_pp)?_([a-z]{3,})_([a-z]+)", slug, re.ASCII
        )
        if match is None:
            raise ArgumentError(f"config must read like {cls().slug()}, got {slug!r}")
        block_m, block_n, num_stages, q_stages, p_in_smem, overlap, ping_pong, scheduler, epilogue = match.groups()
        return cls(
            block_m=int(block_m),
            block_n=int(block_n),
            num_stages=int(num_stages),
            q_stages=int(q_stages),
            p_in_smem=bool(p_in_smem),
            overlap=bool(overlap),
            ping_pong=bool(ping_pong),
            scheduler=scheduler,
            epilogue=epilogue,
        )

    def slug(self) -> str:
        """Readable identity, e.g. ``sm90_128x128_st2_q1_ov_pp_static_tma``."""
        return (
            f"{self.family}_{self.block_m}x{self.block_n}_st{self.num_stages}_q{self.q_stages}"
            f"{'_ps' if self.p_in_smem else ''}{'_ov' if self.overlap else ''}{'_pp' if self.ping_pong else ''}"
            f"_{self.scheduler}_{self.epilogue}"
        )
