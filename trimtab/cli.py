"""The `trimtab` command. Imports nothing heavy until a command has been chosen.

The flags of `serve` are the fields of ServerConfig, made into flags here and described there.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from trimtab import __version__
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.server import Server
    from trimtab.service.keys import Keys

HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    help="A self-hosted service for LLM post-training that speaks the Tinker API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
]


@app.callback()
def main(version: Version = False) -> None:
    """Options that stand before a command."""


@app.command(context_settings=HANDED_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve models to clients of the official SDK."""
    _handed_on(serve_command(), context)


@app.command()
def doctor(
    data_dir: Annotated[Path, typer.Option(help="A server's data directory.")] = Path(
        "trimtab-data"
    ),
) -> None:
    """Show what this machine has: libraries, arithmetic, the data directory."""
    from trimtab.doctor import report

    for line in report(data_dir):
        typer.echo(line)


@app.command(context_settings=HANDED_ON, add_help_option=False)
def model(context: typer.Context) -> None:
    """Fetch pretrained models and list those at hand."""
    from trimtab.modelstore import model_app

    _handed_on(model_app, context)


@app.command(context_settings=HANDED_ON, add_help_option=False)
def train(context: typer.Context) -> None:
    """Train a model on a task: from a reward function to a better model."""
    from trimtab.trainer.cli import command

    command(context)


