"""An explanation as text: sections of at most 100 columns, every number with its unit."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..explain import Explanation, MeasuredTime
from ..roofline import Traffic, packed_heads
from ..spec import BwdConfig, ForwardConfig, FwdConfig, FwdSm90Config
from ..tuning.model import model_version, validity
from .units import count_text

WIDTH = 100
_LABEL = 22
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def explanation_text(e: Explanation, *, list_excluded: bool = False) -> str:
    """The whole text.

    Args:
        e: The explanation.
        list_excluded: Every excluded config with its reason, not only their counts.
    """
    sections = (_head(e), _work(e), _traffic(e), _roofline(e), _config(e), _launches(e), _smem(e), _registers(e))
    rest = (_occupancy(e), _grid(e), _time(e), _space(e, list_excluded))
    lines = [line for section in (*sections, *rest) for line in section]
    return "\n".join(lines)


def _row(label: str, *parts: str) -> Iterator[str]:
    """A labelled line; what is too long goes on below its beginning."""
    prefix = f"  {label:<{_LABEL}}"
    yield from textwrap.wrap(
        "".join(parts), WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_long_words=False
    )


def _head(e: Explanation) -> Iterator[str]:
    gpu = e.gpu
    yield f"{e.spec.slug()} on {gpu.title} ({gpu.name})"
    yield from _row("problem", _sizes(e), f"; size class {e.problem.bucket(gpu.num_sms).label()}")
    clock = f"{gpu.num_sms} SMs at up to {gpu.boost_ghz:.3g} GHz"
    yield from _row("chip", f"{gpu.target}, {clock}, {gpu.hbm_gbs:,.0f} GB/s, {gpu.l2_bytes >> 20} MiB of L2")


def _sizes(e: Explanation | MeasuredTime) -> str:
    p = e.problem if isinstance(e, Explanation) else e.entry.measurement.problem
    heads = count_text(p.num_heads_q, "query head")
    return f"batch {p.batch}, {heads} over {p.num_heads_k}, seqlen {p.seqlen_q} x {p.seqlen_k}"


def _work(e: Explanation) -> Iterator[str]:
    yield "Work"
    pairs = "visible query-key pairs, exactly" if e.spec.causal else "query-key pairs"
    products = 4 if e.spec.kind == "fwd" else 10
    yield from _row("FLOPs", f"{_flops(e.flops)}: {products} x head dim x {pairs}")
    share = e.flops / e.executed_flops if e.executed_flops else 0.0
    tile = f"{e.selection.config.block_m} x {e.selection.config.block_n} tiles"
    yield from _row("executed", f"{_flops(e.executed_flops)} in whole {tile}: {share:.1%} of them asked for")


def _traffic(e: Explanation) -> Iterator[str]:
    memory = e.memory
    yield f"{'HBM traffic':<34}{'bytes':>10}{'FLOP/byte':>12}{'at least':>14}   bound by"
    for name, traffic in (
        ("standard attention", memory.standard),
        (f"{_this(e)}, L2 serves re-reads", memory.tiled),
        (f"{_this(e)}, L2 serves none", memory.uncached),
    ):
        yield (
            f"  {name:<32}{_bytes(traffic.bytes):>10}{_number(traffic.intensity):>12}"
            f"{_ms(e.roofline.least_ms(traffic)):>14}   {e.roofline.bound(traffic.intensity)}"
        )
    masked = "; computes what the mask hides too" if e.spec.causal else ""
    yield from _row("standard", _passes(memory.standard), masked)
    yield from _row(_this(e), _passes(memory.tiled))
    yield from _row("L2", "; ".join(_l2(e)))


def _l2(e: Explanation) -> Iterator[str]:
    """What blocks read again at a time, and whether L2 holds it."""
    memory = e.memory
    what = "K and V" if e.spec.kind == "fwd" else "Q, dO and the sums of dQ"
    yield f"{what} of a head are {_kib(memory.reread_bytes)}"
    kinds = "query heads" if _by_query_heads(e) else "key/value heads"
    at_a_time = f"blocks go through the {kinds} {memory.heads_per_section:,} at a time"
    if memory.heads_per_section > memory.heads_by_l2:
        # Blocks of one head wait for each other, those of several do not.
        at_a_time += f", for L2 alone it would be {memory.heads_by_l2:,}, but sums in a fixed order wait less with more"
    config = e.selection.config
    if isinstance(config, FwdSm90Config) and e.spec.causal and config.section_mib:
        at_a_time += f", for the config has sections of {config.section_mib} MiB"
    used = f", about {memory.used_share:.0%} of it in use at a time" if memory.used_share < 0.995 else ""
    yield f"{at_a_time}: {_kib(memory.section_bytes)}{used}"
    if memory.tail_bytes:
        if isinstance(config, FwdSm90Config):
            tiles = count_text(memory.tail_blocks, "query tile")
            last = f"{tiles} of each head, the shortest, come last"
        else:
            last = "the short half of the query blocks comes last"
        yield f"{last}, of all heads together: up to {_kib(memory.tail_bytes)}"
    l2 = f"{_kib(memory.l2_bytes)} of L2"
    if memory.l2_serves:
        yield f"this fits in {l2}, and re-reads hit it"
    else:
        yield f"this does not fit in {l2}, and re-reads miss it in part: between the last two rows"


def _this(e: Explanation) -> str:
    return "this kernel" if e.spec.kind == "fwd" else "these kernels"


def _by_query_heads(e: Explanation) -> bool:
    """Whether the grid counts query heads, or groups of them."""
    config = e.selection.config
    return e.spec.gqa_ratio == 1 or not isinstance(config, BwdConfig) or config.split_heads


def _passes(traffic: Traffic) -> str:
    return ", ".join(f"{what} {_bytes(size)}" for what, size in traffic.passes)


def _roofline(e: Explanation) -> Iterator[str]:
    roof, intensity = e.roofline, e.memory.tiled.intensity
    yield "Roofline"
    peak = f"{roof.peak_tflops:.1f} TFLOP/s of {roof.instruction} with float32 sums"
    yield from _row("ridge point", f"{roof.ridge_point:.1f} FLOP/byte: {peak} over {roof.hbm_gbs:,.0f} GB/s")
    side = intensity / roof.ridge_point
    where = f"{_number(side)} times the ridge point" if side >= 1 else f"{side:.2g} of the ridge point"
    most = f"at most {roof.attainable_tflops(intensity):,.1f} TFLOP/s"
    yield from _row(_this(e), f"{_number(intensity)} FLOP/byte, {where}: {roof.bound(intensity)} bound, {most}")


_ORIGINS = {"tuned": "by table lookup: ", "default": "the default config: ", "given": ""}


def _config(e: Explanation) -> Iterator[str]:
    selection = e.selection
    yield f"Config {selection.config.slug()}"
    yield from _row("chosen", _ORIGINS[selection.origin], selection.why)
    if selection.origin != "tuned":
        yield from _row("table lookup", selection.match.describe())
    if not isinstance(selection.config, BwdConfig):
        yield from _row("softmax", _softmax(selection.config))
    if isinstance(selection.config, FwdSm90Config):
        yield from _row("at the same time", "; ".join(_overlaps(selection.config)))
    if selection.illegal:
        yield from _row("excluded, illegal", str(selection.excluded))
    elif selection.excluded is not None:
        yield from _row("legal, but not tried", selection.excluded)


def _softmax(config: ForwardConfig) -> str:
    step = "key tile" if config.step_n == config.block_n else f"step of {config.step_n} keys"
    if config.softmax == "online":
        return f"online: a running maximum, taken of every {step}"
    whole_block = isinstance(config, FwdConfig) and config.proof == "block"
    again = "query block" if whole_block else step
    return (
        f"guarded: a maximum is taken of the first {step} and of those with a mask only; a {again} that leaves the "
        "range of its numbers is computed again"
    )


def _overlaps(config: FwdSm90Config) -> Iterator[str]:
    """What a consumer of Hopper's forward does while products run."""
    yield (
        "a key tile's softmax with P V of the tile before"
        if config.overlap
        else "nothing: a consumer's products and softmax follow each other"
    )
    if config.ping_pong:
        yield "consumers issue products in turns: one's softmax with the others' products"
    if config.overlap_tiles:
        yield "the end of a query tile with Q K of the next one's first key tile"


