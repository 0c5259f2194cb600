"""What kernels compute (``KernelSpec``) and how (``FwdConfig``, ``FwdSm90Config``, ``BwdConfig``): what everything
else is keyed by.

A key is derived from the canonical form, which leaves out fields that hold their default: a field added later with a
default changes no existing key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .config_sm90 import FwdSm90Config as FwdSm90Config
from .errors import ArgumentError, UnsupportedError
from .identity import Canonical, require_bool, require_int, require_one_of

KINDS = ("fwd", "bwd")
DTYPES = ("fp16", "bf16")
NATIVE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
ALIGNMENTS = (16, 2)
SOFTMAXES = ("online", "guarded")
PROOFS = ("step", "block")
PIPELINES = ("barrier", "ring")
REDUCTIONS = ("scalar", "vector")
# Far beyond any model's; what checks a kernel needs memory for that many heads.
MAX_GQA_RATIO = 1024


@dataclass(frozen=True)
class KernelSpec(Canonical):
    """What a kernel computes; everything here is a constant of the compiled code.

    Attributes:
        kind: ``"fwd"``: output and LSE. ``"bwd"``: gradients of q, k and v, by three kernels in a row.
        head_dim: Head dimension of q, k and v, 1 to 256. Tiles have the width of ``native_head_dim``; columns beyond
            ``head_dim`` are neither read nor written.
        dtype: ``"fp16"`` or ``"bf16"``, of q, k, v and the output. Accumulation is float32.
        causal: Query i sees key j iff ``j <= i + seqlen_k - seqlen_q`` (bottom-right alignment).
        gqa_ratio: Query heads per key/value head, 1 to ``MAX_GQA_RATIO``; query head h reads key/value head
            ``h // gqa_ratio``.
        alignment: 16: every base address and stride is a multiple of 16 bytes, so rows move as 16-byte vectors.
            2: any element-aligned view, moved element by element; forward only.
        deterministic: Backward only: equal inputs give equal bits, as the blocks that share a row of dq add to it in a
            fixed order.
    """

    kind: str = "fwd"
    head_dim: int = 128
    dtype: str = "bf16"
    causal: bool = False
    gqa_ratio: int = 1
    alignment: int = 16
    deterministic: bool = False

    _always = ("kind", "head_dim", "dtype", "causal", "gqa_ratio")

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, KINDS)
        require_int("head_dim", self.head_dim, 1)
        require_one_of("dtype", self.dtype, DTYPES)
        require_bool("causal", self.causal)
        require_int("gqa_ratio", self.gqa_ratio, 1)
        require_one_of("alignment", self.alignment, ALIGNMENTS)
        require_bool("deterministic", self.deterministic)
        if self.head_dim > NATIVE_HEAD_DIMS[-1]:
            raise UnsupportedError(
                f"head_dim {self.head_dim} is not supported: this version has kernels for head dims 1 to "
                f"{NATIVE_HEAD_DIMS[-1]}"
            )
        if self.gqa_ratio > MAX_GQA_RATIO:
            raise UnsupportedError(
                f"gqa_ratio {self.gqa_ratio} is not supported: kernels have 1 to {MAX_GQA_RATIO} query heads per "
                "key/value head"
            )
        if self.alignment == 16 and self.head_dim % 8:
            advice = "use alignment 2" if self.kind == "fwd" else "backward kernels run others padded to one"
            raise ArgumentError(f"alignment 16 needs a head_dim that is a multiple of 8, got {self.head_dim}; {advice}")
        if self.kind == "bwd" and self.alignment != 16:
            raise UnsupportedError("alignment 2 is not supported by backward kernels: copy unaligned views")
        if self.kind == "fwd" and self.deterministic:
            raise ArgumentError("deterministic is for kind bwd: the forward always gives equal bits for equal inputs")

    @property
    def native_head_dim(self) -> int:
        """Width of the tiles: the smallest native head dim that holds ``head_dim``."""
        return next(native for native in NATIVE_HEAD_DIMS if native >= self.head_dim)

    def slug(self) -> str:
        """Readable identity for file and kernel names, e.g. ``fwd_d128_bf16_causal_gqa8``."""
        parts = [
            self.kind,
            f"d{self.head_dim}",
            self.dtype,
            "causal" if self.causal else "full",
            f"gqa{self.gqa_ratio}",
        ]
        if self.alignment != 16:
            parts.append(f"align{self.alignment}")
        if self.deterministic:
            parts.append("det")
        return "_".join(parts)


@dataclass(frozen=True)
class FwdConfig(Canonical):
    """How the forward kernel of the sm80 family computes it: the tunables.

    Which combinations are legal for a spec on a chip is decided in ``constraints.py`` alone.

    Attributes:
        block_m: Query rows per thread block (B_r).
        block_n: Keys per tile in shared memory (B_c).
        step_n: Keys per softmax step; divides ``block_n``. Scores of one step live in registers.
        num_warps: Warps per block; each owns ``block_m / num_warps`` query rows.
        num_stages: K and V tiles in shared memory; 1 shares FA2's two-barrier schedule, 2 and 3 prefetch whole tiles.
        q_in_regs: Keep Q's fragments in registers instead of re-reading them from shared memory for every tile.
        softmax: ``"online"``: running maximum for every step. ``"guarded"``: the maximum of the first visible keys
            stays the reference; where it no longer serves, the online formula takes over, so the result is as exact.
        min_blocks: Resident blocks per SM that the register budget must allow (``__launch_bounds__``).
        proof: How a guarded softmax knows that its reference served. ``"step"``: by the row sums of each step, and a
            step that fails is repeated in place (in bf16 |v| times the number of steps must be below 2e30: beyond,
            sums of p v may overflow). ``"block"``: by the finished output and sums, and a query block that fails is
            computed again; not for fp16.
        pipeline: ``"barrier"``: a barrier of the block hands over each tile. ``"ring"``: mbarriers of each stage, so
            that warps may drift apart.
        warps_n: Warps that share query rows, 1 or 2: each takes half of a step's keys, then half of the columns of V.
        pack_gqa: The rows of a query block are those of all query heads of a key/value head, position by position.
    """

    family: str = "sm80"
    block_m: int = 128
    block_n: int = 64
    step_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    q_in_regs: bool = False
    softmax: str = "online"
    min_blocks: int = 1
    proof: str = "step"
    pipeline: str = "barrier"
    warps_n: int = 1
    pack_gqa: bool = False

    _always = (
        "family",
        "block_m",
        "block_n",
        "step_n",
        "num_warps",
        "num_stages",
        "q_in_regs",
        "softmax",
        "min_blocks",
    )

    def __post_init__(self) -> None:
        require_one_of("family", self.family, ("sm80",))
        for name in ("block_m", "block_n", "step_n", "num_warps", "num_stages", "min_blocks", "warps_n"):
            require_int(name, getattr(self, name), 1)
        require_bool("q_in_regs", self.q_in_regs)
        require_bool("pack_gqa", self.pack_gqa)
        require_one_of("softmax", self.softmax, SOFTMAXES)
        require_one_of("proof", self.proof, PROOFS)
        require_one_of("pipeline", self.pipeline, PIPELINES)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp, or of the ``warps_n`` warps that share them."""
        return self.block_m * self.warps_n // self.num_warps

    @classmethod
    def from_slug(cls, slug: str) -> FwdConfig:
        """Inverse of :meth:`slug`.

        Raises:
            ArgumentError: Not a config's slug, or a value that is not legal.
        """
        match = re.fullmatch(
            r"([a-z0-9]+)_(\d{1,6})x(\d{1,6})s(\d{1,6})_w(\d{1,6})_st(\d{1,6})_(qr|qs)_([a-z]+)_mb(\d{1,6})(_pb)?(_ring)?(?:_wn(\d))?(_pack)?",
            slug,
            re.ASCII,
        )
        if match is None:
            raise ArgumentError(f"config must read like {cls().slug()}, got {slug!r}")
        family, block_m, block_n, step_n, num_warps, num_stages, q, softmax, min_blocks, proof, ring, warps_n, pack = (
            match.groups()
        )
        return cls(
            family=family,
            block_m=int(block_m),
            block_n=int(block_n),
            step_n=int(step_n),
            num_warps=int(num_warps),
            num_stages=int(num_stages),
            q_in_regs=q == "qr",
            softmax=softmax,
            min_blocks=int(min_blocks),
            proof="block" if proof else "step",
            pipeline="ring" if ring else "barrier",
            warps_n=int(warps_n or 1),
            pack_gqa=bool(pack),
        )

    def slug(self) -> str:
        """Readable identity, e.g. ``sm80_128x64s64_w4_st2_qs_guarded_mb2``."""
        return (
            f"{self.family}_{self.block_m}x{self.block_n}s{self.step_n}_w{self.num_warps}_st{self.num_stages}"
            f"_{'qr' if self.q_in_regs else 'qs'}_{self.softmax}_mb{self.min_blocks}"
            f"{'_pb' if self.proof == 'block' else ''}{'_ring' if self.pipeline == 'ring' else ''}"
            f"{f'_wn{self.warps_n}' if self.warps_n > 1 else ''}{'_pack' if self.pack_gqa else ''}"
        )


