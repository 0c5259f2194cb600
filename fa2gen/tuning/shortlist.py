"""Which configs to compile, and what their compilation says of them."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from dataclasses import replace

from fa2gen.compile import CompiledKernel
from fa2gen.hardware import Gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.spec import Config, FwdConfig, FwdSm90Config, KernelSpec

from .builds import Build, main_kernel
from .model import predict
from .prediction import Facts
from .space import GRIDS, legal_space

# Good kernels of the sm80 family spill up to about 100 bytes of prologue values; beyond this the loop itself spills.
MAX_SPILL_BYTES = 512
# So many queries fill the rows of a block by themselves: packing heads wins nothing, and doubles what is to be ranked.
_PACKING_SEQLEN = 512
# A stack frame beyond the spills holds arrays that should be registers; kernels with one ran 5 to 8 times slower.
MAX_ARRAY_BYTES = 64


def shortlist(
    spec: KernelSpec, problems: Sequence[Problem], gpu: Gpu, count: int, family: str = "sm80"
) -> list[Config]:
    """A family's legal configs that its model, before compiling, expects to be fastest over the problems; best first.

    Each problem counts alike: configs are ordered by the mean of their time over the problem's best time. Of those that
    differ in stages and residency alone (of the sm90 family, in all but tiles and products) the first comes before all
    others: what the model says of them is within its error, and they would crowd out other shapes.
    """
    configs = legal_space(spec, gpu, family).configs
    if all(problem.seqlen_q >= _PACKING_SEQLEN for problem in problems):
        configs = tuple(config for config in configs if not (isinstance(config, FwdConfig) and config.pack_gqa))
    score = _scores(spec, problems, gpu, configs)
    first: list[Config] = []
    others: list[Config] = []
    seen: set[Config] = set()
    for config in sorted(score, key=score.__getitem__):
        kind = _kind(config)
        (others if kind in seen else first).append(config)
        seen.add(kind)
    return [*first, *others][:count]


def _kind(config: Config) -> Config:
    """What configs of one shape have in common, see :func:`shortlist`; one block of the sm90 family fills an SM."""
    if isinstance(config, FwdSm90Config):
        one_of_each = replace(config, num_stages=1, k_extra=0, q_stages=1, q_extra=0, q_regs=0)
        return replace(one_of_each, scheduler="static", section_mib=0, epilogue="tma")
    return replace(config, num_stages=1, min_blocks=1)


def neighbours(spec: KernelSpec, problem: Problem, gpu: Gpu, configs: Sequence[Config]) -> list[Config]:
    """The legal configs that differ in a single tunable from one of these: of each in turn, in the model's order."""
    lists = []
    for config in configs:
        grid, legal = GRIDS[spec.kind][config.family], {*legal_space(spec, gpu, config.family).configs}
        params = grid.params_of(config)
        points = [grid.config_of({**params, name: value}) for name, values in grid.values.items() for value in values]
        near = dict.fromkeys(point for point in points if point is not None and point in legal)
        score = _scores(spec, [problem], gpu, tuple(near))
        lists.append(sorted(score, key=score.__getitem__))
    mixed = dict.fromkeys(config for turn in itertools.zip_longest(*lists) for config in turn if config is not None)
    return [config for config in mixed if config not in configs]


def _scores(spec: KernelSpec, problems: Sequence[Problem], gpu: Gpu, configs: Sequence[Config]) -> dict[Config, float]:
    score = dict.fromkeys(configs, 0.0)
    for problem in problems:
        times = {config: predict(spec, config, problem, gpu).ms for config in configs}
        best = min(times.values(), default=1.0)
        for config, ms in times.items():
            score[config] += ms / best
    return score


def facts_of(build: Build) -> Facts:
    """The model's view of a compiled config."""
    return _facts(main_kernel(build))


def _facts(compiled: CompiledKernel) -> Facts:
    resources, source = compiled.resources, compiled.source
    spilled = resources.spill_store_bytes + resources.spill_load_bytes
    return Facts(resources.registers, spilled, source.smem_bytes + resources.static_smem_bytes)


def spill_reason(build: Build) -> str | None:
    """Why a compiled config is not worth timing, or None."""
    main = main_kernel(build)
    resources = main.resources
    if isinstance(main.source.config, FwdSm90Config) and (resources.spills or resources.stack_bytes):
        # While wgmma runs, what its registers hold cannot move: good kernels of the family have none (290 compiled).
        return f"{resources.spill_store_bytes} bytes of spill stores, {resources.stack_bytes} of stack a thread"
    if resources.spill_store_bytes > MAX_SPILL_BYTES:
        return f"{resources.spill_store_bytes} bytes of spill stores a thread, more than {MAX_SPILL_BYTES}"
    arrays = resources.stack_bytes - resources.spill_store_bytes
    if arrays > MAX_ARRAY_BYTES:
        return f"{arrays} bytes of register arrays in local memory: a loop over them was not unrolled"
    return None


def launch_reason(build: Build, gpu: Gpu) -> str | None:
    """Why no block of a compiled config fits on an SM, so that the driver would refuse to launch it; else None."""
    facts, threads = facts_of(build), main_kernel(build).source.num_threads
    if occupancy(gpu.arch, threads, facts.registers, facts.smem_bytes).blocks_per_sm:
        return None
    return (
        f"no block fits on an SM: {threads} threads of {facts.registers} registers (an SM has "
        f"{gpu.arch.max_registers_per_sm}) and {facts.smem_bytes} bytes of shared memory"
    )


def code_digest(build: Build) -> str:
    """Equal for configs that run alike: same machine code, resources and launches, whatever their names.

    A cubin carries the kernel's name, so the files of two configs never are equal; their code may be.
    """
    digest = hashlib.sha256()
    for compiled in build:
        source, config = compiled.source, compiled.source.config
        # The tiles that grids are counted in, or of which tensor maps have the size.
        tiles = [config.block_m] if isinstance(config, FwdConfig) else [config.block_m, config.block_n]
        if isinstance(config, FwdSm90Config):
            tiles += [config.epilogue == "tma", config.scheduler == "dynamic", config.section_mib]
        digest.update(repr((source.num_threads, source.smem_bytes, *tiles, compiled.resources)).encode())
        for section in _text_sections(compiled.cubin):
            digest.update(section)
    return digest.hexdigest()


def _text_sections(elf: bytes) -> list[bytes]:
    """Contents of the executable sections of a 64-bit ELF file; the whole file if it is none."""
    if elf[:5] != b"\x7fELF\x02":
        return [elf]
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = []
    for index in range(count):
        _, kind, flags, _, offset, length = struct.unpack_from("<IIQQQQ", elf, table + index * size)
        # PROGBITS with SHF_EXECINSTR.
        if kind == 1 and flags & 4:
            sections.append(elf[offset : offset + length])
    return sections