def _launches(e: Explanation) -> Iterator[str]:
    if len(e.plan.launches) == 1:
        return
    yield "Launches, in a row; what follows is of the main one"
    for step in e.plan.launches:
        yield from _row(step.kernel, f"{step.grid[0]:,} blocks of {step.num_threads} threads")
    sizes = ", ".join(f"{workspace.pointer} {_kib(workspace.num_bytes)}" for workspace in e.plan.workspaces)
    yield from _row("workspaces", sizes)


def _smem(e: Explanation) -> Iterator[str]:
    limit = e.gpu.arch.max_smem_per_block
    yield f"Shared memory: {e.smem_bytes:,} bytes a block, {e.smem_bytes / limit:.0%} of the {limit:,} it may have"
    areas = e.smem_areas()
    width = max(10, *(len(name) + 1 for name, *_ in areas))
    for name, offset, size, shape in areas:
        yield f"  {name:<{width}}{offset:>8,} to {offset + size:>8,}  {_kib(size):>9}   {shape}"


def _registers(e: Explanation) -> Iterator[str]:
    registers, config = e.registers, e.selection.config
    yield "Registers of a thread"
    if registers.compiled is None:
        facts = registers.facts
        estimate = f"{facts.registers}, {facts.spill_bytes} bytes of spill stores and loads"
        yield from _row("estimated", f"{estimate} ({registers.note})")
    else:
        r = registers.compiled.resources
        spills = f"{r.spill_store_bytes} bytes of spill stores, {r.spill_load_bytes} of spill loads"
        yield from _row("by ptxas", f"{r.registers}; {spills}, {r.stack_bytes} of stack")
    bounds = f"launch bounds of {config.num_threads} threads x {config.min_blocks}"
    least = f"about {registers.least} for accumulators and fragments"
    if registers.split is None:
        yield from _row("needed and granted", f"{least}; {bounds} leave {registers.cap}")
        return
    split = f"setmaxnreg makes of them {registers.split.producer} for the producer, {registers.split.consumer} for a"
    yield from _row("needed and granted", f"{least}; {bounds} leave {registers.cap}, and {split} consumer")


