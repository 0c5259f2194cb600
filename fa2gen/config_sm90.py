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
SOFTMAXES = ("online", "guarded")


@dataclass(frozen=True)
class FwdSm90Config(Canonical):
    """How the forward kernel of the sm90 family computes it: the tunables.

    A block has a producer, which loads tiles by TMA, and consumer warpgroups with 64 query rows each. As many blocks as
    there are SMs walk over all query tiles.

    Attributes:
        block_m: Query rows of a tile (B_r): 64 for each consumer warpgroup, 1 to 4 of them.
        block_n: Keys of a tile (B_c), a multiple of 16.
        num_stages: K and V tiles in shared memory.
        q_stages: Q tiles in shared memory. With 2 the next one arrives while this one is in use.
        k_extra: So many more of K alone: 0 or 1.
        q_regs: So many k16 steps of Q are left operands of Q K in registers, and not in shared memory.
        q_extra: With 1 of them, for so many warpgroups the next rows of Q arrive while all others are in use.
        p_in_smem: P is the left operand of P V in shared memory, not in registers.
        overlap: A warpgroup computes Q K of a key tile while P V of the tile before runs.
        ping_pong: Warpgroups issue their products in turns, so that one's softmax runs under the others' products.
        scheduler: Which query tile a block takes next: ``"static"``, every n-th of n blocks; ``"dynamic"``, the first
            that nobody has taken.
        epilogue: How the output leaves: ``"tma"``, through Q's place in shared memory; ``"direct"``, from registers.
        softmax: ``"online"``, with the running maximum of every key tile; ``"guarded"``, against the reference of the
            tiles that need a mask, or of the first, and a key tile whose sums leave their range is repaired.
        overlap_tiles: The end of a query tile runs under the first product of the next.
        section_mib: MiB of K and V that stay in L2 while a causal kernel goes through their heads; 0: a quarter of L2.
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
    softmax: str = "online"
    overlap_tiles: bool = False
    section_mib: int = 0
    q_extra: int = 0
    k_extra: int = 0
    q_regs: int = 0

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
        require_int("section_mib", self.section_mib, 0)
        require_int("q_extra", self.q_extra, 0)
        require_int("k_extra", self.k_extra, 0)
        require_int("q_regs", self.q_regs, 0)
        for name in ("p_in_smem", "overlap", "ping_pong", "overlap_tiles"):
            require_bool(name, getattr(self, name))
        require_one_of("scheduler", self.scheduler, SCHEDULERS)
        require_one_of("epilogue", self.epilogue, EPILOGUES)
        require_one_of("softmax", self.softmax, SOFTMAXES)

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; ``block_m`` may not give them whole rows (see ``constraints``)."""
        return self.block_m // GROUP_ROWS

    @property
    def k_stages(self) -> int:
        """K tiles in shared memory."""
        return self.num_stages + self.k_extra

    @property
    def q_tiles(self) -> int:
        """Tiles of 64 rows of Q in shared memory."""
        return self.q_stages * self.warpgroups + self.q_extra

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
            r"sm90_(\d{1,6})x(\d{1,6})_st(\d{1,6})(?:x(\d{1,6}))?_q(\d{1,6})(?:x(\d{1,6}))?(?:r(\d{1,6}))?(_ps)?(_ov)?(_xt)?(_pp)?(_guarded)?"
            r"_([a-z]{3,})_([a-z]+)(?:_l2s(\d{1,6}))?",
            slug,
            re.ASCII,
        )
        if match is None:
            raise ArgumentError(f"config must read like {cls().slug()}, got {slug!r}")
        block_m, block_n, num_stages, k_extra, q_stages, q_extra, q_regs = (
            int(number or 0) for number in match.groups()[:7]
        )
        p_in_smem, overlap, overlap_tiles, ping_pong, guarded, scheduler, epilogue, section_mib = match.groups()[7:]
        return cls(
            block_m=block_m,
            block_n=block_n,
            num_stages=num_stages,
            k_extra=k_extra,
            q_stages=q_stages,
            q_extra=q_extra,
            q_regs=q_regs,
            p_in_smem=bool(p_in_smem),
            overlap=bool(overlap),
            ping_pong=bool(ping_pong),
            scheduler=scheduler,
            epilogue=epilogue,
            softmax="guarded" if guarded else "online",
            overlap_tiles=bool(overlap_tiles),
            section_mib=int(section_mib or 0),
        )

    def slug(self) -> str:
        """Readable identity, e.g. ``sm90_128x128_st2_q1_ov_pp_static_tma``."""
        words = (
            ("ps", self.p_in_smem),
            ("ov", self.overlap),
            ("xt", self.overlap_tiles),
            ("pp", self.ping_pong),
            ("guarded", self.softmax == "guarded"),
        )
        said = "".join(f"_{word}" for word, there in words if there)
        stages, q_tiles = (
            f"{count}x{extra}" if extra else f"{count}"
            for count, extra in ((self.num_stages, self.k_extra), (self.q_stages, self.q_extra))
        )
        section = f"_l2s{self.section_mib}" if self.section_mib else ""
        q_regs = f"r{self.q_regs}" if self.q_regs else ""
        return (
            f"{self.family}_{self.block_m}x{self.block_n}_st{stages}_q{q_tiles}{q_regs}{said}"
            f"_{self.scheduler}_{self.epilogue}{section}"
        )
