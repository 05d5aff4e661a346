"""`trimtab train`: a task file and options as key=value words. Knows typer; the rest is `train`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trimtab.errors import Invalid, TrimtabError

if TYPE_CHECKING:
    from trimtab.trainer.config import Config
    from trimtab.trainer.loop import Result
    from trimtab.trainer.task import Task

USAGE = """\
Usage: trimtab train TASK [key=value ...] [--resume]

Train a model on a task: one command from a reward function to a better model.

TASK is a Python file with `prompts` and `reward`, a .jsonl file of prompts (with
reward=file.py:function), or reasoning_gym:NAME. Without base_url= and without
TINKER_BASE_URL a server is started for this run, with the model that model= names.

  trimtab train my_task.py model=org/name=./folder steps=50 learning_rate=1e-4
  trimtab train my_task.py base_url=http://127.0.0.1:8000 algorithm=stable_reinforce
  trimtab train my_task.py --resume           go on after an interruption or a kill

Options:
"""

PLAIN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def register(app: typer.Typer) -> None:
    """Add `train` to the command line."""
    app.command(
        "train",
        context_settings=PLAIN,
        add_help_option=False,
        help="Train a model on a task: from a reward function to a better model.",
    )(command)


def command(context: typer.Context) -> None:
    raise typer.Exit(main(context.args))


def main(words: Sequence[str], task: str | None = None) -> int:
    """Run with these words; the exit code. `task` is set by a recipe that runs itself.

    A recipe ends with `if __name__ == "__main__": sys.exit(main(sys.argv[1:], __file__))`.
    """
    if (not words and task is None) or "--help" in words or "-h" in words:
        print(help_text())
        return 0
    return told(lambda: _train(words, task))


def told(action: Callable[[], int]) -> int:
    """Its exit code; a foreseen error, or an interruption, is a sentence."""
    try:
        return action()
    except TrimtabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; go on with the same command and --resume", file=sys.stderr)
        return 130


def help_text() -> str:
    from trimtab.trainer.options import help_lines

    lines = [USAGE.rstrip("\n")]
    for name, kind, default, doc in help_lines():
        shown = "(none)" if default in ("", "None") else default
        lines.append(f"  {name}={kind}   [{shown}]\n      {doc}")
    lines.append("  --resume   the same as resume=true\n  --help     this text")
    return "\n".join(lines)


def _train(words: Sequence[str], task: str | None) -> int:
    from trimtab.trainer import connect
    from trimtab.trainer.runs import train

    config, loaded = prepare(words, task)
    if connect.address(config):
        result = train(config, loaded)
    else:
        with connect.serving(config, Path(config.log_path)) as service:
            result = train(config, loaded, service=service)
    announce(result)
    return 0


def announce(result: Result) -> None:
    print(f"{result.steps} steps; sampler weights {result.sampler}; folder {result.folder}")


def prepare(words: Sequence[str], task: str | None = None) -> tuple[Config, Task]:
    """The task and the complete options of a command line: the task's defaults, a saved run's
    options where it is resumed, then the words themselves."""
    from trimtab.trainer import options
    from trimtab.trainer.task import load

    named = [w for w in words if "=" not in w and not w.startswith("-")]
    if len(named) > 1:
        raise Invalid(f"two tasks are named, {named[0]} and {named[1]}; options are key=value")
    given: dict[str, Any] = options.given([w for w in words if w not in (*named, "--resume")])
    given |= {"resume": "true"} if "--resume" in words else {}
    given |= {"task": named[0] if named else task} if named or task else {}
    saved = _saved(given)
    spec = {**saved, **given}
    loaded = load(
        spec.get("task", ""), reward=spec.get("reward", ""), options=spec.get("task_options", "")
    )
    return _placed(options.config(loaded.defaults, saved, given), loaded), loaded


def _saved(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run that is to go on, so that they need not be repeated."""
    from trimtab.trainer.folder import Folder

    if given.get("resume") != "true" or "log_path" not in given:
        return {}
    path = Path(given["log_path"])
    stored = Folder(path).config()
    if stored is None and "task" not in given:
        raise Invalid(f"{path} holds no run to go on with; check log_path=")
    return stored or {}


def _placed(config: Config, task: Task) -> Config:
    """With the run's folder settled, because a server of our own keeps its checkpoints there."""
    import chz

    from trimtab.trainer import resume

    path = Path(config.log_path) if config.log_path else resume.default_path(config, task.name)
    return chz.replace(config, log_path=str(path))
