"""The training loop: rollouts -> rewards -> advantages -> mini-batches -> publish, step by step.

Read `Run.train` from top to bottom; each line names the module that does it. Speaks to the server
through the official SDK alone. What a run needs is put together in `runs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tinker

from trimtab.trainer import checkpoints
from trimtab.trainer.ahead import Ahead, ages
from trimtab.trainer.algorithms import State as AlgorithmState
from trimtab.trainer.batch import Batch, build
from trimtab.trainer.clock import Clock
from trimtab.trainer.config import Config, learning_rate
from trimtab.trainer.evaluate import evaluate
from trimtab.trainer.folder import Folder, State
from trimtab.trainer.logbook import Logbook
from trimtab.trainer.metrics import (
    Metrics,
    left_out_metrics,
    rollout_metrics,
    sampler_gap,
    staleness_metrics,
    update_gap,
)
from trimtab.trainer.objective import Objective
from trimtab.trainer.order import Order, sampling_seed, stream
from trimtab.trainer.rollouts import Draw, Roller
from trimtab.trainer.scoring import learner_logprobs, reference_logprobs
from trimtab.trainer.task import Task
from trimtab.trainer.trajectory import Floats, Group
from trimtab.trainer.update import Updater


@dataclass(frozen=True)
class Result:
    """`checkpoint` resumes training, `sampler` samples; `metrics` has a dict a step, as
    metrics.jsonl has a line."""

    folder: Path
    steps: int
    checkpoint: str
    sampler: str
    metrics: list[dict[str, float]]


class Run:
    """One run in progress."""

    def __init__(
        self,
        *,
        config: Config,
        task: Task,
        goal: Objective,
        folder: Folder,
        logbook: Logbook,
        client: tinker.TrainingClient,
        rest: tinker.RestClient,
        reference: tinker.SamplingClient | None,
        roller: Roller,
        state: State | None,
    ) -> None:
        self.config, self.task, self.goal = config, task, goal
        self.folder, self.logbook, self.display = folder, logbook, logbook.display
        self.client, self.rest, self.reference = client, rest, reference
        self.roller = roller
        self.state = state
        self.algorithm_state: AlgorithmState | None = None if state is None else state.algorithm
        self.first = 0 if state is None else state.step
        self.order = Order(len(task.prompts), seed=config.seed)
        self.updater = Updater(client, config, goal)
        self.begun = time.monotonic() - (0.0 if state is None else state.seconds)
        self.ahead: Ahead[tinker.SamplingClient, Group] = Ahead(
            self._sample,
            groups_per_batch=config.groups_per_batch,
            max_steps_off_policy=config.max_steps_off_policy,
            first=self.first,
            last=config.steps,
            max_in_flight=config.max_groups_in_flight,
        )

    async def train(self, title: str) -> Result:
        if self.state is not None and self.first >= self.config.steps:
            self.display.say(f"the run is at its {self.first} steps already; raise steps to go on")
        sampler = await self._publish()
        self.ahead.publish(sampler, self.first)
        for step in range(self.first, self.config.steps):
            clock = Clock()
            metrics = await self._evaluate(step, sampler, clock)
            with clock.phase("sampling", self.display):
                groups = await self.ahead.batch(step)
            self.logbook.rollouts(step, groups)
            metrics |= rollout_metrics(groups)
            metrics |= staleness_metrics(ages(step, [g.version for g in groups]), step)
            metrics |= await self._learn(step, groups, clock)
            with clock.phase("publish", self.display):
                sampler = await self._publish()
                self.ahead.publish(sampler, step + 1)
            path = await self._save(step + 1, clock)
            metrics |= self._progress(step) | clock.metrics(metrics)
            self.logbook.step(step, metrics)
            await self._record(step + 1, path)
        return await self._end(sampler, title)

    # ---- rollouts

    async def _sample(self, client: tinker.SamplingClient, version: int, group: int) -> Group:
        item = self.task.prompts[self.order[group]]
        seed = self.config.seed
        draw = Draw(
            client,
            self.config.temperature,
            lambda i, turn: sampling_seed(seed, "sample", group, i, turn),
        )
        size = self.config.group_size
        return await self.roller.group(draw, item, size=size, index=group, version=version)

    async def _evaluate(self, step: int, sampler: tinker.SamplingClient, clock: Clock) -> Metrics:
        every = self.config.eval_every
        if not every or step % every or not self.task.held_out:
            return {}
        with clock.phase("evaluate", self.display):
            return await evaluate(self.roller, sampler, self.task.held_out, self.config)

    # ---- learning

    async def _learn(self, step: int, groups: Sequence[Group], clock: Clock) -> Metrics:
        batch, left_out = build(
            groups,
            smallest_group=self.goal.algorithm.smallest_group,
            mask_truncated=self.config.mask_truncated,
        )
        metrics = left_out_metrics(left_out, batch.size)
        if not batch.size:
            self.display.warn(
                "empty", f"no completion of step {step + 1} has a reward: no update was made"
            )
            return metrics
        batch = await self._scored(self._shuffled(step, batch), clock)
        estimate = self.goal.algorithm.advantages(batch, self.config, self.algorithm_state)
        self.algorithm_state = estimate.state
        rate = learning_rate(self.config, step)
        with clock.phase("train", self.display):
            updated = await self.updater.update(
                batch,
                estimate.advantages_D_N,
                rate,
                stream(self.config.seed, "minibatch", step),
            )
        metrics |= estimate.metrics | updated.metrics | sampler_gap(batch, updated.learner_D_N)
        metrics |= {"optim/lr": rate, "optim/steps": float(updated.optimizer_steps)}
        if self.config.compute_post_kl:
            metrics |= await self._post_kl(batch, updated.learner_D_N, clock)
        return metrics

    def _shuffled(self, step: int, batch: Batch) -> Batch:
        if not self.config.shuffle_rewards:
            return batch
        rng = stream(self.config.seed, "shuffle", step)
        return replace(batch, rewards_D=rng.permutation(batch.rewards_D))

    async def _scored(self, batch: Batch, clock: Clock) -> Batch:
        """With π_old and π_ref, where they are asked for."""
        if self.goal.old_logprobs == "recompute":
            with clock.phase("old_logprobs", self.display):
                batch = batch.with_old(await learner_logprobs(self.client, batch.trajectories_D))
        if self.reference is not None:
            with clock.phase("reference", self.display):
                found = await reference_logprobs(self.reference, batch.trajectories_D)
                batch = batch.with_reference(found)
        return batch

    async def _post_kl(self, batch: Batch, learner_D_N: list[Floats], clock: Clock) -> Metrics:
        before = batch.old_D_N if self.goal.old_logprobs == "recompute" else learner_D_N
        with clock.phase("post_kl", self.display):
            after = await learner_logprobs(self.client, batch.trajectories_D)
        return update_gap(before, after, batch)

    # ---- weights

    async def _publish(self) -> tinker.SamplingClient:
        client: tinker.SamplingClient = await self.client.save_weights_and_get_sampling_client(
            record_stability_info=self.goal.records,
            kind="inflight" if self.config.inflight else "snapshot",
        )
        return client

    async def _save(self, done: int, clock: Clock) -> str | None:
        if not checkpoints.due(self.config, done):
            return None
        with clock.phase("save", self.display):
            current = None if self.state is None else self.state.checkpoint
            name = checkpoints.name(self.config, done, current)
            return await checkpoints.save(self.client, name)

    async def _record(self, done: int, path: str | None) -> None:
        """From here on a kill loses nothing of the steps done. Then what an earlier session left
        behind may go."""
        if path is None:
            return
        superseded: tuple[str, ...] = ()
        if self.state is not None:
            left = checkpoints.left_behind(self.state.checkpoint, path)
            superseded = (*self.state.superseded, *left)
        self.state = State(
            step=done,
            checkpoint=path,
            position=done * self.config.groups_per_batch,
            seed=self.config.seed,
            seconds=time.monotonic() - self.begun,
            algorithm=self.algorithm_state,
            superseded=superseded,
        )
        self.folder.write_state(self.state)
        undeleted = await checkpoints.delete(self.rest, superseded)
        self.state = replace(self.state, superseded=undeleted)

    # ---- the end

    def _progress(self, step: int) -> Metrics:
        return {
            "progress/batch": float(step),
            "progress/done_frac": (step + 1) / self.config.steps,
        }

    async def _end(self, sampler: tinker.SamplingClient, title: str) -> Result:
        done = max(self.first, self.config.steps)
        if self.task.held_out and self.config.eval_every:
            self.display.working("evaluating")
            found = await evaluate(self.roller, sampler, self.task.held_out, self.config)
            self.logbook.end(done, found)
        saved = await self.client.save_weights_for_sampler(f"final-{done:06}")
        if self.config.report:
            from trimtab.trainer import report

            page, _ = report.write(self.folder, title)
            self.display.say(f"report: {page}")
        assert self.state is not None
        return Result(
            folder=self.folder.path,
            steps=done,
            checkpoint=self.state.checkpoint,
            sampler=str(saved.path),
            metrics=self.folder.lines("metrics.jsonl"),
        )

    async def close(self) -> None:
        await self.ahead.close()
        self.logbook.close()