@dataclass(frozen=True)
class BwdConfig(Canonical):
    """How the backward kernels of the sm80 family compute it: the tunables.

    A block keeps a tile of K and V and its share of dK and dV; it walks over the queries. The first products are
    transposed, S^T = K Q^T, so that P^T and dS^T are the left operands of dV += P^T dO and dK += dS^T Q as they stand
    in registers; dS goes through shared memory once, for dQ = dS K.

    Attributes:
        block_m: Query rows of a tile of Q and dO (B_r).
        block_n: Keys of a block (B_c).
        step_m: Query rows whose scores live in registers at a time; divides ``block_m``.
        num_warps: Warps of a block.
        num_stages: Q and dO tiles in shared memory.
        roles: 1: each warp computes dK and dV of its keys. 2: one half of the warps computes S, P and dV, the other
            half dP, dS and dK of the same keys, P passing from one to the other through shared memory.
        warps_d: Warps (of one role) that share key rows, 1 or 2: each takes half of the queries in S^T and dP^T, then
            half of the columns of dV and dK.
        kv_in_regs: Keep the fragments of K and V in registers instead of re-reading them for every tile.
        reduction: How dQ is added up in global memory: ``"scalar"``, one float at a time; ``"vector"``, four (sm_90).
        ds_stages: dS tiles in shared memory. With 2, dQ of a tile is computed together with the next tile, and a tile
            costs one barrier of the block instead of two.
        split_heads: The query heads of a group have blocks of their own, which add dK and dV up in float32. Otherwise a
            block walks over all heads of its group.
        min_blocks: Resident blocks per SM that the register budget must allow (``__launch_bounds__``).
    """

    family: str = "sm80"
    block_m: int = 64
    block_n: int = 64
    step_m: int = 64
    num_warps: int = 4
    num_stages: int = 2
    roles: int = 1
    warps_d: int = 1
    kv_in_regs: bool = False
    reduction: str = "scalar"
    ds_stages: int = 1
    split_heads: bool = False
    min_blocks: int = 1

    _always = ("family", "block_m", "block_n", "step_m", "num_warps", "num_stages", "roles", "min_blocks")

    def __post_init__(self) -> None:
        require_one_of("family", self.family, ("sm80",))
        for name in (*self._always[1:], "warps_d", "ds_stages"):
            require_int(name, getattr(self, name), 1)
        require_bool("kv_in_regs", self.kv_in_regs)
        require_bool("split_heads", self.split_heads)
        require_one_of("reduction", self.reduction, REDUCTIONS)

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def warp_keys(self) -> int:
        """Key rows of a warp, or of the ``warps_d`` warps that share them."""
        return self.block_n * self.roles * self.warps_d // self.num_warps

    @classmethod
    def from_slug(cls, slug: str) -> BwdConfig:
        """Inverse of :meth:`slug`.

        Raises:
            ArgumentError: Not a config's slug, or a value that is not legal.
        """
        match = re.fullmatch(
            r"([a-z0-9]+)_(\d{1,6})x(\d{1,6})s(\d{1,6})_w(\d{1,6})_st(\d{1,6})_r(\d{1,6})_mb(\d{1,6})"
            r"(?:_wd(\d))?(_kvr)?(_v4)?(?:_ds(\d))?(_sh)?",
            slug,
            re.ASCII,
        )
        if match is None:
            raise ArgumentError(f"config must read like {cls().slug()}, got {slug!r}")
        numbers = ("block_m", "block_n", "step_m", "num_warps", "num_stages", "roles", "min_blocks")
        warps_d, kv_in_regs, vector, ds_stages, split_heads = match.groups()[8:]
        return cls(
            family=match[1],
            **{name: int(value) for name, value in zip(numbers, match.groups()[1:8], strict=True)},
            warps_d=int(warps_d or 1),
            kv_in_regs=bool(kv_in_regs),
            reduction="vector" if vector else "scalar",
            ds_stages=int(ds_stages or 1),
            split_heads=bool(split_heads),
        )

    def slug(self) -> str:
        """Readable identity, e.g. ``sm80_64x128s64_w8_st2_r2_mb1_v4``."""
        return (
            f"{self.family}_{self.block_m}x{self.block_n}s{self.step_m}_w{self.num_warps}_st{self.num_stages}"
            f"_r{self.roles}_mb{self.min_blocks}{f'_wd{self.warps_d}' if self.warps_d > 1 else ''}"
            f"{'_kvr' if self.kv_in_regs else ''}{'_v4' if self.reduction == 'vector' else ''}"
            f"{f'_ds{self.ds_stages}' if self.ds_stages > 1 else ''}{'_sh' if self.split_heads else ''}"
        )


