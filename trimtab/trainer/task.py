"""A task: prompts, a reward, and for several turns a reply. Knows no model and no server.

A task file is a Python file with these names, of which the first two are required:

    prompts    strings, or dicts with "prompt"; a list, a function returning one, or a .jsonl path
    reward     (completion, item) -> float, plain or async
    held_out   prompts for evaluation, as `prompts`
    reply      (completion, item) -> str, a message, or None to end: a multi-turn task
    stop       strings that end the model's turn (besides its end-of-sequence token)
    defaults   a dict of Config options that suit the task; the command line overrides them

A prompt is a string, sent as it is, or a list of chat messages ({"role", "content"}), rendered with
the model's chat template. Everything else in an item is the task's own.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.errors import Invalid
from trimtab.trainer.completion import Completion

Item = dict[str, Any]
Reward = Callable[[Completion, Item], float | Awaitable[float]]
Message = Mapping[str, Any]
Answer = str | Message | None
Reply = Callable[[Completion, Item], Answer | Awaitable[Answer]]


@dataclass(frozen=True)
class Task:
    """Task([{"prompt": "2+2=", "answer": "4"}], lambda c, item: float(c == item["answer"]))"""

    prompts: Sequence[Item]
    reward: Reward
    held_out: Sequence[Item] = ()
    reply: Reply | None = None
    stop: tuple[str, ...] = ()
    name: str = "task"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", items(self.prompts, "prompts"))
        object.__setattr__(self, "held_out", items(self.held_out, "held_out"))
        if not self.prompts:
            raise Invalid(f"task {self.name}: there are no prompts; give at least one")
        for name in ("reward", "reply"):
            value = getattr(self, name)
            if not callable(value) and not (name == "reply" and value is None):
                raise Invalid(
                    f"task {self.name}: {name} is {_kind(value)}; it must be a function of "
                    "(completion, item)"
                )
        object.__setattr__(self, "stop", _stop(self.stop, self.name))


def items(values: Sequence[Any], name: str) -> tuple[Item, ...]:
    """Items from strings or dicts; a bad one is named by its number."""
    return tuple(_item(value, f"{name}[{i}]") for i, value in enumerate(values))


def _item(value: Any, where: str) -> Item:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping) or "prompt" not in value:
        raise Invalid(f'{where} is {_kind(value)}; it must be a string or a dict with "prompt"')
    prompt = value["prompt"]
    if not isinstance(prompt, str) and not _messages(prompt):
        raise Invalid(
            f"{where}: prompt is {_kind(prompt)}; it must be a string or a non-empty list of "
            "messages with role and content"
        )
    if not prompt:
        raise Invalid(f"{where}: the prompt is empty")
    return dict(value)


def _messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in prompt)
    )


def _stop(stop: Any, name: str) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(s, str) and s for s in found):
        raise Invalid(f"task {name}: stop is {stop!r}; it must be one or more non-empty strings")
    return found


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


# ------------------------------------------------------------------------------ from files


def load(spec: str, *, reward: str = "", options: str = "") -> Task:
    """The task that `Config.task` names: `my_task.py`, `prompts.jsonl` or `reasoning_gym:NAME`."""
    if not spec:
        raise Invalid(
            "there is no task; name a file (trimtab train my_task.py), a .jsonl file with "
            "reward=file.py:function, or reasoning_gym:NAME"
        )
    if spec.startswith("reasoning_gym:"):
        from trimtab.trainer.reasoning_gym_task import reasoning_gym_task

        return reasoning_gym_task(spec.partition(":")[2], **_options(options))
    if options:
        raise Invalid("task_options is for reasoning_gym tasks; a task file holds its own options")
    if spec.endswith(".jsonl"):
        return _from_jsonl(Path(spec), reward)
    if reward:
        raise Invalid("reward= goes with a .jsonl file of prompts; a task file has its own reward")
    return from_file(Path(spec))


def from_file(path: Path) -> Task:
    module = import_file(path)
    found = getattr(module, "task", None)
    if isinstance(found, Task):
        return found
    meaning = {"prompts": "a list of prompts", "reward": "a function of (completion, item)"}
    for name, what in meaning.items():
        if not hasattr(module, name):
            raise Invalid(f"{path} has no `{name}`; define it: {what}")
    return Task(
        prompts=_prompts(module.prompts, path, "prompts"),
        reward=module.reward,
        held_out=_prompts(getattr(module, "held_out", ()), path, "held_out"),
        reply=getattr(module, "reply", None),
        stop=getattr(module, "stop", ()),
        name=path.stem,
        defaults=dict(getattr(module, "defaults", {})),
    )


def _prompts(value: Any, path: Path, name: str) -> Sequence[Any]:
    value = value() if callable(value) else value
    if isinstance(value, str | Path):
        return read_jsonl(path.parent / value)
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise Invalid(
            f"{path}: {name} is {_kind(value)}; it must be a list, a function that returns one, or "
            "the path of a .jsonl file"
        )
    return list(value)


def read_jsonl(path: Path) -> list[Any]:
    """One JSON object (or string) a line. Blank lines are skipped; a bad one is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Invalid(f"{path}: cannot read the prompts ({error.strerror})") from error
    return [_json(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Invalid(f"{where}: not JSON ({error.msg} at column {error.colno})") from error


def _from_jsonl(path: Path, reward: str) -> Task:
    file, colon, function = reward.rpartition(":")
    if not colon or not file or not function:
        raise Invalid(
            f"reward is {reward!r}; with prompts from {path} give reward=my_reward.py:function"
        )
    module = import_file(Path(file))
    if not hasattr(module, function):
        raise Invalid(f"{file} has no function `{function}` to use as the reward")
    return Task(read_jsonl(path), getattr(module, function), name=path.stem)


def _options(text: str) -> dict[str, Any]:
    found = _json(text, "task_options") if text else {}
    if not isinstance(found, dict):
        raise Invalid(f'task_options is {text!r}; it must be a JSON object such as {{"size": 500}}')
    return found


def import_file(path: Path) -> ModuleType:
    """The module of a user's file, with its folder importable. What it raises is told in a line."""
    path = path.resolve()
    if not path.is_file():
        raise Invalid(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(f"trimtab_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise Invalid(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        line = _line_in(path, error)
        raise Invalid(f"{path}{line} raised {type(error).__name__} at import: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _line_in(path: Path, error: BaseException) -> str:
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            found = f":{trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        return f":{error.lineno}"
    return found


def split_held_out(task: Task, share: float) -> Task:
    """Keep a share of the prompts (the last ones) for evaluation, unless the task brings its own.

    >>> split_held_out(Task(["a", "b", "c", "d"], len), 0.25).held_out
    ({'prompt': 'd'},)
    """
    if task.held_out or share == 0:
        return task
    kept = round(len(task.prompts) * share)
    if not 0 < kept < len(task.prompts):
        raise Invalid(
            f"held_out is {share}, which keeps {kept} of {len(task.prompts)} prompts; both parts "
            "need at least one"
        )
    return replace(task, prompts=task.prompts[:-kept], held_out=task.prompts[-kept:])
