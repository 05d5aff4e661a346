"""The writer, its group commits, and who may open the file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimtab.errors import Invalid, Stopping
from trimtab.service.migrations import MIGRATIONS
from trimtab.service.store import Store

from .support import run


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def put(name: str):
    return lambda db: db.execute("INSERT INTO results VALUES (?, x'01')", (name,)).rowcount


def test_many_writes_share_few_commits(store):
    commits = []
    store.submit(lambda db: db.set_trace_callback(lambda s: commits.append(s == "COMMIT"))).result()
    for future in [store.submit(put(str(i))) for i in range(600)]:
        assert future.result() == 1
    assert sum(commits) < 60
    assert store.row("SELECT COUNT(*) AS n FROM results")["n"] == 600


def test_a_write_that_raises_is_rolled_back_alone(store):
    def half(db):
        put("half")(db)
        raise ValueError("no")

    good, bad, last = store.submit(put("a")), store.submit(half), store.submit(put("b"))
    with pytest.raises(ValueError, match="no"):
        bad.result()
    assert good.result() == last.result() == 1
    assert [r["request_id"] for r in store.read("SELECT * FROM results ORDER BY 1")] == ["a", "b"]


def test_a_clash_is_told_to_its_writer(store):
    async def script():
        await store.write(put("a"))
        with pytest.raises(sqlite3.IntegrityError):
            await store.write(put("a"))

    run(script())


def test_a_second_server_is_refused(tmp_path):
    first = Store(tmp_path)
    with pytest.raises(Invalid, match=rf"in use by another trimtab server \(process {os.getpid()}"):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()


def test_a_newer_schema_is_refused_and_the_directory_let_go(tmp_path):
    store = Store(tmp_path)
    store.submit(lambda db: None).result()
    store.close()
    db = sqlite3.connect(tmp_path / "trimtab.sqlite3")
    db.execute(f"PRAGMA user_version = {MIGRATIONS[-1][0] + 1}")
    db.close()
    for _ in range(2):
        with pytest.raises(Invalid, match="newer trimtab"):
            Store(tmp_path)


def test_closing_commits_what_is_queued_and_refuses_more(tmp_path):
    store = Store(tmp_path)
    last = [store.submit(put(str(i))) for i in range(50)][-1]
    store.close()
    assert last.result() == 1
    with pytest.raises(Stopping):
        store.submit(put("late"))


def test_a_commit_survives_sigkill(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from trimtab.service.store import Store
        store = Store(Path({str(tmp_path)!r}))
        store.submit(lambda db: db.execute("INSERT INTO results VALUES ('kept', x'01')")).result()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    store = Store(tmp_path)
    assert store.row("SELECT request_id FROM results")["request_id"] == "kept"
    store.close()


def test_a_directory_that_cannot_be_used_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match=r"data_dir: .*/x cannot be written \(Not a directory\)"):
        Store(tmp_path / "file" / "x")
    (tmp_path / "trimtab.sqlite3").write_bytes(b"this is no database, whatever its name" * 100)
    with pytest.raises(Invalid, match=r"trimtab.sqlite3 cannot be used \(file is not a database\)"):
        Store(tmp_path)

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(Invalid, match=r"cannot be written \(Read-only file system\)"):
        Store(tmp_path / "other")


def test_readers_that_are_at_work_outlive_the_end(tmp_path):
    """A connection is never closed under a thread that reads with it."""
    store = Store(tmp_path)
    with ThreadPoolExecutor(4) as threads:

        def reading():
            with pytest.raises(Stopping):
                while True:
                    store.read("SELECT * FROM results")

        readers = [threads.submit(reading) for _ in range(4)]
        for i in range(50):
            store.submit(put(str(i))).result()
        store.close()
        for reader in readers:
            reader.result(10)


def test_sync_writes_the_log_to_the_disk(store, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle)))
    store.submit(put("a")).result()
    store.sync()
    assert len(synced) == 1
