"""The nouns that pass between rooms: frozen values of numpy arrays, floats and ids.

Knows nothing of HTTP, protobuf, SQL or torch. Shape letters: P prompt tokens, N rows of a datum
(input tokens = target rows), K alternatives a position, T sampled tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

# --------------------------------------------------------------------------- provenance


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """`length` positions from `offset` of the prompt of the request that sampled `sequence_id`."""

    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """`length` tokens from `offset` of the tokens sampled as `sequence_id`."""

    sequence_id: str
    offset: int
    length: int


Span = PromptSpan | SampledSpan

# --------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class Datum:
    """One training example as a client sent it.

    `tokens` (N,) int32 is the model input. `inputs` holds dense arrays by name (int64 or float32),
    row i belonging to the prediction made at input position i.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    model_input_spans: tuple[Span, ...] = ()
    loss_fn_input_spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Stability:
    """What was recorded at sampling, aligned with the N rows of one datum.

    sequence_N        int32, -1 outside sampled spans; else a number unique to one whole sequence in
                      this datum (a sequence's rows are contiguous and in order)
    recorded_N        bool, the row's sequence has a stability part
    logprobs_N        float32, log q(x) of the record (NaN where not recorded)
    head_ids_NK       int32, the sampler's top-K ids (0 where not recorded)
    head_logprobs_NK  float32, their full-vocabulary log-probabilities (-inf where not recorded)
    temperature_N     float32, tau of the request that sampled the row (1 where not recorded);
                      tau = 0 is scored at 1 and therefore stored as 1
    version_step_N    float32, optimizer steps the sampling weights had behind them (NaN if unknown)
    """

    sequence_N: np.ndarray
    recorded_N: np.ndarray
    logprobs_N: np.ndarray
    head_ids_NK: np.ndarray
    head_logprobs_NK: np.ndarray
    temperature_N: np.ndarray
    version_step_N: np.ndarray


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """A datum as the engine sees it: no spans, no ids, checked lengths."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    stability: Stability | None = None


ConfigValue = float | str


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, ConfigValue]
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class CustomLossInput:
    """`rank`: 0 a number a datum, 1 (N,), 2 (N, K)."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class CustomLossNode:
    """One node of a traced loss: `("call_function", "mul", "operator.mul", ({"ref": "logprobs"},
    2.0), {})`. Arguments are JSON values in the SDK's encoding."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A user's own loss: its inputs, `logprobs` first, and its nodes in the order they run."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    nodes: tuple[CustomLossNode, ...]


@dataclass(frozen=True, slots=True)
class CreateCustomLoss:
    session_id: str
    custom_loss_seq_id: int
    loss: CustomLoss


@dataclass(frozen=True, slots=True)
class CreateCustomLossResult:
    loss_id: str


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A checked ForwardBackward for a learner. `loss_fn_config` is complete (defaults in); `custom`
    is the loss where `loss_fn` is "custom"."""

    seq_id: int
    data: tuple[TrainingDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float]
    forward_only: bool = False
    custom: CustomLoss | None = None


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    """`logprobs` has one float32 array a datum, shaped like its target_tokens; every metric name
    carries exactly one colon and a reduction suffix of the SDK (`loss:sum`)."""

    logprobs: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamParams:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class OptimStep:
    model_id: str
    seq_id: int
    params: AdamParams


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class CreateModel:
    session_id: str
    model_seq_id: int
    base_model: str
    lora: LoraConfig = LoraConfig()
    optimizer: str = "adamw"
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CreateModelResult:
    model_id: str


@dataclass(frozen=True, slots=True)
class SaveWeights:
    model_id: str
    seq_id: int
    name: str | None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsResult:
    path: str


@dataclass(frozen=True, slots=True)
class SaveWeightsForSampler:
    """Either `name` (a named checkpoint) or `sampling_session_seq_id` (its own session)."""

    model_id: str
    seq_id: int
    name: str | None
    sampling_session_seq_id: int | None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResult:
    path: str | None
    sampling_session_id: str | None


@dataclass(frozen=True, slots=True)
class SaveWeightsExternal:
    """A PEFT adapter for use elsewhere. `recipients`: age or SSH public keys that each file is
    encrypted to; none means plain files."""

    model_id: str
    seq_id: int
    name: str
    ttl_seconds: int | None = None
    recipients: tuple[str, ...] = ()
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsExternalResult:
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Into an existing model (`model_id`, `seq_id`) or a new one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    optimizer_family: str | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadWeightsResult:
    path: str
    model_id: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    model_id: str


