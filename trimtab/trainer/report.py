"""The report of a run: one HTML file that needs nothing else, and a PNG of its curves.

Made from the run's folder alone, so it can be made again at any time. Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trimtab.trainer.display import duration
from trimtab.trainer.figures import Lines, png, present, series, svg
from trimtab.trainer.folder import Folder
from trimtab.trainer.stopped import told

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#22272e;background:#fff}
body{max-width:1120px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem} h2{font-size:1.1rem;margin-top:2rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:.6rem}
.grid svg{width:100%;height:auto} table{border-collapse:collapse;font-size:.85rem}
td,th{padding:.15rem .7rem .15rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;background:#f5f6f8;padding:.5rem .7rem;border-radius:4px;margin:.3rem 0}
.turn{border-left:3px solid #3b6ea8} .muted{color:#6a737d} details{margin:.4rem 0}
"""

HEADLINE = (
    ("env/all/reward/total", "reward, training"),
    ("test/greedy/reward/total", "reward, held out, greedy"),
    ("test/env/all/reward/total", "reward, held out, sampled"),
    ("env/all/ac_tokens_per_turn", "tokens a turn"),
    ("optim/kl_sample_train_v1", "KL sampler to learner"),
    ("kl_policy_base", "KL to the reference"),
    ("optim/entropy", "entropy"),
)


def write(folder: Folder, title: str) -> tuple[Path, Path]:
    """report.html and report.png in the run's folder."""
    lines = folder.lines("metrics.jsonl")
    page, picture = folder.path / "report.html", folder.path / "report.png"
    text = html(
        title,
        lines,
        folder.config() or {},
        folder.lines("transcripts.jsonl"),
        folder.lines("failures.jsonl"),
    )
    with told(page):
        page.write_text(text, encoding="utf-8")
    with told(picture):
        picture.write_bytes(png(lines, title))
    return page, picture


def html(
    title: str,
    lines: Lines,
    config: Mapping[str, Any],
    transcripts: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
) -> str:
    curves = "".join(f"<div>{svg(panel, lines)}</div>" for panel in present(lines))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{escape(title)}</h1><p class=muted>{escape(_summary(lines))}</p>"
        f"{_first_and_last(lines)}<h2>Curves</h2><div class=grid>{curves}</div>"
        f"<h2>Completions</h2>{_transcripts(transcripts)}"
        f"<h2>Without a reward</h2>{_failed(failures)}"
        f"<h2>Options</h2>{_table([(n, repr(v)) for n, v in sorted(config.items())])}</html>"
    )


def _summary(lines: Lines) -> str:
    steps = series(lines, "progress/batch")[0]
    seconds = sum(series(lines, "time/total")[1])
    tokens = sum(series(lines, "env/all/total_ac_tokens")[1])
    return f"{len(steps)} steps, {tokens:,.0f} sampled tokens, {duration(seconds)}"


def _first_and_last(lines: Lines) -> str:
    rows = []
    for metric, label in HEADLINE:
        values = series(lines, metric)[1]
        if values:
            rows.append((label, f"{values[0]:.4f}", f"{values[-1]:.4f}", f"{max(values):.4f}"))
    return _table(rows, header=("", "first", "last", "highest"))


def _transcripts(found: Sequence[Mapping[str, Any]]) -> str:
    """Of the first and the last steps that have any."""
    steps = sorted({line["step"] for line in found})
    shown = [line for line in found if line["step"] in {*steps[:1], *steps[-2:]}]
    return "".join(_transcript(line) for line in shown) or "<p class=muted>none were kept</p>"


def _transcript(line: Mapping[str, Any]) -> str:
    parts = [f"<pre>{escape(_prompt_text(line['prompt']))}</pre>"]
    for i, turn in enumerate(line["turns"]):
        parts.append(f"<pre class=turn>{escape(turn) or '&nbsp;'}</pre>")
        if i < len(line["replies"]):
            parts.append(f"<pre>{escape(line['replies'][i])}</pre>")
    cut = ", truncated" if line["truncated"] else ""
    head = f"step {line['step'] + 1}, reward {line['reward']}{cut}"
    return f"<details open><summary>{escape(head)}</summary>{''.join(parts)}</details>"


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _failed(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "<p class=muted>every completion was graded</p>"
    rows = [(str(f["step"] + 1), _prompt_text(f["prompt"])[:200], f["failure"]) for f in found[:20]]
    return f"<p>{len(found)} completions.</p>" + _table(rows, ("step", "prompt", "why"))


def _table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(cell)}" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"
