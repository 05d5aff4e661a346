"""What a run shows: display, transcripts, report, sinks."""

import io
import re

from rich.console import Console
from trainer_builders import group

from trimtab.trainer import report
from trimtab.trainer.config import Config
from trimtab.trainer.display import Display, duration
from trimtab.trainer.folder import Folder
from trimtab.trainer.logbook import Logbook


def console():
    return Console(file=io.StringIO(), width=120)


METRICS = {"env/all/reward/total": 0.25, "time/tokens_per_second": 812.4, "time/total": 2.0}


def test_a_line_a_step():
    out = console()
    with Display("plain", title="t", steps=10, console=out) as display:
        display.step(4, METRICS)
    text = out.file.getvalue()
    assert text.startswith("step 5/10: reward 0.250, tok/s 812, s/step 2.00, ")
    assert "left" in text


def test_the_live_table_shows_the_last_steps_and_the_time_left():
    out = console()
    display = Display("live", title="sums · grpo", steps=4, console=out)
    for step in range(3):
        display.step(step, {"env/all/reward/total": step / 4, "staleness/mean": 1.0})
    out.print(display.render())
    text = out.file.getvalue()
    assert "step 3/4" in text
    assert re.search(r"reward\s+stale", text)
    assert re.search(r"3\s+0.500\s+1.0", text)
    assert "left" in text


def test_warnings_are_told_a_few_times_and_then_counted():
    out = console()
    display = Display("plain", title="t", steps=1, console=out)
    for i in range(5):
        display.warn("raised", f"number {i}")
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 3
    assert "further ones only in failures.jsonl" in lines[-1]
    assert display.warned == {"raised": 5}


def test_durations():
    assert (duration(65), duration(3725.2)) == ("1:05", "1:02:05")


def test_a_report_needs_nothing_else(tmp_path):
    out = console()
    with Folder(tmp_path) as folder:
        folder.write_config({"steps": 3})
        logbook = Logbook(
            Config(transcripts=2), folder, Display("plain", title="t", steps=3, console=out), []
        )
        for step in range(3):
            logbook.rollouts(step, [group(0, [1.0, None])])
            logbook.step(step, METRICS | {"progress/batch": step, "optim/clip_frac_low": 0.1})
        logbook.end(3, {"test/greedy/reward/total": 0.75})
        page, picture = report.write(folder, "a <run>")
    text = page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert text.count("<svg") == 2  # rewards and clip fractions are all that was reported
    assert not re.search(r'(src|href)="?https?:', text)
    assert "<script" not in text
    assert "a &lt;run&gt;" in text
    assert "held out, greedy" in text
    assert "3 completions." in text
    assert "no; prompt 'p': the completion is left out" in out.file.getvalue()
    failures = Folder(tmp_path).lines("failures.jsonl")
    assert [f["failure"] for f in failures] == ["none: no"] * 3
