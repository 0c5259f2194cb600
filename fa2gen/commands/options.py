"""The options that several sub-commands share: one vocabulary, one meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from ..errors import ArgumentError
from ..hardware import Gpu, get_gpu, list_gpus, match_device
from ..problem import MAX_SEQLEN
from ..spec import (
    DTYPES,
    FAMILIES,
    KINDS,
    NATIVE_HEAD_DIMS,
    BwdConfig,
    Config,
    FwdConfig,
    FwdSm90Config,
    KernelSpec,
    config_from_canonical,
    config_from_slug,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])


def spec_options(*, gqa: Sequence[int]) -> Callable[[_Command], _Command]:
    """``--headdim --dtype --causal --gqa``; the first, second and last may be repeated.

    Args:
        gqa: Ratios that are meant when ``--gqa`` is left out.
    """
    options = (
        click.option(
            "--headdim", "headdims", type=int, multiple=True, required=True, metavar="D", help="Head dimension."
        ),
        click.option(
            "--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Element type. [default: both]"
        ),
        click.option("--causal/--no-causal", default=None, help="With or without the causal mask. [default: both]"),
        click.option(
            "--gqa",
            "gqa_ratios",
            type=int,
            multiple=True,
            default=tuple(gqa),
            metavar="R",
            help=f"Query heads per key/value head. [default: {' and '.join(map(str, gqa))}]",
        ),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _once(_ctx: click.Context, _param: click.Parameter, values: tuple[Any, ...]) -> Any:
    if len(values) > 1:
        raise click.BadParameter(f"this command takes one, got {', '.join(map(str, values))}")
    return values[0]


# An option that other commands repeat: click would drop all values but the last without a word.
_ONCE: dict[str, Any] = {"multiple": True, "callback": _once}


def one_spec_options(command: _Command) -> _Command:
    """The same options for one kernel: none may be repeated, and each has a default but ``--headdim``."""
    options = (
        click.option("--headdim", "head_dim", type=int, required=True, metavar="D", help="Head dimension.", **_ONCE),
        click.option(
            "--dtype", type=click.Choice(DTYPES), default=("bf16",), help="Element type. [default: bf16]", **_ONCE
        ),
        click.option("--causal/--no-causal", default=False, show_default=True, help="With or without the causal mask."),
        click.option(
            "--gqa",
            "gqa_ratio",
            type=int,
            default=(1,),
            metavar="R",
            help="Query heads per key/value head. [default: 1]",
            **_ONCE,
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def kind_options(command: _Command) -> _Command:
    """``--kind``, of one kind or both, and ``--deterministic``; see :func:`kinds_of`."""
    return _kind_options((*KINDS, "both"), command)


def one_kind_options(command: _Command) -> _Command:
    """The same for one kernel."""
    return _kind_options(KINDS, command)


def _kind_options(kinds: Sequence[str], command: _Command) -> _Command:
    command = click.option(
        "--deterministic",
        is_flag=True,
        help="Backward kernels that give equal bits from run to run, in place of the faster ones that do not.",
    )(command)
    return click.option(
        "--kind",
        type=click.Choice(tuple(kinds)),
        default="fwd",
        show_default=True,
        help=f"Forward or backward kernels{', or both' if 'both' in kinds else ''}.",
    )(command)


def kinds_of(kind: str, *, deterministic: bool) -> tuple[str, ...]:
    """The kinds that ``--kind`` names.

    Raises:
        click.UsageError: ``--deterministic`` without a backward.
    """
    kinds = KINDS if kind == "both" else (kind,)
    if deterministic and "bwd" not in kinds:
        raise click.UsageError(
            "--deterministic is for backward kernels, the forward always is: give --kind bwd or both",
            click.get_current_context(),
        )
    return kinds


def gpu_option(help_text: str) -> Callable[[_Command], _Command]:
    """``--gpu``, a name of the GPU database, which shells complete."""
    return click.option("--gpu", "gpu_name", metavar="NAME", help=help_text, shell_complete=_complete_gpu)


def _complete_gpu(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(gpu.name, help=gpu.title) for gpu in list_gpus() if gpu.name.startswith(incomplete.lower())]


class _Folder(click.Path):
    """A folder; an empty name is most often a shell variable that is not set, and would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty; write ./ for the current folder", param, ctx)
        return super().convert(value, param, ctx)


def out_option(help_text: str, *, checked: bool = True) -> Callable[[_Command], _Command]:
    """``-o``, ``--out``: a folder to write to; ``checked``: a file of that name is wrong usage."""
    folder = _Folder(path_type=Path, file_okay=not checked)
    return click.option("-o", "--out", type=folder, metavar="DIR", help=help_text)


def config_option(verb: str) -> Callable[[_Command], _Command]:
    """``--config``, ``"tuned"`` unless given (see :func:`parse_config`)."""
    return click.option(
        "--config",
        default="tuned",
        metavar="CONFIG",
        help=f"Config to {verb}: tuned (what the tables choose), default (what runs where nothing is tuned), a "
        f"name such as {FwdConfig().slug()}, {FwdSm90Config().slug()} or, of a backward, {BwdConfig().slug()}, "
        "or JSON such as '{\"block_m\": 64}'. "
        "[default: tuned]",
    )


