"""What a model's requests do when their turn comes: every function here makes a function that runs
on the learner's thread and leaves a `Done`. `kept` adds the snapshot that may be due after one.

Files are renamed into place here; the rows that make them visible are in `Done.writes`, committed
with the result. Knows no order and no loop.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trimtab.errors import Invalid, Lost, NotFound
from trimtab.service import external, ids, ledger, paths
from trimtab.service.checkpoints import Checkpoint, Weights, exists_error, same
from trimtab.service.futures import SqlWrite
from trimtab.service.lanes import Done
from trimtab.service.models import Model, moved
from trimtab.service.parts import Parts
from trimtab.service.publish import inflight
from trimtab.service.records import CheckpointRecord, Engine, SamplerRecord
from trimtab.service.samplers import SamplingSession
from trimtab.service.snapshots import Row
from trimtab.service.training import Checked
from trimtab.types import (
    CreateModelResult,
    LoadWeights,
    LoadWeightsResult,
    OptimStep,
    Request,
    Result,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsExternalResult,
    SaveWeightsForSampler,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
    UnloadModelResult,
    WeightsRef,
)

Run = Callable[[], Done]
SESSION_END = "session-end"  # the name of what is saved because a session ended
UNVERIFIED = "provenance_unverified:sum"
SAVED_AS = {
    SaveWeights: "weights",
    SaveWeightsForSampler: "sampler_weights",
    SaveWeightsExternal: "external_weights",
}


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of one model."""

    parts: Parts
    model: Model

    @property
    def model_id(self) -> str:
        return self.model.record.model_id

    @property
    def engine(self) -> Engine:
        return self.parts.engines[self.model.record.base_model]

    def run_of(self, request: Request) -> Run:
        """The job of a request that was checked and needs nothing but itself."""
        if isinstance(request, OptimStep):
            return self.optim_step(request)
        if isinstance(request, SaveWeights):
            return self.save_weights(request)
        if isinstance(request, SaveWeightsForSampler):
            return self.save_weights_for_sampler(request)
        if isinstance(request, SaveWeightsExternal):
            return self.save_weights_external(request)
        assert isinstance(request, LoadWeights)
        assert request.seq_id is not None
        return self.load(request, request.seq_id)

    # ---- models

    def create(self) -> Done:
        self.engine.learner.create(self.model_id, self.model.record.lora)
        self.model.contents = ids.request_id(self.model_id, 0)
        return self._ready(CreateModelResult(self.model_id))

    def load(self, request: LoadWeights, seq_id: int) -> Run:
        """Load into this model; with seq_id 0, the load is what creates it."""

        def run() -> Done:
            if seq_id:
                self._alive()
            found = self.parts.checkpoints.get(self.model.owner, request.path, "weights")
            if found.record.base_model != self.model.record.base_model:
                raise Invalid(
                    f"checkpoint {request.path!r} belongs to {found.record.base_model}, this model"
                    f" to {self.model.record.base_model}"
                )
            folder, optimizer = self._folder(found), request.optimizer
            try:
                with self._linked(seq_id, folder, optimizer=optimizer) as snapshot:
                    self.engine.learner.load_state(self.model_id, folder, optimizer=optimizer)
            except FileNotFoundError:
                if folder.is_dir():
                    raise
                gone = f"checkpoint {request.path!r} was deleted while it was being loaded"
                raise NotFound(gone) from None
            self.model.window.take()
            self.model.contents = ids.request_id(self.model_id, seq_id)
            return self._ready(LoadWeightsResult(request.path, self.model_id), snapshot)

        return run

    @contextmanager
    def _linked(self, seq_id: int, folder: Path, *, optimizer: bool) -> Iterator[Kept]:
        """The snapshot that a load is. Made before the model changes and gone if it does not."""
        snapshots = self.parts.snapshots
        name, row = snapshots.linked(self.model, seq_id, folder, optimizer=optimizer)
        loaded = False
        try:
            yield Kept(row, partial(snapshots.replaced, name))
            loaded = True
        finally:
            if not loaded:
                snapshots.remove(name)

    def unload(self) -> Done:
        self.engine.learner.unload(self.model_id)
        self.parts.publisher.retire(self.model.record.base_model, inflight(self.model_id))
        return self._done(UnloadModelResult(self.model_id))

    def end(self) -> Done:
        """Unload a model whose session is over, after saving what it has learnt. The gradient of a
        window that no step closed is dropped."""
        writes: list[SqlWrite] = []
        if self.model.contents != ids.request_id(self.model_id, 0):  # something was learnt
            checkpoints, wanted = self.parts.checkpoints, self._farewell()
            standing = checkpoints.holding(self.model_id, self.model.contents)
            if standing is None:
                writes.append(self._write_state(wanted))
                standing = wanted.record.path
            self.model.saved = standing
            writes.append(partial(_saved, self.model_id, standing))
        done = self.unload()
        return replace(done, writes=(*done.writes, *writes))

    def _farewell(self) -> Checkpoint:
        """A checkpoint under a name of the server's own, none of the client's."""
        seconds = int(self.parts.settings.ended_seconds)
        names = (SESSION_END, *(f"{SESSION_END}-{n}" for n in range(2, 1000)))
        for name in names:
            wanted = self.checkpoint(SaveWeights(self.model_id, 0, name, ttl_seconds=seconds))
            if self.parts.checkpoints.find(wanted.record.path) is None:
                return wanted
        raise Invalid(f"model {self.model_id!r} has a thousand checkpoints named {SESSION_END}")

    # ---- training

    def forward_backward(self, checked: Checked) -> Run:
        def run() -> Done:
            self._alive()
            result = self.engine.learner.forward_backward(self.model_id, checked.batch)
            metrics = {**result.metrics, UNVERIFIED: float(checked.unverified)}
            return self._done(replace(result, metrics=metrics), self._trained(checked))

        return run

    def _trained(self, checked: Checked) -> SqlWrite:
        tokens = sum(len(datum.tokens) for datum in checked.batch.data)
        model = self.model
        return ledger.counted(
            model.owner, model.session_id, model.record.base_model,
            {ledger.TRAINING: tokens}, self.parts.clock(),
        )  # fmt: skip

    def optim_step(self, request: OptimStep) -> Run:
        def run() -> Done:
            self._alive()
            failed = self.model.window.take()
            if failed:
                self.engine.learner.clear_window(self.model_id)
                named = ", ".join(map(str, failed))
                raise Invalid(
                    f"optim_step (seq_id {request.seq_id}) was not run: of the requests since the"
                    f" last step, seq_id {named} failed, so the gradient is incomplete; it has been"
                    " dropped: send the batch again"
                )
            stepped = False
            self.engine.learner.check_step(request.params)
            try:
                result = self.engine.learner.optim_step(self.model_id, request.params)
                stepped = True
            finally:
                if not stepped:
                    self.engine.learner.clear_window(self.model_id)
            self.model.contents = ids.request_id(self.model_id, request.seq_id)
            return self._done(result)

        return run

    def failed_step(self, request: OptimStep) -> Done:
        """What an optim_step did that failed: it dropped its window, unless its parameters were
        refused before it touched anything."""
        learner = self.engine.learner
        if not self.model.window.take():
            try:
                learner.check_step(request.params)
            except Invalid:
                return Done(b"", "")
        learner.clear_window(self.model_id)
        return Done(b"", "")

    def kept(self, run: Run, seq_id: int, size: int, *, between: bool) -> Run:
        """`run`, and where it is due a snapshot of what it left. `size` is its body's; `between`
        says that it ends a window."""

        def both() -> Done:
            began = time.perf_counter()
            done = run()
            seconds = time.perf_counter() - began
            later = self.parts.snapshots.look(
                self.model, seq_id, self.engine.learner, seconds, size, between
            )
            return done if later is None else replace(done, after=later)

        return both

    # ---- saving

    def save_weights(self, request: SaveWeights) -> Run:
        def run() -> Done:
            self._alive()
            checkpoints = self.parts.checkpoints
            wanted = self.checkpoint(request)
            standing = checkpoints.find(wanted.record.path)
            result = SaveWeightsResult(wanted.record.path)
            if standing is not None and same(standing, wanted):
                return self._done(result)
            if standing is not None and not request.overwrite:
                raise exists_error(wanted.record.path)
            put = self._write_state(wanted)
            return self._done(result, put, after=None if standing is None else self._old(standing))

        return run

    def _write_state(self, wanted: Checkpoint) -> SqlWrite:
        """Write the files of a checkpoint; returns the write of its row."""
        learner, checkpoints = self.engine.learner, self.parts.checkpoints
        folder, size = paths.write_folder(
            checkpoints.home, lambda folder: learner.save_state(self.model_id, folder)
        )
        record = replace(wanted.record, size_bytes=size, step=learner.step_count(self.model_id))
        return checkpoints.written(replace(wanted, record=record, folder=folder))

    def _old(self, standing: Checkpoint) -> Callable[[], None]:
        """Remove the files of a checkpoint that was overwritten, off the loop."""

        def remove() -> None:
            self.parts.store.sync()
            self.parts.checkpoints.remove(standing.folder)

        return lambda: self.parts.aside(remove)

    def save_weights_for_sampler(self, request: SaveWeightsForSampler) -> Run:
        """Sampling weights, as a named checkpoint or for a sampling session of their own; an
        inflight save also moves the target that the model's inflight clients share."""

        def run() -> Done:
            self._alive()
            version = ids.request_id(self.model_id, request.seq_id)
            if request.name is not None:
                wanted = replace(self.checkpoint(request), version=version)
                standing = self.parts.checkpoints.find(wanted.record.path)
                if standing is not None and same(standing, wanted):
                    return self._done(SaveWeightsForSamplerResult(wanted.record.path, None))
                if standing is not None:
                    raise exists_error(wanted.record.path)
                return self._export(request, version, wanted, None)
            sampler = self._sampling_session(request, version)
            if self.parts.samplers.find(sampler.record.sampler_id) is not None:
                raise Invalid(
                    f"sampling_session_seq_id {request.sampling_session_seq_id} is in use already"
                )
            return self._export(request, version, None, sampler)

        return run

    def _export(
        self,
        request: SaveWeightsForSampler,
        version: str,
        checkpoint: Checkpoint | None,
        sampler: SamplingSession | None,
    ) -> Done:
        learner, checkpoints = self.engine.learner, self.parts.checkpoints
        base, step = self.model.record.base_model, learner.step_count(self.model_id)
        folder, size = paths.write_folder(
            checkpoints.home, lambda folder: learner.save_adapter(self.model_id, folder)
        )
        weights = Weights(
            version,
            self.model_id,
            base,
            folder,
            step,
            ephemeral=checkpoint is None,
            expires_at=checkpoints.expiry(request.ttl_seconds),
            user_metadata=request.user_metadata,
        )
        writes: list[SqlWrite] = [checkpoints.weights_written(weights)]
        if checkpoint is not None:
            record = replace(checkpoint.record, size_bytes=size, step=step)
            writes.append(checkpoints.written(replace(checkpoint, record=record, folder=folder)))
        if sampler is not None:
            writes.append(self.parts.samplers.written(sampler, self.parts.clock()))
        if request.kind == "inflight":
            ref = WeightsRef(version, base, checkpoints.home / folder, step)
            self.parts.publisher.publish(inflight(self.model_id), ref, self.model_id)
            writes.append(_means(inflight(self.model_id), version))
        path = None if checkpoint is None else checkpoint.record.path
        sampler_id = None if sampler is None else sampler.record.sampler_id
        return self._done(SaveWeightsForSamplerResult(path, sampler_id), *writes)

    def save_weights_external(self, request: SaveWeightsExternal) -> Run:
        def run() -> Done:
            self._alive()
            learner, checkpoints = self.engine.learner, self.parts.checkpoints
            wanted = self.checkpoint(request)
            path = wanted.record.path
            standing = checkpoints.find(path)
            if standing is not None and same(standing, wanted):
                return self._done(SaveWeightsExternalResult(path, standing.record.size_bytes))
            if standing is not None:
                raise exists_error(path)
            save = partial(learner.save_adapter, self.model_id)
            folder, size = paths.write_folder(
                checkpoints.home, lambda folder: external.export(folder, save, request.recipients)
            )
            record = replace(wanted.record, size_bytes=size, step=learner.step_count(self.model_id))
            put = checkpoints.written(replace(wanted, record=record, folder=folder))
            return self._done(SaveWeightsExternalResult(path, size), put)

        return run

    def checkpoint(
        self, request: SaveWeights | SaveWeightsForSampler | SaveWeightsExternal
    ) -> Checkpoint:
        """The checkpoint a save asks for, with what the model holds now and no folder yet."""
        kind = SAVED_AS[type(request)]
        name = request.name if request.name is not None else f"checkpoint-{request.seq_id:06d}"
        record = CheckpointRecord(
            path=paths.path_of(self.model_id, kind, name),
            kind=kind,
            model_id=self.model_id,
            base_model=self.model.record.base_model,
            lora=self.model.record.lora,
            optimizer=self.model.record.optimizer,
            created_at=self.parts.clock(),
            expires_at=self.parts.checkpoints.expiry(request.ttl_seconds),
            user_metadata=dict(request.user_metadata or {}),
        )
        contents, ttl = self.model.contents, request.ttl_seconds
        if isinstance(request, SaveWeightsExternal) and request.recipients:
            contents = " ".join((contents, *request.recipients))
        return Checkpoint(record, self.model.owner, "", contents, ttl_seconds=ttl)

    def _sampling_session(self, request: SaveWeightsForSampler, version: str) -> SamplingSession:
        assert request.sampling_session_seq_id is not None
        sampler_id = ids.sampler_id(self.model.session_id, request.sampling_session_seq_id)
        target = inflight(self.model_id) if request.kind == "inflight" else version
        record = SamplerRecord(sampler_id, self.model.record.base_model)
        return SamplingSession(record, self.model.session_id, self.model.owner, target)

    # ---- shared

    def _alive(self) -> None:
        """A job behind a creation that failed must not run."""
        if self.model.state == "lost":
            raise Lost(self.model.why)
        if not self.model.live:
            raise Invalid(self.model.why)

    def _folder(self, checkpoint: Checkpoint) -> Path:
        folder = self.parts.checkpoints.home / checkpoint.folder
        if not folder.is_dir():
            raise Lost(f"the files of checkpoint {checkpoint.record.path!r} are missing on disk")
        return folder

    def _ready(self, result: Result, snapshot: Kept | None = None) -> Done:
        def after() -> None:
            if self.model.state == "creating":
                self.model.state = "ready"
            if snapshot is not None:
                self.parts.aside(snapshot.settle)

        writes = [moved(self.model_id, "ready")]
        if snapshot is not None:
            writes.append(snapshot.write)
        return self._done(result, *writes, after=after)

    def _done(
        self, result: Result, *writes: SqlWrite, after: Callable[[], None] | None = None
    ) -> Done:
        body, content_type = self.parts.codec.encode(result)
        return Done(body, content_type, writes, after)


@dataclass(slots=True)
class Kept:
    """The row of a snapshot, and what is to be done once it is committed."""

    row: Row
    replaced: Callable[[str | None], None]
    old: str | None = None

    def write(self, db: sqlite3.Connection) -> None:
        self.old = self.row(db)

    def settle(self) -> None:
        self.replaced(self.old)


def _saved(model_id: str, path: str, db: sqlite3.Connection) -> None:
    db.execute("UPDATE models SET saved = ? WHERE model_id = ?", (path, model_id))


def _means(target: str, version: str) -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT OR REPLACE INTO targets VALUES (?, ?)", (target, version))

    return write
