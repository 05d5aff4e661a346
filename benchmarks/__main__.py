"""`make bench`: every benchmark of one model, one after another, into benchmarks/results/.

python -m benchmarks                                # the tiny model
python -m benchmarks --model smollm2 --rounds 2 sampling decoding
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.report import RESULTS, label

ALL = ("startup", "sampling", "decoding", "learning", "rl_step", "overhead", "growth")
IN_PROCESS = ("sampling", "decoding", "learning")
REAL = ("sampling", "decoding", "learning", "rl_step")
REAL_GROWTH = ("--only", "batch,adapters")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALL)}; by default all that pay")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, help="of each; fewer is quicker and noisier")
    parser.add_argument(
        "--cpu", action="store_true", help=f"CPU time of one thread, in {', '.join(IN_PROCESS)}"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(ALL))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(ALL)}")
    real = options.model != "tiny"
    failed = []
    for name in options.names or ((*REAL, "growth") if real else ALL):
        words = [sys.executable, "-m", f"benchmarks.{name}", "--model", options.model]
        words += ["--json", str(RESULTS / f"{name}-{label(options.model)}.json")]
        words += [] if options.rounds is None else ["--rounds", str(options.rounds)]
        words += ["--cpu"] if options.cpu and name in IN_PROCESS else []
        words += REAL_GROWTH if real and name == "growth" else ()
        print(f"\n== {name}", flush=True)
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