def _occupancy(e: Explanation) -> Iterator[str]:
    o, most = e.occupancy, e.gpu.arch.max_warps_per_sm
    yield "Occupancy"
    warps_each = count_text(e.selection.config.num_warps, "warp")
    blocks = f"{count_text(o.blocks_per_sm, 'block')} of {warps_each} an SM"
    warps = f"{o.warps_per_sm} of {most} warps ({o.warps_per_sm / most:.0%})"
    yield from _row("resident", f"{blocks}: {warps}, limited by {' and '.join(o.limiters)}")
    yield from _row("blocks allowed by", ", ".join(f"{name} {count}" for name, count in o.blocks_by_limit.items()))


def _grid(e: Explanation) -> Iterator[str]:
    grid, p, config = e.grid, e.problem, e.selection.config
    yield "Grid"
    if isinstance(config, BwdConfig):
        tiles = f"{count_text(-(-p.seqlen_k // config.block_n), 'key tile')} of {config.block_n}"
        shared = 1 if _by_query_heads(e) else e.spec.gqa_ratio
        rows = "" if shared == 1 else f"; each walks over {shared} query heads"
    else:
        shared = packed_heads(e.spec, config)
        tiles = f"{count_text(-(-p.seqlen_q * shared // config.block_m), 'query tile')} of {config.block_m}"
        rows = "" if shared == 1 else f"; the rows of {shared} query heads share them"
    heads = count_text(p.num_heads_q, "head") if shared == 1 else count_text(p.num_heads_k, "key/value head")
    counted = f"{grid.work:,} = {p.batch} x {heads} x {tiles}{rows}"
    if grid.persistent:
        yield from _row("tiles", counted)
        yield from _row("blocks", f"{grid.blocks:,}, at most one for each SM; they walk over the tiles")
    else:
        yield from _row("blocks", counted)
    if grid.wave == 0:
        yield from _row("waves", "no block fits an SM")
        return
    if grid.persistent:
        yield from _row("tiles of a block", _tiles_of_a_block(e))
        return
    tail = f", a tail of {grid.tail:,}; {grid.efficiency:.1%} of the slots filled" if grid.tail else ""
    order = "; longest blocks first" if e.spec.causal else ""
    yield from _row("waves", f"{grid.waves:,.2f} of {grid.wave:,} blocks: {grid.full_waves:,} full{tail}{order}")