@app.command()
def merge(
    adapter: Annotated[
        str,
        typer.Argument(
            help="A tinker:// path, fetched with TINKER_BASE_URL and TINKER_API_KEY, or a folder "
            "of `tinker checkpoint download`."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    base: Annotated[
        str | None,
        typer.Option(help="The base model: a folder, a hub id or a fetched name; else its own."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="What the weights are stored in; auto takes the base model's."),
    ] = "auto",
) -> None:
    """Put an adapter into its base model, for what loads no adapters."""
    with _told(), _adapter_folder(adapter) as folder:
        from trimtab.engine import merge as merging

        merging.merge(folder, _base_folder(base, folder), out, dtype)
    typer.echo(f"wrote {out}")


@contextmanager
def _adapter_folder(adapter: str) -> Iterator[Path]:
    """A folder as it is; a server's path as the official command line fetches it, for a while."""
    if not adapter.startswith("tinker://"):
        yield Path(adapter)
        return
    from trimtab.errors import Invalid

    command = (sys.executable, "-m", "tinker.cli", "checkpoint", "download", adapter, "-o")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise Invalid(f"adapter: {adapter} was not fetched: {' '.join(said[-2:])}")
        yield Path(folder) / adapter.removeprefix("tinker://").replace("/", "_")


def _base_folder(base: str | None, adapter: Path) -> Path:
    """The folder of the base model that was named, or that the adapter names."""
    from trimtab.config import model_source
    from trimtab.engine.merge import read_config
    from trimtab.errors import Invalid

    named = base or str(read_config(adapter).get("base_model_name_or_path"))
    try:
        found = model_source(named)
    except ValueError as error:
        raise Invalid(f"base: {error}") from None
    if found.folder:
        return found.path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(named))


keys_app = typer.Typer(
    help="Create, list and revoke the keys that clients present; a running server follows at once.",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")
DataDir = Annotated[
    Path, typer.Option(help="The server's data directory.", envvar="TRIMTAB_DATA_DIR")
]
DATA_DIR = Path("trimtab-data")


@keys_app.command("create")
def create_key(
    owner: Annotated[str, typer.Argument(help="Who will own what is made with the key.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Create a key and print it, this once; only its hash is kept."""
    with _told(), _keys(data_dir, new=True) as keys:
        key, secret = keys.create(owner, name)
        typer.echo(f"key {key.key_id} of {key.owner}; it is not shown again", err=True)
        typer.echo(secret)


@keys_app.command("list")
def list_keys(data_dir: DataDir = DATA_DIR) -> None:
    """List every key: number, owner, when it was created and last used (to a minute), its name."""
    with _told(), _keys(data_dir) as keys:
        for key in keys.all():
            used = "never" if key.last_used_at is None else _time(key.last_used_at)
            state = "live" if key.revoked_at is None else f"revoked {_time(key.revoked_at)}"
            created = _time(key.created_at)
            typer.echo(
                f"{key.key_id:4}  {key.owner:20}  created {created}  used {used:16}  {state}"
                f"  {key.name}".rstrip()
            )


@keys_app.command("revoke")
def revoke_key(
    number: Annotated[int, typer.Argument(help="The key's number in `trimtab keys list`.")],
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Refuse a key from now on. What its owner made stays the owner's."""
    with _told(), _keys(data_dir) as keys:
        key = keys.revoke(number)
        typer.echo(f"key {key.key_id} of {key.owner} is revoked")


@contextmanager
def _keys(data_dir: Path, *, new: bool = False) -> Iterator[Keys]:
    from trimtab.errors import Invalid
    from trimtab.service.keys import FILE, Keys

    if not new and not (data_dir / FILE).exists():
        raise Invalid(f"data_dir: no key was ever created in {str(data_dir)!r}")
    keys = Keys(data_dir)
    try:
        yield keys
    finally:
        keys.close()


def _time(seconds: float) -> str:
    """UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _handed_on(command: typer.Typer, context: typer.Context) -> None:
    """Give the rest of the line to a command that is only built now."""
    with _told():
        command(args=context.args, prog_name=context.command_path)


@contextmanager
def _told() -> Iterator[None]:
    """A foreseen error is a sentence, not a stack trace."""
    try:
        yield
    except TrimtabError as error:
        for line in str(error).splitlines():
            typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(1) from None


# ------------------------------------------------------------------ serve


def serve_command() -> typer.Typer:
    """A command with a flag for each field of ServerConfig."""

    def command(config: Path | None = None, **flags: Any) -> None:
        from trimtab.config import load_config
        from trimtab.server import run

        given = {name: value for name, value in flags.items() if value not in (None, [], ())}
        with _told(), _progress() as progress:
            run(load_config(config, given), ready=_announce, progress=progress)

    command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
    command.__doc__ = (
        "Serve models to clients of the official SDK until interrupted.\n\n"
        "Each flag may also stand in the file given as --config (port = 8000) and in the "
        "environment (TRIMTAB_PORT=8000); a flag wins over the environment, that over the file."
    )
    made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    made.command()(command)
    return made


def _parameters() -> list[inspect.Parameter]:
    from trimtab.config import LISTS, ServerConfig

    config = typer.Option("--config", help="A TOML file with any of these.", dir_okay=False)
    made = [_parameter("config", Path | None, config)]
    for name, field in ServerConfig.model_fields.items():
        many = name in LISTS
        default = None if field.is_required() or many else field.get_default()
        option = typer.Option(
            "--" + name.replace("_", "-"),
            help=field.description,
            metavar=_metavar(field.annotation),
            show_default=False if default is None else str(default),
        )
        made.append(_parameter(name, list[str] | None if many else str | None, option))
    return made


def _metavar(annotation: Any) -> str:
    """What to write after a flag: INT, FLOAT, TEXT, PATH or the words that are allowed."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    kinds = {bool: "true|false", int: "INT", float: "FLOAT", Path: "PATH"}
    return next((kinds[k] for k in (annotation, *get_args(annotation)) if k in kinds), "TEXT")


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _announce(server: Server) -> None:
    """What a user needs next, on stdout; the server answers right after."""
    names = ", ".join(source.name for source in server.config.models())
    key = "tml-...  # one of this server's keys" if server.asks_for_keys else "tml-local"
    for info in server.models:
        if info.sampler_kl > 0:
            typer.echo(
                f"{info.name}: sampler {info.sampler_dtype}, learner {info.learner_dtype}; on the "
                f"same weights KL(sampler || learner) is {info.sampler_kl:.2g} nats a token"
            )
    typer.echo(f"trimtab serves {names} at {server.url}")
    typer.echo(f"export TINKER_BASE_URL={server.url}")
    typer.echo(f"export TINKER_API_KEY={key}")
    if server.config.hub_mirror:
        token = "; export HF_TOKEN=$TINKER_API_KEY" if server.asks_for_keys else ""
        typer.echo(f"export HF_ENDPOINT={server.url}{token}  # tokenizers without another hub")
    sys.stdout.flush()


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Loading, as a bar on a terminal and as lines elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield lambda what, done: typer.echo(f"{done:4.0%} {what}", err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)
            if done >= 1.0:
                bar.refresh()

        yield show


if __name__ == "__main__":
    app()