@dataclass(frozen=True, slots=True)
class UnloadModelResult:
    model_id: str


# --------------------------------------------------------------------------- losses


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One number a loss accepts in loss_fn_config, with its default and its closed bounds."""

    default: float
    low: float = -math.inf
    high: float = math.inf
    doc: str = ""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss accepts. `inputs` maps a tensor name to "required" or "optional"; `ordered` holds
    pairs of config keys, the first of which must not exceed the second;
    `finite_where` names the input whose nonzero rows need a finite `logprobs` row ("advantages",
    "sequence_ratio_mask", "sampled" for rows under sampled spans, or None)."""

    name: str
    inputs: Mapping[str, Literal["required", "optional"]]
    config: Mapping[str, ConfigKey] = field(default_factory=dict)
    allows_alternatives: bool = False  # (N, K) target_tokens and weights
    needs_stability: bool = False
    finite_where: str | None = None
    ordered: tuple[tuple[str, str], ...] = ()
    doc: str = ""


# --------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`stop` None: EOS only. `stop_token_ids`/`stop_strings` stand beside EOS;
    `ignore_eos` (the client's `stop=[]`) disables every stop."""

    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """An asample request. `prompt` (P,) int32; `target_prompt_logprobs` (P-1, K) int64, -1 = skip;
    `target_layout` remembers a CSR layout so that the answer can keep it (None = dense)."""

    sampling_session_id: str
    seq_id: int
    prompt: np.ndarray
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    target_layout: CsrLayout | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False


@dataclass(frozen=True, slots=True)
class CsrLayout:
    crow_indices: np.ndarray
    col_indices: np.ndarray


@dataclass(frozen=True, slots=True)
class TopK:
    """Rows of alternatives, best first. `ids` (L, k) int32, `logprobs` (L, k) float32;
    an empty cell is id 0 with log-probability -99999.0."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """tokens (T,) int32, logprobs (T,) float32 by the one rule (tempered, unfiltered, full
    vocabulary); `head` the recorded top-K of each token; `versions` the weights that drew them,
    run-length coded as (version id, tokens)."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None
    head: TopK | None = None
    versions: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token, as soon as it is drawn: of sample `index`, with its log-probability by the one
    rule and the alternatives asked for, best first. `end` is set on a sequence's last token."""

    index: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    end: Literal["stop", "length"] | None = None


class Text(Protocol):
    """The tokenizer of a base model, as far as text is spoken with it. Thread-safe.

    `special` holds the ids whose text is markup: never part of an answer."""

    special: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids with what the tokenizer itself puts around a text, such as a first BOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text as it stands: special tokens shown, a torn character as U+FFFD."""

    def piece(self, token: int) -> str:
        """One token's text, its leading space included."""

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """A conversation in the model's template, open for the assistant's turn. Invalid where
        there is no template or it refuses these messages."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """prompt_logprobs (P,) float32, NaN = not computed; topk_prompt_logprobs has P rows;
    target_prompt_logprobs (P-1, K) float32, 0.0 where the target was -1; prompt_alt_* (P-1, k)."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: TopK | None = None
    target_prompt_logprobs: np.ndarray | None = None
    target_layout: CsrLayout | None = None
    prompt_alt_tokens: np.ndarray | None = None
    prompt_alt_logprobs: np.ndarray | None = None
    prompt_cache_hit_tokens: int = 0


Request = (
    ForwardBackward
    | OptimStep
    | CreateModel
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
    | UnloadModel
    | Sample
    | CreateCustomLoss
)
Result = (
    ForwardBackwardResult
    | OptimStepResult
    | CreateModelResult
    | SaveWeightsResult
    | SaveWeightsForSamplerResult
    | SaveWeightsExternalResult
    | LoadWeightsResult
    | UnloadModelResult
    | SampleResult
    | CreateCustomLossResult
)

# --------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What the engine reports of one base model it serves."""

    name: str
    path: Path
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    parameters: int
    learner_dtype: str
    sampler_dtype: str
    max_lora_rank: int
    sampler_kl: float = 0.0
    """KL(q || p) in nats a token that the sampler's numerics alone cause, measured at load."""


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """An immutable set of sampling weights: an adapter folder on a base model (`path` None: the
    base model itself). `step` counts the optimizer steps behind it."""

    version: str
    base_model: str
    path: Path | None = None
    step: int = 0
