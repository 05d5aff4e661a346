"""Which room may import which, read from the sources; and that the light half stays light."""

import ast
import gc
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path("trimtab")
HEAVY = {"torch", "transformers", "tinker"}

# A room, and what it must not import: other rooms by their dotted name, libraries by theirs.
FORBIDDEN = {
    "types.py": HEAVY | {"trimtab"},
    "errors.py": HEAVY | {"trimtab", "numpy"},
    "config.py": HEAVY | {"trimtab.wire", "trimtab.service", "trimtab.engine", "trimtab.losses"},
    "wire": HEAVY | {"trimtab.engine", "trimtab.losses", "trimtab.trainer", "sqlite3"},
    "service": HEAVY
    | {"trimtab.wire", "trimtab.losses", "trimtab.trainer", "starlette", "uvicorn", "httpx"},
    "engine": {"tinker", "trimtab.wire", "trimtab.service", "trimtab.trainer", "sqlite3"},
    "losses": {
        "tinker", "transformers", "sqlite3",
        "trimtab.wire", "trimtab.service", "trimtab.engine", "trimtab.trainer",
    },
    "trainer": {"trimtab.wire", "trimtab.service", "trimtab.engine", "trimtab.losses"},
}  # fmt: skip
# service speaks to an engine through its protocols alone.
ALLOWED_ENGINE = "trimtab.engine.base"


@pytest.fixture(autouse=True)
def uncollected():
    """No garbage is collected meanwhile: Python 3.11's parser counts wrongly when a finalizer runs
    in the middle of it (https://github.com/python/cpython/issues/106905)."""
    gc.disable()
    yield
    gc.enable()


def sources(room):
    found = ROOT / room
    return [found] if found.is_file() else sorted(found.rglob("*.py"))


def imported(path):
    """Every module a file imports, at its top or inside a function, but for type checking alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, package):
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_keeps_to_its_imports(room):
    bad = [
        f"{path}: {name}"
        for path in sources(room)
        for name in imported(path)
        if any(within(name, package) for package in FORBIDDEN[room])
    ]
    assert sources(room) and not bad


def test_service_knows_the_engine_by_its_protocols_alone():
    for path in sources("service"):
        for name in imported(path):
            if within(name, "trimtab.engine") and name != "trimtab.engine":
                assert within(name, ALLOWED_ENGINE), f"{path}: {name}"


def loaded_by(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_wire_and_service_bring_neither_torch_nor_the_sdk():
    loaded = loaded_by("import trimtab.wire.app, trimtab.service.core, trimtab.server")
    assert not HEAVY & loaded
    assert "trimtab.wire.trimtab_pb2" in loaded


def test_importing_trimtab_brings_next_to_nothing():
    loaded = loaded_by("import trimtab")
    assert not (HEAVY | {"numpy", "pydantic", "typer", "starlette"}) & loaded


def test_the_command_line_is_there_before_anything_heavy():
    loaded = loaded_by("import trimtab.cli")
    assert not (HEAVY | {"numpy", "pydantic", "starlette", "uvicorn"}) & loaded
