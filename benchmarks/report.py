"""What the benchmarks share at the command line: the model, the rounds, the JSON that is kept."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab import modelstore, tiny

RESULTS = Path(__file__).parent / "results"
Report = dict[str, Any]


def arguments(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--model",
        default="tiny",
        help="tiny (a random Qwen3 shape of 3.3M parameters), a name of `trimtab model list`, "
        "or a folder that transformers loads",
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser


def with_cpu(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """For what runs in this process alone."""
    parser.add_argument(
        "--cpu", action="store_true", help="one thread, CPU time: for a machine that is very busy"
    )
    return parser


def read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with the `clock` they ask for added."""
    options = parser.parse_args()
    cpu = getattr(options, "cpu", False)
    options.clock = time.process_time if cpu else time.perf_counter
    if cpu:
        torch.set_num_threads(1)
    return options


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """The folder of `--model`; the tiny one exists while the block runs."""
    if name == "tiny":
        with tempfile.TemporaryDirectory() as folder:
            yield tiny_qwen3(Path(folder))
        return
    found = modelstore.resolve(name)
    yield Path(name) if found is None else found[1]


def tiny_qwen3(folder: Path, context: int = 8192) -> Path:
    return tiny.build(
        folder / "tiny",
        architecture="qwen3",
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=768,
        vocab_size=512,
        context=context,
        tied=False,
        init_std=0.02,
    )


def label(model: str) -> str:
    """A model's name in reports and file names."""
    return model if "/" not in model else Path(model).name


def new_report(options: argparse.Namespace, *, cpu: bool = False) -> Report:
    """`clock` says what seconds are: the clock's, or of the processor with one thread (`cpu` where
    they always are)."""
    clock = "CPU" if cpu or getattr(options, "cpu", False) else "wall"
    return {"model": label(options.model), "clock": clock, "machine": machine()}


def machine() -> Report:
    """What the numbers depend on beside the code."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "commit": _commit(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    names = [found.get(key, "") for key in ("model name", "cpu family", "model")]
    units = [u for u in ("avx512f", "avx512_vnni", "avx512_bf16") if u in found.get("flags", "")]
    return " ".join(filter(None, [*names, *units]))


def _commit() -> str:
    asked = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def finish(report: Report, path: Path | None) -> None:
    """Print every number, and keep them where asked."""
    print(
        f"{report['model']}; {report['clock']} time, {report['machine']['threads']} threads, "
        f"load {report['machine']['load']:.1f} before"
    )
    _show(report, 1)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rounded(report), indent=1) + "\n")


def _show(values: Mapping[str, Any], depth: int) -> None:
    for name, value in values.items():
        if name in ("model", "clock", "machine"):
            continue
        if isinstance(value, Mapping):
            print(f"{'  ' * depth}{name}")
            _show(value, depth + 1)
        else:
            print(f"{'  ' * depth}{name:{58 - 2 * depth}}{number(value):>12}")


def number(value: Any) -> str:
    """Three digits that matter, as people write them."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