def _tiles_of_a_block(e: Explanation) -> str:
    grid, config = e.grid, e.selection.config
    each = f"{grid.full_waves:,} each"
    more = (
        f", {count_text(grid.tail, 'block')} one more; {grid.efficiency:.1%} of the slots filled" if grid.tail else ""
    )
    drawn = isinstance(config, FwdSm90Config) and config.scheduler == "dynamic"
    taken = "blocks take the next as they finish" if drawn else "they go to the blocks in turn"
    order = ", longest first" if e.spec.causal else ""
    return f"{grid.waves:,.2f}: {each}{more}; {taken}{order}"


def _time(e: Explanation) -> Iterator[str]:
    prediction = e.prediction
    yield "Time"
    if prediction.blocks_per_sm == 0:
        yield from _row("predicted", "none: no block fits an SM")
    elif e.selection.illegal:
        yield from _row("predicted", "none: there is no such kernel")
    else:
        share = e.tflops / e.roofline.peak_tflops
        peak = f"{share:.0%} of the peak" if share >= 0.1 else f"{100 * share:.2g}% of the peak"
        yield from _row("predicted", f"{_ms(prediction.ms)}, {e.tflops:.1f} TFLOP/s, {peak}; limit: {prediction.limit}")
        # What no resource accounts for: launch, latencies, barriers, lost overlap and the tail.
        rest = prediction.ms - max(prediction.shares.values(), default=0.0)
        resources = sorted(prediction.shares.items(), key=lambda item: -item[1])
        for name, ms in [*((f"{name} alone", ms) for name, ms in resources), ("waits, tail, launch", rest)]:
            share = ms / prediction.ms
            yield f"  {'  ' + name:<{_LABEL}}{_ms(ms):>10}{share:>6.0%}  {'#' * round(40 * share)}".rstrip()
        model = (e.spec.kind, e.selection.config.family)
        yield from _row("model", f"{model_version(*model)}, {validity(e.gpu, *model)}")
    for time in e.measured:
        yield from _row("measured", _measured(e, time))
    if not e.measured:
        yield from _row("measured", f"nothing in this size class on {e.gpu.name}")


def _measured(e: Explanation, time: MeasuredTime) -> str:
    m, entry = time.entry.measurement, time.entry
    rate = m.problem.flops(entry.spec) / m.ms / 1e9
    parts = [f"{_ms(m.ms)}, {rate:.1f} TFLOP/s (p20 {_ms(m.p20)}, p80 {_ms(m.p80)}, n {m.n})"]
    if entry.config != e.selection.config:
        parts.append(f"config {entry.config.slug()}")
    if m.problem != e.problem:
        parts.append(_sizes(time))
    parts.append(f"the model says {_ms(time.predicted_ms)} there ({time.predicted_ms / m.ms - 1:+.1%})")
    if time.stale:
        parts.append("made with older templates")
    return "; ".join(parts)


def _space(e: Explanation, list_excluded: bool) -> Iterator[str]:
    excluded = sum(len(group.configs) for group in e.excluded)
    yield f"Configs: {e.legal:,} to try, {excluded:,} excluded"
    for group in e.excluded:
        count = f"  {len(group.configs):>6,}  "
        yield from textwrap.wrap(group.reason, WIDTH, initial_indent=count, subsequent_indent=" " * len(count))
        if list_excluded:
            for config, reason in group.configs:
                yield f"{'':>10}{config.slug()}: {reason}"


def _flops(count: int) -> str:
    return _scaled(count, _PREFIXES, "FLOP")


def _bytes(count: int) -> str:
    return _scaled(count, _PREFIXES, "B")


def _scaled(count: int, prefixes: tuple[str, ...], unit: str) -> str:
    """Three digits and a decimal prefix."""
    value, index = float(count), 0
    while value >= 999.5 and index + 1 < len(prefixes):
        value, index = value / 1000, index + 1
    digits = f"{count}" if index == 0 else f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"
    return f"{digits} {prefixes[index]}{unit}"


def _kib(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    if count >= 1000 * 2**20:
        return f"{count / 2**30:,.4g} GiB"
    return f"{count / 2**20:.4g} MiB" if count >= 2**20 else f"{count / 1024:.4g} KiB"


def _ms(ms: float) -> str:
    if ms < 1e-5:
        return f"{1e6 * ms:.2g} ns"
    if ms < 0.1:
        return f"{1e3 * ms:.2f} us"
    return f"{ms:.3f} ms" if ms < 1e4 else f"{_number(ms / 1e3)} s"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1e6 else f"{value:.2e}"
