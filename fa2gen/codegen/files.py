"""Template files: as Jinja reads them, and as they are."""

from __future__ import annotations

import functools

import jinja2

from ..data import data_dir


@functools.cache
def environment() -> jinja2.Environment:
    """Templates may name only what they are given."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )


@functools.cache
def file_text(name: str) -> str:
    """Text of a file, relative to the templates folder."""
    return (data_dir("templates") / name).read_text(encoding="utf-8")
