"""The SQLite store (schema, one writer thread, readers)."""

from __future__ import annotations

from pathlib import Path


class Store:
    """`Store(data_dir)` opens at once; Invalid when another server uses the directory."""

    def __init__(self, data_dir: Path) -> None:
        raise NotImplementedError
