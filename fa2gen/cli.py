"""The ``fa2gen`` command: sub-commands, and how errors become one line and an exit code.

Exit codes: 0 done; 1 an error of fa2gen's own (``error: ...`` on stderr) or a failed check; 2 wrong usage; 130 Ctrl-C;
143 and 129 ended by SIGTERM or SIGHUP, which do what Ctrl-C does: save what is proved, stop the compilers, leave no
temporary files.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from . import __version__
from .errors import Fa2genError

# Sub-command -> its line in the help. Each is `fa2gen.commands.<name>`, attribute `command`, imported when it is used:
# together they take 0.2 s to import, and the help is to come at once.
COMMANDS = {
    "tune": "Find the fastest configs for a GPU and save them.",
    "emit": "Write CUDA files, a manifest and a C++ program that launches them.",
    "verify": "Check kernels against the float64 reference.",
    "bench": "Measure kernel and host time beside the attention libraries found here.",
    "explain": "Show what bounds a kernel on a GPU, and which configs are legal.",
    "list": "List GPUs or kernels.",
    "table": "Show, check and gate tuned tables.",
    "cache": "List, check and clean the kernel cache.",
    "doctor": "Show what is installed, what is missing and how to get it.",
    "completion": "Print the shell completion script.",
}


class _Group(click.Group):
    """A group whose sub-commands load late and whose errors are one line, never a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"{__package__}.commands.{cmd_name}").command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS)
            ctx.fail(f"no command {args[0]!r}" + (f", did you mean {' or '.join(near)}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        ended_by: list[int] = []
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller (fa2gen ... >&-)
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A stream that is not UTF-8 shows what it cannot encode as stderr does, instead of ending the command.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            with warnings.catch_warnings(), _signals_interrupt(ended_by):
                warnings.showwarning = _OnceEach()
                result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "fa2gen"
            _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", 2)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except Fa2genError as error:
            _fail(str(error), 1)
        except OSError as error:
            # A full disk, a read-only folder: the operating system's own words are the clearest.
            words = error.strerror or str(error)
            _fail(words if error.filename is None else f"{error.filename}: {words}", 1)
        except MemoryError as error:
            _fail(f"not enough memory: {error}", 1)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", 128 + ended_by[0] if ended_by else 130)
        code = result if isinstance(result, int) else 0
        sys.exit(128 + ended_by[0] if ended_by and code == 130 else code)


@contextlib.contextmanager
def _signals_interrupt(ended_by: list[int]) -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt and are noted in ``ended_by``; ignored ones (nohup) stay ignored."""

    def interrupt(number: int, _frame: object) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, interrupt)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


class _OnceEach:
    """Shows warnings as one line each, and the same words once a command: a thousand kernels may have one cause."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        text = " ".join(str(message).split())
        if text not in self._shown:
            self._shown.add(text)
            click.echo(f"warning: {text}", err=True)


def _fail(message: str, code: int) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(
    "fa2gen",
    cls=_Group,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="fa2gen")
def main() -> None:
    """Generate, prove, tune and emit FlashAttention kernels for NVIDIA GPUs."""
