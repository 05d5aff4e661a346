"""ServerConfig: every knob of the server, declared once and described where it is declared.

A value comes from the default, the TOML file, the environment (TRIMTAB_PORT for `port`) or a flag
(--port), each over the ones before it. Unknown keys are refused wherever they come from. Knows how
to read and check values; `server.py` knows what they do.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trimtab import modelstore
from trimtab.errors import Invalid

ENVIRONMENT = "TRIMTAB_"
NOT_OURS = ("TRIMTAB_HOME",)  # where `trimtab model` keeps what it fetches
LISTS = ("model", "api_key")  # given several times as a flag, with commas in the environment
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,2}")
_KEY = re.compile(r"tml-[!-~]*")


class ServerConfig(BaseModel):
    """What `trimtab serve` and `trimtab.local` run with.

    `ServerConfig(model=("org/tiny=./tiny",), port=0)`
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: tuple[str, ...] = Field(
        min_length=1,
        description="A model to serve: a folder, a hub id, or NAME=FOLDER to serve a folder under "
        "a hub-style name. May be given several times.",
    )
    host: str = Field("127.0.0.1", description="The address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="The port; 0 picks a free one.")
    data_dir: Path = Field(
        Path("trimtab-data"), description="Where the journal, results and checkpoints are kept."
    )
    api_key: tuple[str, ...] = Field(
        (),
        description="A key that clients may use (tml-...). May be given several times; each key "
        "owns what it creates. Without one here or from `trimtab keys`, any tml- key is taken, on "
        "this machine only.",
    )
    jwt_auth: bool = Field(
        True,
        description="Let clients exchange their key for a signed token of an hour; whoami reads "
        "it.",
    )
    device: str = Field(
        "auto", description="cpu, cuda or cuda:N; auto takes an accelerator where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What the learner computes in; auto measures and takes bfloat16 only where it "
        "is clearly faster and loses nothing of the stored weights.",
    )
    sampler_dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = Field(
        "auto",
        description="What the sampler computes in; int8 and int4 round its own copy of the base "
        "weights, and adapters stay as they are.",
    )
    max_context: int | None = Field(
        None, ge=2, description="Tokens a sequence may have; by default what the model allows."
    )
    max_lora_rank: int = Field(128, ge=1, le=4096, description="The largest LoRA rank.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Cores the server computes on; by default all of them. A learner takes all, a "
        "sampler half while a learner computes.",
    )
    micro_batch_tokens: int = Field(
        2048,
        ge=1,
        description="Tokens of one forward and backward pass. Bounds the learner's memory; results "
        "are the same to float error.",
    )
    memory_mib: int | None = Field(
        None,
        ge=64,
        description="MiB of memory the engines may use (the accelerator's, where there is one); by "
        "default 85 % of what the machine or its cgroup has. Work that would pass it is split, or "
        "refused alone.",
    )
    kv_cache_mib: int = Field(
        2048,
        ge=1,
        description="MiB of keys and values the sampler keeps: of what it decodes now, and in the "
        "rest of what it decoded before (prefix_cache).",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep keys and values of finished requests and reuse them where an owner's "
        "later prompt begins alike under the same weights.",
    )
    sampling_rows: int = Field(256, ge=1, description="Sequences that decode together.")
    max_pending_samples: int = Field(
        8192,
        ge=1,
        description="Sample requests accepted and unfinished; beyond it clients are asked to wait.",
    )
    stability_top_k: int = Field(
        8, ge=1, le=64, description="Alternatives recorded a token for record_stability_info."
    )
    max_body_mib: int = Field(
        128, ge=1, le=2048, description="MiB a request body may have, compressed and not."
    )
    max_datums: int = Field(
        16384, ge=1, le=16384, description="Datums one forward_backward request may have."
    )
    max_request_tokens: int = Field(
        8_000_000, ge=1, description="Input tokens one forward_backward request may have."
    )
    max_spans: int = Field(
        200_000, ge=1, description="Provenance spans one forward_backward request may have."
    )
    max_samples: int = Field(
        1024, ge=1, description="num_samples that one sample request may ask for."
    )
    max_sessions: int = Field(
        4096,
        ge=1,
        description="Open sessions an owner may have; beyond it clients are asked to wait.",
    )
    max_models: int = Field(
        256, ge=1, description="Models loaded at once; beyond it clients are asked to wait."
    )
    min_free_mib: int = Field(
        256,
        ge=0,
        description="MiB that stay free on the disk of the data directory: below it clients are "
        "asked to wait, and what was accepted is finished.",
    )
    chunk_datums: int = Field(
        1024,
        ge=1,
        le=16384,
        description="Datums the client puts in one forward_backward request; it splits more.",
    )
    hub_mirror: bool = Field(
        True,
        description="Give out the tokenizer and configuration files of the models, never weights, "
        "to clients that set HF_ENDPOINT to this server.",
    )
    hold_seconds: float = Field(
        25.0, ge=0.1, le=30.0, description="How long a poll for a result is held open."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least serious messages that are logged."
    )

    @field_validator("api_key")
    @classmethod
    def _keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not _KEY.fullmatch(key):
                raise ValueError(
                    "a key starts with tml- and holds no spaces; clients refuse others"
                )
        return keys

    @model_validator(mode="after")
    def _models_have_names_of_their_own(self) -> ServerConfig:
        names = [found.name for found in self.models()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two models are named {twice[0]!r}; tell them apart with NAME=FOLDER")
        return self

    def models(self) -> tuple[ModelSource, ...]:
        return tuple(model_source(text) for text in self.model)


# ------------------------------------------------------------------ models


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is a folder, or a hub id where `folder` is false."""

    name: str
    path: Path
    folder: bool


def model_source(text: str) -> ModelSource:
    """What one --model means.

    The name is what clients pass as base_model and look the tokenizer up by, so it has the form of
    a hub id. A bare folder is named by its last two parts:

    >>> model_source("/srv/models/Qwen/Qwen3-0.6B").name
    'Qwen/Qwen3-0.6B'
    >>> model_source("org/tiny=/srv/tiny").name
    'org/tiny'
    """
    name, given, folder = text.partition("=")
    if given:
        return _named(name, Path(folder).expanduser().absolute(), text)
    path = Path(text).expanduser()
    if path.is_dir() or text.startswith(("/", ".", "~")):
        path = path.absolute().resolve()
        return _named("/".join(path.parts[-2:]).lstrip("/"), path, text)
    if fetched := modelstore.resolve(text):
        return _named(*fetched, text)
    _check_name(text, text)
    return ModelSource(text, Path(text), folder=False)


def _named(name: str, path: Path, text: str) -> ModelSource:
    _check_name(name, text)
    if not path.is_dir():
        raise ValueError(f"{text!r}: there is no folder {str(path)!r}")
    return ModelSource(name, path, folder=True)


def _check_name(name: str, text: str) -> None:
    if len(name) > 128 or not _NAME.fullmatch(name):
        raise ValueError(
            f"{text!r}: {name!r} is no name like org/model (letters, digits, '.', '_' and '-'); "
            "choose one with NAME=FOLDER"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ------------------------------------------------------------------ where values come from


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """The configuration of a run; raises Invalid with a line for each thing that is wrong.

    `load_config(Path("trimtab.toml"), {"port": 0})`
    """
    sources = {
        f"{file}": _from_file(file),
        "the environment": _from_environment(os.environ if environment is None else environment),
        "the command line": dict(flags or {}),
    }
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, found in sources.items():
        values |= found
        origin |= dict.fromkeys(found, source)
    try:
        return ServerConfig(**values)
    except ValidationError as error:
        raise Invalid("\n".join(_told(error, origin))) from None


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = tomllib.loads(file.read_text())
    except OSError as error:
        raise Invalid(f"config: {file} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"config: {file} is not valid TOML ({error})") from None
    return {
        name: [value] if name in LISTS and isinstance(value, str) else value
        for name, value in found.items()
    }


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT) and variable not in NOT_OURS:
            name = variable.removeprefix(ENVIRONMENT).lower()
            found[name] = text.split(",") if name in LISTS else text
    return found


def _told(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """One line a fault: the knob, where its value came from, what is wrong."""
    lines = []
    for fault in error.errors():
        name = str(fault["loc"][0]) if fault["loc"] else ""
        source = f" (from {origin[name]})" if name in origin else ""
        lines.append(f"{name}{source}: {_reason(fault)}" if name else _reason(fault))
    return lines


def _reason(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown; the knobs are {', '.join(ServerConfig.model_fields)}"
    if fault["type"] == "missing":
        return "required: name at least one model to serve"
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    message = str(fault["msg"])
    return f"{message[:1].lower()}{message[1:]}, found {fault['input']!r}"
