"""Do the prompts fit the model? Told before the first token is sampled. Knows no server."""

from __future__ import annotations

from dataclasses import replace

from trimtab.errors import Invalid
from trimtab.trainer.renderer import Renderer
from trimtab.trainer.rollouts import Limits
from trimtab.trainer.task import Item, Task


def fitting(task: Task, renderer: Renderer, limits: Limits, *, skip: bool) -> tuple[Task, int]:
    """The task with the prompts that leave room for `max_tokens`, and how many were skipped.
    Without `skip` the first that does not fit is an error."""
    prompts = _fitting(task.prompts, "prompts", renderer, limits, skip)
    held_out = _fitting(task.held_out, "held_out", renderer, limits, skip)
    if not prompts:
        raise Invalid(f"task {task.name}: every prompt is too long for the model's context")
    skipped = len(task.prompts) - len(prompts) + len(task.held_out) - len(held_out)
    return replace(task, prompts=prompts, held_out=held_out), skipped


def _fitting(
    items: tuple[Item, ...] | object, name: str, renderer: Renderer, limits: Limits, skip: bool
) -> tuple[Item, ...]:
    kept = []
    assert isinstance(items, tuple)
    for i, item in enumerate(items):
        tokens = len(renderer.prompt(item))
        if limits.room(tokens) >= limits.max_tokens:
            kept.append(item)
        elif not skip:
            raise Invalid(
                f"{name}[{i}] has {tokens} tokens; with max_tokens={limits.max_tokens} and the one "
                f"place that scoring needs it passes the model's context of {limits.context}; "
                "shorten it, lower max_tokens, or drop such prompts with long_prompts=skip"
            )
    return tuple(kept)
