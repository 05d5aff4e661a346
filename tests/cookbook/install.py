"""tinker-cookbook in an environment of its own: `python -m tests.cookbook.install FOLDER`.

Without its dependencies first, and those by name after it: 0.6.1 asks for a tml-renderers that not
every index has, for models that are not used here.
"""

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.6.1"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
NEEDS = [
    "aiohttp", "anyio", "blobfile", "chz", "cloudpickle", "datasets", "math-verify", "numpy",
    "pandas", "pillow", "pydantic", "pyrage", "pylatexenc", "rich", "safetensors", "tabulate",
    "termcolor", "tiktoken", "tinker", "tml-renderers", "torch", "tqdm", "transformers",
]  # fmt: skip


def main(folder: str) -> None:
    venv.create(folder, with_pip=True, clear=True)
    install = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS)]
    subprocess.run([*install, *NEEDS], check=True)
    subprocess.run([*install, "--no-deps", f"tinker-cookbook=={VERSION}"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
