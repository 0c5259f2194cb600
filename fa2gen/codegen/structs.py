"""The parameter structs of the kernels."""

from __future__ import annotations

from .params import Field, ParamStruct


def _strides(tensor: str, heading: tuple[str, ...] = ()) -> tuple[Field, ...]:
    return tuple(
        Field("i64", f"{tensor}_{axis}_stride", f"elements from one {axis} of {tensor} to the next", heading * (not i))
        for i, axis in enumerate(("batch", "row", "head"))
    )


FWD_PARAMS = ParamStruct(
    "FwdParams",
    "// ---- Parameters, passed by value",
    (
        Field("gptr<const Element>", "q", "(batch, seqlen_q, num_heads, head_dim)", ("Addresses on the GPU.",)),
        Field("gptr<const Element>", "k", "(batch, seqlen_k, num_heads / gqa_ratio, head_dim)"),
        Field("gptr<const Element>", "v", "(batch, seqlen_k, num_heads / gqa_ratio, head_dim)"),
        Field("gptr<Element>", "o", "(batch, seqlen_q, num_heads, head_dim)"),
        Field("gptr<float>", "softmax_lse", "(batch, num_heads, seqlen_q), contiguous, natural logarithm; may be null"),
        Field("gptr<u32>", "repairs", "guarded softmax: each warp adds the number of its repeated steps; may be null"),
        *_strides("q", ("A row is one query or key. An input's stride may be 0: that dimension is repeated.",)),
        *_strides("k"),
        *_strides("v"),
        *_strides("o"),
        # Uniform operands of the loop's adds. Multiplying the row stride there took some 20 instructions of 640 a tile;
        # without them, and with lane addresses kept, d 128 full went from 1.16 to 1.19 of FA2 (H200, geomean).
        Field(
            "i64",
            "k_pass_bytes",
            "kRowsPerPass * k_row_stride * 2: bytes from one copy pass to the next",
            ("Multiples of the row strides, so that the loop adds where it would multiply.",),
        ),
        Field("i64", "v_pass_bytes", "kRowsPerPass * v_row_stride * 2"),
        Field("i64", "k_tile_bytes", "block_n * k_row_stride * 2: bytes from one tile to the next"),
        Field("i64", "v_tile_bytes", "block_n * v_row_stride * 2"),
        Field("int", "batch", "at least 1", ("Sizes.",)),
        Field("int", "num_heads", "query heads, at least 1"),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "seqlen_k", "may be 0"),
        Field("int", "num_m_blocks", "ceil(rows / block_m); rows are seqlen_q, of packed heads seqlen_q * gqa_ratio"),
        Field(
            "int",
            "heads_per_section",
            "heads (or sets of packed ones) whose K and V fit in half of L2; 1 to all are right",
        ),
        Field(
            "int",
            "tail_m_blocks",
            "query blocks, each head's first, that start after all others; 0 to num_m_blocks are right",
        ),
        Field("float", "softmax_scale", "at least 0, usually 1 / sqrt(head_dim)"),
        Field("float", "scale_log2", "softmax_scale * log2(e); where that is 0, a positive number as small as 2^-149"),
    ),
)

_HEADS = ("Sizes.",)
_ADDRESSES = ("Addresses on the GPU.",)
_QUERY_TENSOR = "(batch, seqlen_q, num_heads, head_dim)"
_KEY_TENSOR = "(batch, seqlen_k, num_heads / gqa_ratio, head_dim)"
_QUERY_ROWS = "(batch, num_heads, padded_seqlen_q)"

