"""What a model's journal says it must become, and the jobs that make it so again.

A snapshot holds the model after one of its requests. From there on each request has its turn again,
in the order of its id: what was done is run, what failed does to the window what it did then. The
answers were given already, so nothing is written but an error in the log where one would now be
another. The first id that has not had its turn is where the lane goes on.

    plan    rows to steps: no model, no learner, no blob
    Replay  a step to a job on the learner's thread
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.errors import Invalid, Lost
from trimtab.service.futures import GRADIENT, STEP
from trimtab.service.jobs import Jobs, Run
from trimtab.service.lanes import Done
from trimtab.service.models import Model
from trimtab.service.orders import Orders
from trimtab.service.parts import Parts
from trimtab.service.snapshots import RESTORE, Snapshot
from trimtab.types import OptimStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """A request that had its turn. `spoils`: it adds nothing to a window that it should have."""

    seq_id: int
    does: Literal["again", "spoils", "fails"]
    request_id: str = ""
    kind: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """`refused` have not had their turn: (seq_id, effect). `doomed` are pending though their lane
    gave up on something before them: seq_id to the id that never came."""

    steps: tuple[Step, ...]
    next_seq: int
    refused: tuple[tuple[int, int], ...] = ()
    doomed: tuple[tuple[int, int], ...] = ()


def plan(rows: Sequence[sqlite3.Row], gaps: Sequence[sqlite3.Row], first: int) -> Plan:
    """`rows`: requests from `first` on, by seq_id, each with the size of its body."""
    known = {row["seq_id"]: row for row in rows}
    missed = {seq_id for gap in gaps for seq_id in json.loads(gap["missed"])}
    doomed = {
        seq_id: gap["first"]
        for seq_id, row in known.items()
        for gap in gaps
        if row["state"] == "pending" and gap["first"] < seq_id < gap["after"]
    }
    steps: list[Step] = []
    at = first
    while True:
        row = known.get(at)
        if at in missed or at in doomed:
            if at in missed or (row is not None and row["effect"] == GRADIENT):
                steps.append(Step(at, "spoils"))
        elif row is None or row["state"] == "pending":
            break
        elif (step := _step(row)) is not None:
            steps.append(step)
        at += 1
    refused = tuple((s, r["effect"]) for s, r in known.items() if s > at and r["state"] == "failed")
    return Plan(tuple(steps), at, refused, tuple(sorted(doomed.items())))


def _step(row: sqlite3.Row) -> Step | None:
    """What a finished request is to a replay: nothing, where it changed nothing."""
    failed, effect = row["state"] == "failed", row["effect"]
    where = (row["request_id"], row["kind"], row["size"])
    if row["kind"] == "load_weights" and not failed:  # its snapshot would stand in the journal
        return Step(row["seq_id"], "again", *where)
    if effect == GRADIENT:
        return Step(row["seq_id"], "spoils" if failed else "again", *where)
    if effect == STEP:
        return Step(row["seq_id"], "fails" if failed else "again", *where)
    return None


@dataclass(frozen=True, slots=True)
class Replay:
    """The jobs that bring one model back."""

    parts: Parts
    orders: Orders
    model: Model

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.parts, self.model)

    def begin(self, snapshot: Snapshot | None) -> Run:
        """The model as its snapshot has it, or as it was created."""

        def run() -> Done:
            model_id, learner = self.jobs.model_id, self.jobs.engine.learner
            if snapshot is None:
                return self._created()
            folder = self.parts.snapshots.home / snapshot.folder
            RESTORE[snapshot.form](learner, model_id, folder)
            self.model.contents = snapshot.contents
            for seq_id in snapshot.failed:
                self.model.window.add(seq_id)
            return NOTHING_TO_TELL

        return run

    def _created(self) -> Done:
        created = self.parts.store.row(
            "SELECT kind FROM requests WHERE request_id = ?", (f"{self.jobs.model_id}:0",)
        )
        if created is None or created["kind"] != "create_model":
            raise Lost("the journal holds neither a snapshot of it nor how it was created")
        self.jobs.create()
        return NOTHING_TO_TELL

    def step(self, step: Step) -> Run:
        if step.does == "spoils":
            return lambda: self._spoil(step.seq_id)
        if step.does == "fails":
            return lambda: self._fail(step)
        again = self._again(step)
        return self.jobs.kept(again, step.seq_id, step.size, between=step.kind == "optim_step")

    def _spoil(self, seq_id: int) -> Done:
        self.model.window.add(seq_id)
        return NOTHING_TO_TELL

    def _fail(self, step: Step) -> Done:
        request = self.orders.read(step.request_id, step.kind)
        assert isinstance(request, OptimStep)
        return self.jobs.failed_step(request)

    def _again(self, step: Step) -> Run:
        run = self.orders.journalled(step.request_id, step.kind, self.model)

        def compared() -> Done:
            if step.kind == "load_weights":
                raise Lost(f"the journal holds no snapshot of the load {step.request_id!r}")
            try:
                done = run()
            except Invalid as error:
                raise Lost(f"request {step.request_id!r} would fail now: {error}") from error
            told = self.parts.store.row(
                "SELECT body FROM results WHERE request_id = ?", (step.request_id,)
            )
            if told is not None and told["body"] != done.body:
                log.error(
                    "request %s gives another result than before the restart: was the server"
                    " started with other settings, or on another machine?",
                    step.request_id,
                )
            return NOTHING_TO_TELL

        return compared


NOTHING_TO_TELL = Done(b"", "")
