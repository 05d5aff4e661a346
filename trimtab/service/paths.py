"""tinker:// paths, the names in them, and folders that appear whole or not at all.

    tinker://<model>/weights/<name>            adapter and optimizer
    tinker://<model>/sampler_weights/<name>    adapter alone
    tinker://<model>/external_weights/<name>   a PEFT adapter, for use elsewhere

Three segments, always. A folder's name on disk is random and never made from a client's words, so
no name can leave the data directory. Knows no rows: a folder that no row names is nobody's, and
`sweep_orphans` removes it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from trimtab.errors import Invalid

SCHEME = "tinker://"
KINDS = ("weights", "sampler_weights", "external_weights")


def path_of(model_id: str, kind: str, name: str) -> str:
    return f"{SCHEME}{model_id}/{kind}/{name}"


def check_name(name: str, longest: int) -> str:
    """A checkpoint's name: printable, one path segment, not a way out of a folder."""
    if not 1 <= len(name) <= longest:
        raise Invalid(f"checkpoint name has {len(name)} characters; allowed are 1 to {longest}")
    if not name.isprintable():
        raise Invalid(f"checkpoint name {name!r} has a control character; none is allowed")
    for bad in ("/", "\\", ".."):
        if bad in name:
            raise Invalid(f"checkpoint name {name!r} contains {bad!r}, which is not allowed")
    if name != name.strip() or name == ".":
        raise Invalid(f"checkpoint name {name!r} must not be '.' or begin or end with a space")
    return name


def parse_path(path: str, longest: int) -> tuple[str, str, str]:
    """(model id, kind, name). `parse_path("tinker://S:train:0/weights/a", 128)` is
    `("S:train:0", "weights", "a")`."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or not parts[0]:
        raise Invalid(
            f"path {path[:300]!r} is not of the form tinker://<model>/<{'|'.join(KINDS)}>/<name>"
        )
    if parts[1] not in KINDS:
        raise Invalid(
            f"path {path[:300]!r} names {parts[1]!r}; this server keeps {', '.join(KINDS)}"
        )
    check_name(parts[2], longest)
    return parts[0], parts[1], parts[2]


# --------------------------------------------------------------------------- folders


def write_folder(home: Path, fill: Callable[[Path], int]) -> tuple[str, int]:
    """Let `fill` write into a temporary folder, make it durable, then give it its final name.
    Returns (name, what `fill` returned)."""
    name = uuid.uuid4().hex
    temporary = home / f"{name}.partial"
    home.mkdir(parents=True, exist_ok=True)
    whole = False
    try:
        value = fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        _sync(temporary)
        temporary.rename(home / name)
        _sync(home)
        whole = True
    finally:
        if not whole:
            shutil.rmtree(temporary, ignore_errors=True)
    return name, value


def remove_folder(home: Path, name: str) -> None:
    shutil.rmtree(home / name, ignore_errors=True)


def sweep_orphans(home: Path, named: Collection[str]) -> list[str]:
    """Remove folders that no row names: what a crash left between a rename and its row."""
    if not home.is_dir():
        return []
    orphans = [entry.name for entry in home.iterdir() if entry.name not in named]
    for name in orphans:
        remove_folder(home, name)
    return orphans


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