BWD_PREPROCESS_PARAMS = ParamStruct(
    "BwdPreprocessParams",
    "// ---- Parameters, passed by value",
    (
        Field("gptr<const Element>", "o", _QUERY_TENSOR, _ADDRESSES),
        Field("gptr<const Element>", "dout", "gradient of o"),
        Field("gptr<const float>", "lse", "(batch, num_heads, seqlen_q), contiguous, of the forward"),
        Field("gptr<const float>", "dlse", "its gradient, likewise; may be null"),
        Field("gptr<float>", "lse_log2", f"{_QUERY_ROWS}, contiguous: lse * log2(e), +inf where a row sees no key"),
        Field("gptr<float>", "delta", f"{_QUERY_ROWS}, contiguous: rowsum(dout * o) - dlse"),
        Field("gptr<float>", "dq_accum", "sums of dq; cleared, as are the next three"),
        Field("gptr<float>", "dk_accum", "sums of dk; may be null"),
        Field("gptr<float>", "dv_accum", "sums of dv; may be null"),
        Field("gptr<float>", "semaphores", "counters of a deterministic backward; may be null"),
        *_strides("o", ("A row is one query. A stride of dout may be 0: that dimension is repeated.",)),
        *_strides("dout"),
        Field("i64", "dq_accum_bytes", "multiples of 16", ("Bytes to clear.",)),
        Field("i64", "dkv_accum_bytes", "of dk_accum and of dv_accum"),
        Field("i64", "semaphores_bytes", "of semaphores"),
        Field("int", "num_heads", "query heads", _HEADS),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "padded_seqlen_q", "seqlen_q in whole tiles of the next kernel"),
        Field("int", "num_row_blocks", "thread blocks of a head: ceil(padded_seqlen_q / kBlockRows)"),
    ),
)

BWD_PARAMS = ParamStruct(
    "BwdParams",
    "// ---- Parameters, passed by value",
    (
        Field("gptr<const Element>", "q", _QUERY_TENSOR, _ADDRESSES),
        Field("gptr<const Element>", "k", _KEY_TENSOR),
        Field("gptr<const Element>", "v", _KEY_TENSOR),
        Field("gptr<const Element>", "dout", f"{_QUERY_TENSOR}: gradient of the output"),
        Field("gptr<Element>", "dk", _KEY_TENSOR),
        Field("gptr<Element>", "dv", _KEY_TENSOR),
        Field("gptr<const float>", "lse_log2", "(batch, num_heads, num_m_blocks * block_m): of the kernel before"),
        Field("gptr<const float>", "delta", "likewise"),
        Field("gptr<float>", "dq_accum", "sums of dq / softmax_scale, which the kernel before has cleared"),
        Field("gptr<float>", "dk_accum", "sums of dk / softmax_scale, cleared"),
        Field("gptr<float>", "dv_accum", "sums of dv, cleared"),
        Field("gptr<u32>", "semaphores", "(batch, num_heads, num_m_blocks), cleared"),
        *_strides("q", ("A row is one query or key. An input's stride may be 0: that dimension is repeated.",)),
        *_strides("k"),
        *_strides("v"),
        *_strides("dout"),
        *_strides("dk"),
        *_strides("dv"),
        Field(
            "i64",
            "q_pass_bytes",
            "kRowsPerPass * q_row_stride * 2: bytes from one copy pass to the next",
            ("Multiples of the row strides, so that the loop adds where it would multiply.",),
        ),
        Field("i64", "dout_pass_bytes", "kRowsPerPass * dout_row_stride * 2"),
        Field("i64", "q_tile_bytes", "block_m * q_row_stride * 2: bytes from one tile to the next"),
        Field("i64", "dout_tile_bytes", "block_m * dout_row_stride * 2"),
        Field("int", "batch", "at least 1", _HEADS),
        Field("int", "num_heads", "query heads, at least 1"),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "seqlen_k", "at least 1"),
        Field("int", "num_m_blocks", "ceil(seqlen_q / block_m)"),
        Field("int", "num_n_blocks", "ceil(seqlen_k / block_n)"),
        Field("int", "heads_per_section", "heads whose blocks start together; 1 to all are right"),
        Field("float", "softmax_scale", "at least 0, usually 1 / sqrt(head_dim)"),
        Field("float", "scale_log2", "softmax_scale * log2(e); where that is 0, a positive number as small as 2^-149"),
    ),
)

