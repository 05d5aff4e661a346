"""Opponents into environments of their own: `python -m benchmarks.peers.install trl vllm`."""

from __future__ import annotations

import subprocess
import sys
import venv

import torch

from benchmarks.peers import PACKAGES, python_of


def main(names: list[str]) -> None:
    for name in names or PACKAGES:
        python = python_of(name)
        venv.create(python.parents[1], with_pip=True, clear=True)
        # The same torch as ours, so that it is the tools that are compared.
        install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={torch.__version__}"]
        subprocess.run([*install, *PACKAGES[name]], check=True)
        # What comes along for images and sound is built for another torch, and text needs none.
        remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes"]
        subprocess.run([*remove, "torchvision", "torchaudio", "torchcodec"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