def parse_config(text: str, kind: str = "fwd") -> Config | Literal["tuned", "default"]:
    """A config from the command line: ``tuned``, ``default``, a config's slug, or a JSON object of its fields.

    Args:
        text: What was given.
        kind: The kind of kernel that it is for, or ``"both"``.

    Raises:
        ArgumentError: None of these, a value that no config has, or one config for both kinds.
    """
    if text == "tuned":
        return "tuned"
    if text == "default":
        return "default"
    if kind == "both":
        raise ArgumentError(
            f"--config must be tuned or default for --kind both, as no config serves both kinds; got {text!r}"
        )
    if text.lstrip().startswith("{"):
        try:
            form = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"--config is not JSON: {error}") from None
        return config_from_canonical(kind, form)
    if "_" not in text:
        names = " or ".join(each().slug() for each in FAMILIES[kind].values())
        raise ArgumentError(
            f"--config must be tuned, default, a name such as {names}, or a JSON object of fields; got {text!r}"
        )
    return config_from_slug(kind, text)


def given(name: str) -> bool:
    """Whether an option of the running command was written on the command line, not left to its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def seqlen_options(default: int | None, *, minimum: int = 0) -> Callable[[_Command], _Command]:
    """``--seqlen-q`` and ``--seqlen-k``."""
    length = click.IntRange(min=minimum, max=MAX_SEQLEN)

    def decorate(command: _Command) -> _Command:
        command = click.option(
            "--seqlen-k", type=length, metavar="N", help="Keys per sequence. [default: as --seqlen-q]"
        )(command)
        return click.option(
            "--seqlen-q", type=length, default=default, show_default=default is not None, metavar="N",
            help="Queries per sequence.",
        )(command)  # fmt: skip

    return decorate


def make_specs(
    headdims: Sequence[int],
    dtypes: Sequence[str],
    causal: bool | None,
    gqa_ratios: Sequence[int],
    kinds: Sequence[str] = ("fwd",),
    *,
    deterministic: bool = False,
) -> list[KernelSpec]:
    """Every combination asked for, in a fixed order, without repeats.

    Args:
        headdims, dtypes, gqa_ratios, kinds: Values to combine; no dtypes are all.
        causal: None: both masks.
        deterministic: Of the backward kernels.

    Raises:
        ArgumentError: A value that no kernel can have; UnsupportedError: one that this version has no kernel for.
    """
    masks = (False, True) if causal is None else (causal,)
    specs = [
        make_spec(kind, d, dtype, causal=mask, gqa_ratio=ratio, deterministic=deterministic)
        for kind in kinds
        for d in headdims
        for dtype in (dtypes or DTYPES)
        for mask in masks
        for ratio in gqa_ratios
    ]
    return list(dict.fromkeys(specs))


def make_spec(
    kind: str, head_dim: int, dtype: str, *, causal: bool, gqa_ratio: int, deterministic: bool = False
) -> KernelSpec:
    """One kernel as the command line names it; ``deterministic`` is for a backward.

    A head dim that is no multiple of 8 has rows that cannot be 16-byte aligned, so a forward of it takes element-wise
    loads; there is no such backward.

    Raises:
        ArgumentError: A value that no kernel can have; UnsupportedError: one that this version has no kernel for.
    """
    # What is out of range is so padded too: KernelSpec refuses it with the range.
    unaligned = 0 < head_dim <= NATIVE_HEAD_DIMS[-1] and head_dim % 8
    if kind == "bwd" and unaligned:
        padded = -(-head_dim // 8) * 8
        raise ArgumentError(
            f"--headdim {head_dim}: backward kernels have head dims that are multiples of 8; a call pads "
            f"{head_dim} columns to {padded}, so give --headdim {padded}"
        )
    return KernelSpec(
        kind,
        head_dim,
        dtype,
        causal,
        gqa_ratio,
        alignment=2 if unaligned else 16,
        deterministic=deterministic and kind == "bwd",
    )


def gpu_at_hand() -> Gpu | None:
    """The first GPU of this machine as a row of the database, or None where there is none that PyCUDA can reach."""
    from .. import driver

    if driver.unavailable_reason() is not None:
        return None
    info = driver.device_info(0)
    return match_device(
        info.name, info.compute_capability, info.num_sms, info.l2_bytes, boost_ghz=info.clock_mhz / 1000 or None
    )


def resolve_gpu(name: str | None, *, default: str | None = None) -> Gpu:
    """The GPU named, else the one at hand, else ``default``.

    Raises:
        ArgumentError: No such name; near ones are offered.
        click.UsageError: Nothing named, nothing found and no default: the names are listed.
    """
    if name is not None:
        return get_gpu(name)
    found = gpu_at_hand()
    if found is not None:
        return found
    if default is not None:
        return get_gpu(default)
    names = ", ".join(gpu.name for gpu in list_gpus())
    raise click.UsageError(f"no GPU found here: name one with --gpu, out of {names}", click.get_current_context())
