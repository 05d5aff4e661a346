"""The method matrix: every public method of the SDK against `trimtab serve`, as a page.

    python -m tests.compat.matrix                     the installed SDK, and docs/compatibility.md
    python -m tests.compat.matrix --sdk FOLDER        an SDK that lies in FOLDER, likewise
    python -m tests.compat.matrix --sdk FOLDER --core     only what training cannot do without

`pip install --no-deps --target FOLDER tinker==X` makes such a folder, without another torch.
Results are kept in tests/compat/results, a file a version; the page is made of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.load.process import serving

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "compatibility.md"
SECONDS = 900


def measured(sdk=None, what="all"):
    """What `walk` says, run in a process of its own against a server in another."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        paths = [str(Path(sdk).absolute())] if sdk else []
        environment = os.environ | {
            "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0",
            "HF_ENDPOINT": server.url, "HF_HOME": f"{folder}/hub", "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        }  # fmt: skip
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.compat.walk", server.url, what],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def kept():
    """Results by version, newest first."""
    found = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    return sorted(found, key=lambda each: version(each["sdk"]), reverse=True)


def version(text):
    return tuple(map(int, text.split(".")))


def keep(found):
    file = RESULTS / f"{found['sdk']}.json"
    if not found["methods"] and file.exists():  # the core alone was tried this time
        found = found | {"methods": json.loads(file.read_text())["methods"]}
    file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(kept()))


# ------------------------------------------------------------------ the page


def page(results):
    newest = next(each for each in results if each["methods"])
    passing = [each["sdk"] for each in results if not troubles(each)]
    head = HEAD.format(sdk=newest["sdk"], newest=results[0]["sdk"], oldest=passing[-1])
    return head + versions(results) + METHODS + methods(newest)


def troubles(found):
    """Steps of the core that this SDK has and that went wrong."""
    return {step: why for step, why in found["core"].items() if why not in (None, "absent")}


HEAD = """# Compatibility with the SDK

Made by `make compat`, which calls every public method of the installed `tinker` SDK, {sdk},
against a running `trimtab serve`; do not edit. A test fails when a method that worked stops
working, when the SDK has a method that this page has not, and when this page is not what the last
results make of it.

**works**: called, and its answer looked at. **refused**: by the server, on purpose, in a sentence.
**fails**: it should work and does not. **unknown**: nobody has written a trial of it.

## Versions

The core is training, sampling, saving, loading, and `stable_reinforce` where the SDK can record
for it. {newest} was the newest release when this was measured; of those tried, {oldest} is the
oldest whose core passes. An SDK beside the installed one, without a torch of its own:

    pip install --no-deps --target sdk-X tinker==X
    python -m tests.compat.matrix --sdk sdk-X          # --core: the core alone

"""
METHODS = """
## Methods

"""


def versions(results):
    lines = ["| SDK | core | methods |", "|---|---|---|"]
    return "\n".join([*lines, *map(row, results)]) + "\n"


def row(found):
    core = "; ".join(f"{step}: {told(why)}" for step, why in troubles(found).items()) or "passes"
    if "absent" in found["core"].values():
        core += ", without `stable_reinforce`, which it has not"
    verdicts = [each["verdict"] for each in found["methods"].values()]
    counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(sorted(verdicts, reverse=True))]
    failing = [name for name, each in found["methods"].items() if each["verdict"] == "fails"]
    names = f" ({', '.join(f'`{name}`' for name in failing)})" if failing else ""
    return f"| {found['sdk']} | {core} | {', '.join(counts) or 'not tried'}{names} |"


def methods(found):
    lines = ["| Method | Verdict | Note |", "|---|---|---|"]
    for name, each in found["methods"].items():
        lines.append(f"| `{name}` | {each['verdict']} | {told(each['note'])} |")
    return "\n".join(lines) + "\n"


def told(text):
    return text.replace("|", "\\|").replace("\n", " ")


def main():
    parser = argparse.ArgumentParser(description="Try every method of the SDK against a server.")
    parser.add_argument("--sdk", help="a folder that an SDK was installed into")
    parser.add_argument("--core", action="store_true", help="training and sampling alone")
    options = parser.parse_args()
    found = measured(options.sdk, "core" if options.core else "all")
    keep(found)
    print(versions([found]))


if __name__ == "__main__":
    main()
