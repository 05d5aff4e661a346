"""What a model's requests do when their turn comes: every function here makes a function that runs
on the learner's thread and leaves a `Done`.

Files are renamed into place here; the rows that make them visible are in `Done.writes`, committed
with the result. Knows no order and no loop.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.errors import Invalid, Lost
from trimtab.service import ids, paths
from trimtab.service.checkpoints import Checkpoint, Weights, exists_error, same
from trimtab.service.futures import SqlWrite
from trimtab.service.lanes import Done
from trimtab.service.models import Model, moved
from trimtab.service.parts import Parts
from trimtab.service.publish import inflight
from trimtab.service.records import CheckpointRecord, Engine, SamplerRecord
from trimtab.service.samplers import SamplingSession
from trimtab.service.training import Checked
from trimtab.types import (
    CreateModelResult,
    LoadWeights,
    LoadWeightsResult,
    OptimStep,
    Result,
    SaveWeights,
    SaveWeightsForSampler,
    SaveWeightsForSamplerResult,
    SaveWeightsResult,
    UnloadModelResult,
    WeightsRef,
)

Run = Callable[[], Done]
UNVERIFIED = "provenance_unverified:sum"


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
            folder = self._folder(found)
            self.engine.learner.load_state(self.model_id, folder, optimizer=request.optimizer)
            self.model.window.take()
            self.model.contents = ids.request_id(self.model_id, seq_id)
            return self._ready(LoadWeightsResult(request.path, self.model_id))

        return run

    def unload(self) -> Done:
        self.engine.learner.unload(self.model_id)
        self.parts.publisher.retire(self.model.record.base_model, inflight(self.model_id))
        return self._done(UnloadModelResult(self.model_id))

    # ---- training

    def forward_backward(self, checked: Checked) -> Run:
        def run() -> Done:
            self._alive()
            result = self.engine.learner.forward_backward(self.model_id, checked.batch)
            metrics = {**result.metrics, UNVERIFIED: float(checked.unverified)}
            return self._done(replace(result, metrics=metrics))

        return run

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
            result = self.engine.learner.optim_step(self.model_id, request.params)
            self.model.contents = ids.request_id(self.model_id, request.seq_id)
            return self._done(result)

        return run

    # ---- saving

    def save_weights(self, request: SaveWeights) -> Run:
        def run() -> Done:
            self._alive()
            learner, checkpoints = self.engine.learner, self.parts.checkpoints
            wanted = self.checkpoint(request)
            standing = checkpoints.find(wanted.record.path)
            result = SaveWeightsResult(wanted.record.path)
            if standing is not None and same(standing, wanted):
                return self._done(result)
            if standing is not None and not request.overwrite:
                raise exists_error(wanted.record.path)
            folder, size = paths.write_folder(
                checkpoints.home, lambda folder: learner.save_state(self.model_id, folder)
            )
            step = learner.step_count(self.model_id)
            record = replace(wanted.record, size_bytes=size, step=step)
            put = checkpoints.written(replace(wanted, record=record, folder=folder))
            after = None if standing is None else lambda: checkpoints.remove(standing.folder)
            return self._done(result, put, after=after)

        return run

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

    def checkpoint(self, request: SaveWeights | SaveWeightsForSampler) -> Checkpoint:
        """The checkpoint a save asks for, with what the model holds now and no folder yet."""
        kind = "weights" if isinstance(request, SaveWeights) else "sampler_weights"
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
        if not self.model.live:
            raise Invalid(self.model.why)

    def _folder(self, checkpoint: Checkpoint) -> Path:
        folder = self.parts.checkpoints.home / checkpoint.folder
        if not folder.is_dir():
            raise Lost(f"the files of checkpoint {checkpoint.record.path!r} are missing on disk")
        return folder

    def _ready(self, result: Result) -> Done:
        def after() -> None:
            if self.model.state == "creating":
                self.model.state = "ready"

        return self._done(result, moved(self.model_id, "ready"), after=after)

    def _done(
        self, result: Result, *writes: SqlWrite, after: Callable[[], None] | None = None
    ) -> Done:
        body, content_type = self.parts.codec.encode(result)
        return Done(body, content_type, writes, after)


def _means(target: str, version: str) -> SqlWrite:
    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT OR REPLACE INTO targets VALUES (?, ?)", (target, version))

    return write
