"""Tuned tables: what was found fastest for a spec and a bucket of sizes on a GPU, with its provenance."""

from .lookup import SOURCES, Match, lookup
from .schema import SCHEMA_VERSION, Measurement, Provenance, Table, TunedEntry, parse_table, render_table, utc_now
from .store import load_table, merge_entries, package_dir, require_writable, save_entries, table_path, user_dir

__all__ = [
    "SCHEMA_VERSION",
    "SOURCES",
    "Match",
    "Measurement",
    "Provenance",
    "Table",
    "TunedEntry",
    "load_table",
    "lookup",
    "merge_entries",
    "package_dir",
    "parse_table",
    "render_table",
    "require_writable",
    "save_entries",
    "table_path",
    "user_dir",
    "utc_now",
]
