"""Where a server can be made to die: names of points, and the wrapping of functions there.

Used in a child of `nursery.py`, before the server's own main function runs. The package knows
nothing of this: functions are wrapped from outside, as a debugger would.

    open:before:optim_step         the request has been checked, nothing is written
    open:after:optim_step          its row is committed, the promise has not left
    finish:before:optim_step       it has run, nothing is written
    finish:after:optim_step        the result is committed, nobody has been told
    commit:middle                  a transaction is open and one of its writes done
    commit:after                   COMMIT has returned, nobody has been told
    file:middle:checkpoints        half of a tensor file is written
    rename:before:checkpoints      all files are written and synced under their temporary name
    rename:after:checkpoints       the folder is in place, no row names it
    snapshot:copied                the model was copied, nothing is written
    snapshot:row                   the row is committed, the folder before it is still there
    load:linked                    the files of a load have their second name
    replay:begin, replay:step      a model is being brought back
    answer:submit, answer:retrieve the answer is made, and never sent
    end:saved                      an ended session's weights are written, nothing is committed
"""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

TRAINING = ("create_model", "forward_backward", "optim_step", "save_weights", "load_weights",
            "save_weights_for_sampler")  # fmt: skip
KINDS = (*TRAINING, "sample")
HOMES = ("checkpoints", "snapshots")
POINTS = (
    *(f"{what}:{when}:{kind}" for kind in KINDS for what in ("open", "finish")
      for when in ("before", "after")),
    "commit:middle", "commit:after",
    *(f"{where}:{home}" for home in HOMES
      for where in ("file:middle", "rename:before", "rename:after")),
    "snapshot:copied", "snapshot:row", "load:linked", "replay:begin", "replay:step",
    "answer:submit", "answer:retrieve", "end:saved",
)  # fmt: skip


class Trap:
    """Kills this process at the `times`-th visit of one point, after leaving its name in `mark`."""

    def __init__(self, point: str, times: int, mark: Path) -> None:
        self._point, self._left, self._mark = point, times, mark

    def visit(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left == 0:
            self._mark.write_text(point)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the kill is on its way


def install(trap: Trap) -> None:
    from trimtab.engine import checkpoint
    from trimtab.service import paths
    from trimtab.service.core import Service
    from trimtab.service.futures import Futures
    from trimtab.service.jobs import Jobs
    from trimtab.service.replay import Replay
    from trimtab.service.snapshots import Snapshots
    from trimtab.service.store import Store

    for name in ("open", "finish"):
        around(Futures, name, lambda visit, entry, *rest, n=name: visit(n, entry.kind), trap)
    store(Store, trap)
    files(checkpoint, paths, trap)
    after(Service, "submit", trap, "answer:submit")
    after(Service, "retrieve", trap, "answer:retrieve")
    after(Snapshots, "linked", trap, "load:linked")
    after(Jobs, "end", trap, "end:saved")
    after(Snapshots, "look", trap, "snapshot:copied", when=lambda later: later is not None)
    before(Snapshots, "replaced", trap, "snapshot:row", when=lambda folder, old: bool(old))
    later(Replay, "begin", trap, "replay:begin")
    later(Replay, "step", trap, "replay:step")


def around(owner, name, told, trap) -> None:
    """open:before:KIND and open:after:KIND of a coroutine function."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def wrapped(self, entry, *rest):
        told(lambda what, kind: trap.visit(f"{what}:before:{kind}"), entry)
        answer = await inner(self, entry, *rest)
        told(lambda what, kind: trap.visit(f"{what}:after:{kind}"), entry)
        return answer

    setattr(owner, name, wrapped)


def store(owner, trap) -> None:
    attempt, commit = owner._attempt, owner._commit

    def _attempt(self, write):
        answer = attempt(self, write)
        if self._db.total_changes > 20:  # not the first rows of all
            trap.visit("commit:middle")
        return answer

    def _commit(self, group):
        class Told:
            """The last thing before anybody is told: COMMIT has returned."""

            def __init__(self, db):
                self._db = db

            def __getattr__(self, name):
                return getattr(self._db, name)

            def execute(self, sql, *rest):
                done = self._db.execute(sql, *rest)
                if sql == "COMMIT":
                    trap.visit("commit:after")
                return done

        real, self._db = self._db, Told(self._db)
        try:
            commit(self, group)
        finally:
            self._db = real

    owner._attempt, owner._commit = _attempt, _commit


def files(checkpoint, paths, trap) -> None:
    save, write, rename = checkpoint.save_file, paths.write_folder, Path.rename

    def save_file(tensors, path):
        save(tensors, path)
        home = path.parent.parent.name
        if trap._point == f"file:middle:{home}":
            os.truncate(path, path.stat().st_size // 2)
            trap.visit(f"file:middle:{home}")

    def write_folder(home, fill):
        answer = write(home, fill)
        trap.visit(f"rename:after:{home.name}")
        return answer

    def renamed(self, target):
        if self.name.endswith(".partial"):
            trap.visit(f"rename:before:{self.parent.name}")
        return rename(self, target)

    checkpoint.save_file, paths.write_folder, Path.rename = save_file, write_folder, renamed


def after(owner, name, trap, point, when=lambda answer: True) -> None:
    inner = getattr(owner, name)

    def seen(answer):
        if when(answer):
            trap.visit(point)
        return answer

    @functools.wraps(inner)
    def plain(*args, **options):
        return seen(inner(*args, **options))

    @functools.wraps(inner)
    async def waited(*args, **options):
        return seen(await inner(*args, **options))

    setattr(owner, name, waited if inner.__code__.co_flags & 0x80 else plain)


def before(owner, name, trap, point, when) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(self, *args):
        if when(*args):
            trap.visit(point)
        return inner(self, *args)

    setattr(owner, name, wrapped)


def later(owner, name, trap, point) -> None:
    """A function that makes a function: the point is where that one runs."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(self, *args):
        run = inner(self, *args)

        def visited():
            trap.visit(point)
            return run()

        return visited

    setattr(owner, name, wrapped)


def often(every: int) -> None:
    """Take a snapshot after every so many steps, whatever they cost: a test has no ten minutes."""
    from trimtab.service.snapshots import Snapshots

    steps = 0

    def _due(self, tally, between):
        nonlocal steps
        steps += between
        return between and steps % every == 0

    Snapshots._due = _due