BWD_POSTPROCESS_PARAMS = ParamStruct(
    "BwdPostprocessParams",
    "// ---- Parameters, passed by value",
    (
        Field("gptr<const float>", "dq_accum", "sums of dq / softmax_scale", _ADDRESSES),
        Field("gptr<const float>", "dk_accum", "sums of dk / softmax_scale"),
        Field("gptr<const float>", "dv_accum", "sums of dv"),
        Field("gptr<Element>", "dq", _QUERY_TENSOR),
        Field("gptr<Element>", "dk", "(batch, seqlen_k, num_heads_k, head_dim)"),
        Field("gptr<Element>", "dv", "(batch, seqlen_k, num_heads_k, head_dim)"),
        *_strides("dq", ("A row is one query or key.",)),
        *_strides("dk"),
        *_strides("dv"),
        Field("int", "num_heads", "query heads", _HEADS),
        Field("int", "num_heads_k", "key/value heads"),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "seqlen_k", "at least 1"),
        Field("int", "padded_seqlen_q", "rows of dq_accum of a head"),
        Field("int", "padded_seqlen_k", "rows of dk_accum and dv_accum of a head"),
        Field(
            "int",
            "num_dq_blocks",
            "thread blocks for dq: batch * num_heads * ceil(padded_seqlen_q / kBlockRows)",
        ),
        Field("int", "num_dk_blocks", "thread blocks for dk, and as many for dv; 0 where these are no sums of several"),
        Field("float", "softmax_scale", "at least 0, usually 1 / sqrt(head_dim)"),
    ),
)

FWD_SM90_PARAMS = ParamStruct(
    "FwdParams",
    "// ---- Parameters, passed by value",
    (
        Field(
            "TensorMap", "q_map", "axes (head_dim, seqlen_q, num_heads, batch), box 64 x 64", ("How TMA sees tensors.",)
        ),
        Field("TensorMap", "k_map", "(head_dim, seqlen_k, num_heads / gqa_ratio, batch), box 64 x block_n"),
        Field("TensorMap", "v_map", "likewise"),
        Field("TensorMap", "o_map", "(head_dim, seqlen_q, num_heads, batch), box 64 x 64; read where O leaves by TMA"),
        Field(
            "gptr<Element>", "o", f"{_QUERY_TENSOR}; read in any case: tiles without keys get zeros here", _ADDRESSES
        ),
        Field("gptr<float>", "softmax_lse", "(batch, num_heads, seqlen_q), contiguous, natural logarithm; may be null"),
        Field(
            "gptr<u64>", "tickets", "one word, 0 at first, that no other launch uses meanwhile; where tiles are drawn"
        ),
        Field("gptr<u32>", "repairs", "guarded softmax: each warp adds the number of its repeated tiles; may be null"),
        *_strides("o", ("A row is one query.",)),
        Field("int", "batch", "at least 1", _HEADS),
        Field("int", "num_heads", "query heads, at least 1"),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "seqlen_k", "may be 0"),
        Field("int", "num_m_blocks", "ceil(seqlen_q / block_m)"),
        Field("int", "num_tiles", "batch * num_heads * num_m_blocks"),
        Field("int", "heads_per_section", "heads whose K and V stay in L2 together; 1 to all are right"),
        Field("int", "tail_m_blocks", "query tiles, each head's first, that come after all others; 0 to all are right"),
        Field("float", "softmax_scale", "at least 0, usually 1 / sqrt(head_dim)"),
        Field("float", "scale_log2", "softmax_scale * log2(e); where that is 0, a positive number as small as 2^-149"),
    ),
)

PARAMS = {
    "fwd": FWD_PARAMS,
    "bwd_preprocess": BWD_PREPROCESS_PARAMS,
    "bwd": BWD_PARAMS,
    "bwd_postprocess": BWD_POSTPROCESS_PARAMS,
}
"""Parameter struct of each kernel of the sm80 family, by its name (see ``manifest.kernels_of``)."""


def param_struct(kernel: str, family: str) -> ParamStruct:
    """Parameter struct of a kernel (see ``manifest.kernels_of``) of a family."""
    return FWD_SM90_PARAMS if (kernel, family) == ("fwd", "sm90") else PARAMS[kernel]