ForwardConfig = FwdConfig | FwdSm90Config
Config = FwdConfig | FwdSm90Config | BwdConfig

# kind -> its families' configs, by the family; the first is the one that runs on every supported GPU.
FAMILIES: dict[str, dict[str, type[FwdConfig] | type[FwdSm90Config] | type[BwdConfig]]] = {
    "fwd": {"sm80": FwdConfig, "sm90": FwdSm90Config},
    "bwd": {"sm80": BwdConfig},
}


def config_class(kind: str, family: str) -> type[FwdConfig] | type[FwdSm90Config] | type[BwdConfig]:
    """The class of a family's configs.

    Raises:
        ArgumentError: No family of that name has kernels of this kind.
    """
    require_one_of("family", family, tuple(FAMILIES[kind]))
    return FAMILIES[kind][family]


def config_from_canonical(kind: str, form: dict[str, Any]) -> Config:
    """Inverse of a config's ``canonical()``, whose family decides the class; without one it is the first.

    Raises:
        ArgumentError: A field is unknown or its value is not legal.
    """
    return config_class(kind, form.get("family", next(iter(FAMILIES[kind])))).from_canonical(form)


def config_from_slug(kind: str, slug: str) -> Config:
    """Inverse of a config's ``slug()``, which begins with the family.

    Raises:
        ArgumentError: Not a config's slug, or a value that is not legal.
    """
    family = slug.partition("_")[0]
    if re.fullmatch(r"sm\d+", family, re.ASCII) and family not in FAMILIES[kind]:
        raise ArgumentError(f"config {slug!r} is of family {family}; {kind} has {' and '.join(FAMILIES[kind])}")
    first = next(iter(FAMILIES[kind]))
    return config_class(kind, family if family in FAMILIES[kind] else first).from_slug(slug)
