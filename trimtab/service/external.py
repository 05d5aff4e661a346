"""Weights for use elsewhere: a PEFT adapter, plain or encrypted with age.

    adapter_model.safetensors    the adapter's tensors, which have PEFT's names already
    adapter_config.json          base model, rank, alpha, modules

With recipients each file is encrypted to all of them and named with .age behind. Reads nothing but
safetensors headers and JSON. Knows no rows.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.errors import Invalid, ServerError

ADAPTER, STATE = "adapter.safetensors", "state.json"  # as the learner writes them
MODEL_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
MOST_RECIPIENTS = 10
HEAD = "base_model.model."


def check_recipients(recipients: Sequence[str]) -> None:
    """Up to ten age or SSH public keys."""
    if len(recipients) > MOST_RECIPIENTS:
        raise Invalid(
            f"age_encryption_recipients: {len(recipients)} found; {MOST_RECIPIENTS} are allowed"
        )
    for index, text in enumerate(recipients):
        _recipient(index, text)


def export(folder: Path, save: Callable[[Path], int], recipients: Sequence[str]) -> int:
    """Fill a new folder with an adapter that `save` writes there, made fit for use elsewhere.
    Returns the bytes it holds then."""
    save(folder)
    to_peft(folder)
    if recipients:
        encrypt(folder, recipients)
    return size_of(folder)


def to_peft(folder: Path) -> None:
    """Turn the folder of a saved adapter into a PEFT adapter, in place."""
    state = json.loads((folder / STATE).read_bytes())
    modules = sorted({name.removeprefix(HEAD).rsplit(".lora_", 1)[0] for name in _names(folder)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": state["base_model"],
        "r": state["lora"]["rank"],
        "lora_alpha": state["lora"]["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": modules,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / ADAPTER).rename(folder / MODEL_FILE)
    (folder / STATE).unlink()


def encrypt(folder: Path, recipients: Sequence[str]) -> None:
    """Put each file's encryption in its place."""
    import pyrage

    keys = [_recipient(index, text) for index, text in enumerate(recipients)]
    for file in sorted(folder.iterdir()):
        try:
            pyrage.encrypt_file(str(file), f"{file}.age", keys)
        except pyrage.EncryptError as error:
            raise ServerError(f"{file.name} could not be encrypted: {error}") from None
        file.unlink()


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def files_of(folder: Path) -> tuple[str, ...]:
    """The names of a folder's files; links and folders are none."""
    entries = os.scandir(folder)
    return tuple(sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False)))


def _recipient(index: int, text: str) -> Any:
    import pyrage

    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError:
        raise Invalid(
            f"age_encryption_recipients[{index}]: {text[:100]!r} is neither an age1... key nor an"
            " SSH public key that age can encrypt to (ssh-ed25519, ssh-rsa)"
        ) from None


def _names(folder: Path) -> list[str]:
    """The tensors named in a safetensors header: a length of 8 bytes, then JSON."""
    with (folder / ADAPTER).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [name for name in header if name != "__metadata__"]
