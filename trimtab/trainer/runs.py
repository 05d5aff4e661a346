"""Puts a run together and sees it through: task, folder, server, model, then `loop`.

A server that goes away and comes back is met with a new session from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tinker

from trimtab.trainer import checkpoints, connect, prompts, resume
from trimtab.trainer.config import Config
from trimtab.trainer.display import Display
from trimtab.trainer.folder import Folder, State
from trimtab.trainer.grading import Grader
from trimtab.trainer.logbook import Logbook
from trimtab.trainer.loop import Result, Run
from trimtab.trainer.objective import Objective, objective
from trimtab.trainer.renderer import Renderer
from trimtab.trainer.rollouts import Limits, Roller
from trimtab.trainer.sinks import sinks
from trimtab.trainer.stopped import ServerLost
from trimtab.trainer.task import Task, load, split_held_out

FUTILE = 2  # restarts in a row that got no step further


def train(
    config: Config, task: Task | None = None, *, service: tinker.ServiceClient | None = None
) -> Result:
    """Train and return where the results are. `task` in place of `config.task`, `service` in place
    of `config.base_url`.

        result = train(Config(task="my_task.py", base_url="http://127.0.0.1:8000", steps=50))
    """
    return asyncio.run(train_async(config, task, service=service))


async def train_async(
    config: Config, task: Task | None = None, *, service: tinker.ServiceClient | None = None
) -> Result:
    task = task or load(config.task, reward=config.reward, options=config.task_options)
    task = split_held_out(task, config.held_out)
    goal = objective(config)
    path = Path(config.log_path) if config.log_path else resume.default_path(config, task.name)
    with Folder(path) as folder:
        if service is None:
            connect.reach(config)
        plan = Plan(config, task, goal, folder)
        return await plan.see_through(resume.begin(folder, config), service)


@dataclass(frozen=True)
class Plan:
    """All that is settled before a server is asked."""

    config: Config
    task: Task
    goal: Objective
    folder: Folder

    async def see_through(
        self, state: State | None, service: tinker.ServiceClient | None
    ) -> Result:
        """Attempts, each in a session of its own, as long as they get any further."""
        news, futile = "", 0
        while True:
            try:
                with connect.reporting():
                    async with self._session(service) as client:
                        return await self._attempt(state, client, news)
            except ServerLost as error:
                before, state = state, self.folder.state()
                futile = futile + 1 if _step(state) == _step(before) else 0
                if futile == FUTILE:
                    raise
                self.folder.rewind(_step(state))
                news = f"{error.cause}; going on from step {_step(state)}"

    @contextlib.asynccontextmanager
    async def _session(
        self, given: tinker.ServiceClient | None
    ) -> AsyncIterator[tinker.ServiceClient]:
        if given is not None:
            yield given
            return
        service = connect.service_client(self.config, self.task.name)
        status: Literal["success", "errored"] = "errored"
        try:
            yield service
            status = "success"
        finally:
            # A server that is gone need not be waited for.
            with contextlib.suppress(TimeoutError, tinker.TinkerError):
                await service.close(status).result_async(timeout=5)

    async def _attempt(
        self, state: State | None, service: tinker.ServiceClient, news: str
    ) -> Result:
        config = self.config
        # The public create_rest_client is deprecated; RestClient() does not know this address.
        rest = service._rest_client()
        model = await connect.choose_model(rest, config.model)
        title = f"{self.task.name} · {self.goal.algorithm.name} · {model.name}"
        with Display(
            config.progress, title=title, steps=config.steps, first=_step(state)
        ) as display:
            if news:
                display.say(news)
            checkpoint = None if state is None else state.checkpoint
            client = await checkpoints.start(service, config, model.name, checkpoint)
            roller, task = self._roller(client, model, display)
            run = Run(
                config=config,
                task=task,
                goal=self.goal,
                folder=self.folder,
                logbook=Logbook(config, self.folder, display, sinks(config, self.folder.path)),
                client=client,
                rest=rest,
                reference=await _reference(service, config, model.name),
                roller=roller,
                state=state,
            )
            try:
                return await run.train(title)
            finally:
                await run.close()

    def _roller(
        self, client: tinker.TrainingClient, model: connect.Model, display: Display
    ) -> tuple[Roller, Task]:
        config = self.config
        renderer = Renderer(client.get_tokenizer(), self.task.stop)
        limits = Limits(config.max_tokens, config.max_turns, model.context)
        task, skipped = prompts.fitting(
            self.task, renderer, limits, skip=config.long_prompts == "skip"
        )
        if skipped:
            display.say(f"skipped {skipped} prompts that are too long for the context")
        return Roller(renderer, Grader(task, timeout=config.reward_timeout), limits), task


def _step(state: State | None) -> int:
    return 0 if state is None else state.step


async def _reference(
    service: tinker.ServiceClient, config: Config, model: str
) -> tinker.SamplingClient | None:
    """π_ref, unless nothing uses it."""
    if config.kl_penalty_coef == 0 and config.kl_loss_coef == 0:
        return None
    if config.reference == "base":
        made = service.create_sampling_client(base_model=model)
    else:
        made = service.create_sampling_client(model_path=config.reference)
    client: tinker.SamplingClient = await made
    return client
