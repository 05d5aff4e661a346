"""Raises servers: a process that has read torch and transformers once and forks for each server.

A fork is the real command, `trimtab serve`, in a process of its own, in a third of a second rather
than three. Run as `python -m crash.nursery` in tests/; a line of JSON on stdin is a request:

    {"args": ["--port", "1234", ...], "log": "file", "point": "commit:after", "times": 1,
     "mark": "file", "every": 2}            answers {"pid": 4711}
    {"wait": 4711}                          answers {"status": -9}
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path

ROOMS = ("trimtab.cli", "trimtab.server", "trimtab.wire.app", "trimtab.service.core", "uvicorn",
         "uvicorn.protocols.http.httptools_impl", "uvicorn.loops.asyncio", "uvicorn.lifespan.off",
         "torch", "transformers", "transformers.models.llama.modeling_llama", "trimtab.tiny",
         "trimtab.engine.models", "trimtab.engine.torch_learner", "trimtab.engine.torch_sampler",
         "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
         "safetensors.torch", "asyncio")  # fmt: skip


def serve(request) -> None:
    """Become a server. Does not return."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: die with the nursery
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for handle in (1, 2):
        os.dup2(out, handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 1
    try:
        from crash import points

        if request.get("every"):
            points.often(request["every"])
        if request.get("point"):
            mark = Path(request["mark"])
            points.install(points.Trap(request["point"], request.get("times", 1), mark))
        if request.get("hook"):
            module, name = request["hook"].split(":")
            getattr(importlib.import_module(module), name)()
        from trimtab.cli import app

        app(["serve", *request["args"]], standalone_mode=False)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        status = getattr(error, "exit_code", 1)
    finally:
        os._exit(status)


def main() -> None:
    for room in ROOMS:
        importlib.import_module(room)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                serve(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
