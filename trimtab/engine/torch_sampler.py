"""The sampler: a thread that decodes every request in flight together, and its front door.

`submit` checks a request and hands it over; the thread runs the loop. Knows nothing of sessions,
futures' names or sequence ids.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from trimtab.engine import checkpoint
from trimtab.engine.base import SampleWork
from trimtab.engine.cached_attention import layout_of
from trimtab.engine.cores import IDLE, Cores
from trimtab.engine.failures import as_server_error
from trimtab.engine.fast_net import faster
from trimtab.engine.jobs import Job
from trimtab.engine.kv import KVMemory, Shape
from trimtab.engine.lora import Adapter
from trimtab.engine.memory import MIB, Memory
from trimtab.engine.models import BaseModel
from trimtab.engine.sampling_limits import SamplerLimits, check_sample, new_tokens
from trimtab.engine.sampling_loop import SamplingLoop
from trimtab.engine.stops import decoder
from trimtab.engine.weights import WeightsShelf
from trimtab.errors import Busy, Invalid, Stopping
from trimtab.types import BaseModelInfo, Sample, SampleResult, WeightsRef

log = logging.getLogger(__name__)
_STOPPING = "the server is stopping; the request stays journalled"


class TorchSampler:
    """engine.base.Sampler on torch, for any number of adapters on one base model.

    `cores` is shared with the learners of the process; `memory` bounds what it computes and
    remembers, and is the machine's where none is given.

        >>> sampler = TorchSampler(base)
        >>> sampler.start()
        >>> sampler.publish("s", WeightsRef("base", base.info.name))
        >>> sampler.submit(SampleWork(request, target="s", head_k=8)).result().sequences
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        limits: SamplerLimits = SamplerLimits(),
        cores: Cores | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.info: BaseModelInfo = base.info
        self.limits = limits
        self._base = base
        self._cores = Cores() if cores is None else cores
        self._decode = None if base.tokenizer is None else decoder(base.tokenizer)
        self._net = faster(base.sampler_net, packed_bytes=limits.packed_bytes)
        self._layout = layout_of(self._net, base.device)
        self._shelf = WeightsShelf(self._read_adapter, limits.adapters)
        self._memory = Memory(device=base.device) if memory is None else memory
        self._kv_bytes = self._fitting(limits.kv_bytes)
        self._loop = self._new_loop()
        self._inbox: list[Job] = []
        self._changed = threading.Condition()
        self._started = False
        self._stopping = False
        self._thread: threading.Thread | None = None  # while there is something to do
        self._memory.may_free(self._forget)

    def _fitting(self, asked: int) -> int:
        """Bytes for keys and values: what is asked for, at most half of what is free now."""
        half = max(0, self._memory.free() // 2)
        if asked > half:
            log.warning(
                "%s: keys and values get %d MiB, not %d: memory_mib is %d, and %d are free",
                *(self.info.name, half // MIB, asked // MIB),
                *(self._memory.limit // MIB, self._memory.free() // MIB),
            )
        return min(asked, half)

    def _new_loop(self) -> SamplingLoop:
        budget = self._kv_bytes // self._layout.bytes_per_token
        free = self._memory.free if self.limits.prefix_cache else None
        kv = KVMemory(self._layout, budget, self._memory.taking, free)
        device, ask = self._base.device, self._memory.check
        return SamplingLoop(self._net, kv, self._shelf, self.limits, device, ask=ask)

    def _forget(self) -> None:
        """Called from any thread that finds too little memory."""
        self._loop.memory.prefixes.clear()

    # ----------------------------------------------------------------------- weights

    def publish(self, target: str, ref: WeightsRef) -> None:
        self._shelf.publish(target, ref)

    def retire(self, target: str) -> None:
        self._shelf.retire(target)

    def _read_adapter(self, path: Path) -> Adapter:
        base = self._base
        return checkpoint.read(
            path,
            base.sampler_net,
            base.info.name,
            max_rank=base.info.max_lora_rank,
            device=base.device,
        ).adapter

    # ----------------------------------------------------------------------- requests

    def check(self, request: Sample) -> None:
        check_sample(request, self.info, self.limits, has_tokenizer=self._decode is not None)
        context, tokens = len(request.prompt) - 1, new_tokens(request, self.info)
        shape = Shape.of(context, tokens, request.num_samples, self.info.max_context)
        need, most = shape.prompt + shape.row, self._loop.memory.budget
        if need > most:
            raise Invalid(
                f"prompt and max_tokens ({request.params.max_tokens}) need memory for {need} "
                f"tokens; this server keeps {most} (lower max_tokens, or raise kv_cache_mib "
                "or memory_mib)"
            )

    def submit(self, work: SampleWork) -> Future[SampleResult]:
        self.check(work.request)
        job = Job(
            work,
            self._shelf.find(work.target),
            limit=new_tokens(work.request, self.info),
            longest=self.info.max_context,
            vocab_size=self.info.vocab_size,
            eos_token_ids=self.info.eos_token_ids,
            decode=self._decode,
        )
        with self._changed:
            if self._stopping:
                raise Stopping(_STOPPING)
            if len(self._inbox) + self._loop.waiting >= self.limits.waiting:
                raise Busy(f"{self.limits.waiting} sampling requests are waiting; send it later")
            self._inbox.append(job)
            self._wake()
        return job.future

    # ----------------------------------------------------------------------- the thread

    def start(self) -> None:
        with self._changed:
            self._started = True
            if self._inbox:
                self._wake()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._end()

    def _wake(self) -> None:
        """Called with the lock held."""
        if self._thread is None and self._started:
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()
        self._changed.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        while self._next_work():
            self._cores.sample()
            try:
                self._loop.step()
            except Exception as error:  # a fault of ours must not leave futures open for ever
                broken, self._loop = self._loop, self._new_loop()
                broken.abandon(as_server_error("the sampler failed", error))

    def _next_work(self) -> bool:
        """Wait for something to do; False when the thread is to end."""
        with self._changed:
            if not self._busy:
                self._changed.wait_for(lambda: self._busy or self._stopping, timeout=IDLE)
            self._take_in()
            going_on = self._loop.busy and not self._stopping
            if not going_on:
                self._loop.rest()
                self._thread = None
            return going_on

    @property
    def _busy(self) -> bool:
        return bool(self._inbox or self._loop.busy)

    def _take_in(self) -> None:
        for job in self._inbox:
            self._loop.add(job)
        self._inbox.clear()

    def _end(self) -> None:
        with self._changed:
            self._take_in()
        self._loop.abandon(Stopping(_STOPPING))
