"""Tuned tables: what was found fastest of each family for a spec and a bucket of sizes on a GPU, and how."""

from .document import SCHEMA_VERSION, NewerSchemaError, parse_table, recover_entries, render_table
from .lookup import SOURCES, Match, lookup
from .merge import merge_entries
from .scan import TableFile, scan_tables
from .schema import (
    NOISE_BAND,
    Clocks,
    EntryKey,
    Incumbent,
    Measurement,
    Provenance,
    Regate,
    Table,
    TunedEntry,
    utc_now,
)
from .store import load_table, package_dir, require_writable, save_entries, save_table, table_path, user_dir

__all__ = [
    "NOISE_BAND",
    "SCHEMA_VERSION",
    "SOURCES",
    "Clocks",
    "EntryKey",
    "Incumbent",
    "Match",
    "Measurement",
    "NewerSchemaError",
    "Provenance",
    "Regate",
    "Table",
    "TableFile",
    "TunedEntry",
    "load_table",
    "lookup",
    "merge_entries",
    "package_dir",
    "parse_table",
    "recover_entries",
    "render_table",
    "require_writable",
    "save_entries",
    "save_table",
    "scan_tables",
    "table_path",
    "user_dir",
    "utc_now",
]
