"""Request bodies to the frozen requests of `types`: one protobuf kind, the rest JSON.

Checks shapes, types and names; whether a model exists or a number is sensible is service's to say.
Every refusal is an `Invalid` that names its field. Unknown fields of newer SDKs are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from google.protobuf.message import DecodeError

from trimtab.errors import Invalid
from trimtab.types import (
    AdamParams,
    ConfigValue,
    CreateCustomLoss,
    CreateModel,
    CustomLoss,
    CustomLossInput,
    CustomLossNode,
    Datum,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    OptimStep,
    PromptSpan,
    Request,
    Sample,
    SampledSpan,
    SamplingParams,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Span,
    UnloadModel,
)
from trimtab.wire import trimtab_pb2 as pb
from trimtab.wire.fields import INT64, Fields, kind_of
from trimtab.wire.tensors import Budget, tensor_of, tensor_of_json, tokens_of, tokens_of_json

MAX_DATUMS = 16_384
SEED = range(-(2**63), 2**64)

# ------------------------------------------------------------------ forward_backward


def forward_backward(body: bytes, budget: Budget) -> ForwardBackward:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise Invalid("body: not a ForwardBackwardRequest (broken protobuf)") from None
    if len(message.data) > MAX_DATUMS:
        raise Invalid(f"data: {len(message.data)} datums; one request may hold {MAX_DATUMS}")
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=tuple(_datum(d, f"data[{i}]", budget) for i, d in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_fn_config=_loss_fn_config(message),
        forward_only=message.forward_only,
    )


def _datum(datum: pb.Datum, where: str, budget: Budget) -> Datum:
    inputs = {
        name: tensor_of(tensor, f"{where}.loss_fn_inputs[{name!r}]", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(
        tokens=tokens_of(datum.model_input, f"{where}.model_input"),
        inputs=inputs,
        model_input_spans=_spans(datum.model_input_spans, f"{where}.model_input_spans"),
        loss_fn_input_spans=_spans(datum.loss_fn_input_spans, f"{where}.loss_fn_input_spans"),
    )


def _spans(spans: Iterable[pb.ProvenanceSpan], where: str) -> tuple[Span, ...]:
    return tuple(_span(span, f"{where}[{index}]") for index, span in enumerate(spans))


def _span(span: pb.ProvenanceSpan, where: str) -> Span:
    kind = span.WhichOneof("span")
    if kind == "prompt_tokens":
        run = span.prompt_tokens
        return PromptSpan(run.sequence_id, run.offset, run.length)
    if kind == "sampled_tokens":
        run = span.sampled_tokens
        return SampledSpan(run.sequence_id, run.offset, run.length)
    raise Invalid(f"{where}: neither prompt_tokens nor sampled_tokens")


def _loss_fn_config(message: pb.ForwardBackwardRequest) -> Mapping[str, ConfigValue]:
    """Version 2 where it is filled (numbers and text), else the older map of numbers."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, ConfigValue] = {}
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise Invalid(f"loss_fn_config[{name!r}]: neither a number nor text")
        config[name] = value.number if kind == "number" else value.text
    return config


# ------------------------------------------------------------------ models and weights


def create_model(body: bytes, budget: Budget) -> CreateModel:
    fields = Fields.parse(body)
    return CreateModel(
        session_id=fields.text("session_id"),
        model_seq_id=fields.integer("model_seq_id"),
        base_model=fields.text("base_model"),
        lora=_lora(fields.sub("lora_config")),
        optimizer=_optimizer(fields) or "adamw",
        user_metadata=fields.text_map("user_metadata"),
    )


def _lora(fields: Fields | None) -> LoraConfig:
    if fields is None:
        return LoraConfig()
    fields.only("rank", "seed", "train_attn", "train_mlp", "train_unembed")
    return LoraConfig(
        rank=fields.integer("rank", LoraConfig().rank),
        seed=_seed(fields),
        train_attn=fields.flag("train_attn", True),
        train_mlp=fields.flag("train_mlp", True),
        train_unembed=fields.flag("train_unembed", True),
    )


def _seed(fields: Fields) -> int | None:
    """Any 64-bit pattern, folded to 0 .. 2**63 - 1."""
    seed = fields.integer_or_none("seed", SEED)
    return None if seed is None else seed % 2**63


def _optimizer(fields: Fields) -> str | None:
    """The family named by optimizer_config; adamw is the one there is, and takes no options."""
    config = fields.sub("optimizer_config")
    if config is None:
        return None
    family = config.text("type")
    if family != "adamw":
        raise Invalid(f"{config.name('type')}: {family!r} is not offered; this server has 'adamw'")
    config.only("type")
    return family


ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def optim_step(body: bytes, budget: Budget) -> OptimStep:
    fields = Fields.parse(body)
    return OptimStep(fields.text("model_id"), fields.integer("seq_id"), _adam(fields))


def _adam(fields: Fields) -> AdamParams:
    """`adam_params`, or `optim_params` as the SDK also names it."""
    other = fields.sub("optimizer_params")
    if other is not None:
        family = other.values.get("type")
        raise Invalid(f"optimizer_params.type: {family!r} is not offered; use adam_params")
    params = fields.sub("adam_params") or fields.sub("optim_params")
    if params is None:
        raise fields.wrong("adam_params", "an object")
    params.only(*ADAM)
    known = AdamParams()
    return AdamParams(**{name: params.number(name, getattr(known, name)) for name in ADAM})


def save_weights(body: bytes, budget: Budget) -> SaveWeights:
    fields = Fields.parse(body)
    return SaveWeights(
        model_id=fields.text("model_id"),
        seq_id=fields.integer("seq_id"),
        name=fields.text_or_none("path"),
        ttl_seconds=fields.integer_or_none("ttl_seconds"),
        overwrite=fields.flag("overwrite", False),
        user_metadata=fields.text_map("user_metadata"),
    )


def save_weights_for_sampler(body: bytes, budget: Budget) -> SaveWeightsForSampler:
    fields = Fields.parse(body)
    return SaveWeightsForSampler(
        model_id=fields.text("model_id"),
        seq_id=fields.integer("seq_id"),
        name=fields.text_or_none("path"),
        sampling_session_seq_id=fields.integer_or_none("sampling_session_seq_id"),
        kind=_sampler_kind(fields),
        ttl_seconds=fields.integer_or_none("ttl_seconds"),
        user_metadata=fields.text_map("user_metadata"),
    )


def _sampler_kind(fields: Fields) -> Literal["snapshot", "inflight"]:
    kind = fields.text("kind") if fields.has("kind") else "snapshot"
    if kind == "snapshot":
        return "snapshot"
    if kind == "inflight":
        return "inflight"
    raise Invalid(f"kind: {kind!r} is neither 'snapshot' nor 'inflight'")


def save_weights_external(body: bytes, budget: Budget) -> SaveWeightsExternal:
    fields = Fields.parse(body)
    return SaveWeightsExternal(
        model_id=fields.text("model_id"),
        seq_id=fields.integer("seq_id"),
        name=fields.text("path"),
        ttl_seconds=fields.integer_or_none("ttl_seconds"),
        recipients=fields.texts("age_encryption_recipients"),
        user_metadata=fields.text_map("user_metadata"),
    )


def load_weights(body: bytes, budget: Budget) -> LoadWeights:
    fields = Fields.parse(body)
    if not fields.has("optimizer"):
        raise fields.wrong("optimizer", "true or false")
    if fields.has("weights_access_token"):
        raise Invalid("weights_access_token: not offered; a checkpoint opens to its owner's key")
    return LoadWeights(
        path=fields.text("path"),
        optimizer=fields.flag("optimizer", False),
        model_id=fields.text_or_none("model_id"),
        seq_id=fields.integer_or_none("seq_id"),
        session_id=fields.text_or_none("session_id"),
        model_seq_id=fields.integer_or_none("model_seq_id"),
        base_model=fields.text_or_none("base_model"),
        optimizer_family=_optimizer(fields),
        user_metadata=fields.text_map("user_metadata"),
    )


def unload_model(body: bytes, budget: Budget) -> UnloadModel:
    return UnloadModel(Fields.parse(body).text("model_id"))


# ------------------------------------------------------------------ custom losses


def create_custom_loss(body: bytes, budget: Budget) -> CreateCustomLoss:
    """The graph as plain data; what it may say is `losses`' to judge."""
    fields = Fields.parse(body)
    graph = fields.sub("graph")
    if graph is None:
        raise fields.wrong("graph", "an object")
    if (version := graph.integer("format", 1)) != 1:
        raise Invalid(f"graph.format: {version} is not known; this server reads 1")
    inputs = [CustomLossInput(f.text("name"), f.integer("rank")) for f in fields.subs("inputs")]
    nodes = [_node(node) for node in graph.subs("nodes")]
    loss = CustomLoss(fields.text("name")[:200], tuple(inputs), tuple(nodes))
    return CreateCustomLoss(fields.text("session_id"), fields.integer("custom_loss_seq_id"), loss)


def _node(fields: Fields) -> CustomLossNode:
    fields.only("op", "name", "target", "args", "kwargs")
    args, kwargs = fields.values.get("args", []), fields.values.get("kwargs", {})
    if not isinstance(args, list):
        raise fields.wrong("args", "a list")
    if not isinstance(kwargs, dict):
        raise fields.wrong("kwargs", "an object")
    op, name, target = (fields.text(field) for field in ("op", "name", "target"))
    return CustomLossNode(op, name, target, tuple(args), kwargs)


# ------------------------------------------------------------------ sampling


def sample(body: bytes, budget: Budget) -> Sample:
    fields = Fields.parse(body)
    prompt = fields.sub("prompt")
    if prompt is None:
        raise fields.wrong("prompt", "an object")
    targets = fields.sub("target_prompt_logprobs")
    array, layout = tensor_of_json(targets, budget, fill=-1) if targets else (None, None)
    if array is not None and array.dtype.kind != "i":
        raise Invalid("target_prompt_logprobs.dtype: token ids are int64, found float32")
    return Sample(
        sampling_session_id=fields.text("sampling_session_id"),
        seq_id=fields.integer("seq_id"),
        prompt=tokens_of_json(prompt),
        num_samples=fields.integer("num_samples", 1),
        params=_sampling_params(fields.sub("sampling_params")),
        prompt_logprobs=fields.flag("prompt_logprobs", False),
        prompt_logprobs_last_n=fields.integer_or_none("prompt_logprobs_last_n"),
        topk_prompt_logprobs=fields.integer("topk_prompt_logprobs", 0),
        topk_sample_logprobs=fields.integer("topk_sample_logprobs", 0),
        target_prompt_logprobs=array,
        target_layout=layout,
        prompt_alt_tokens_k=fields.integer("prompt_alt_tokens_k", 0),
        record_stability_info=fields.flag("record_stability_info", False),
    )


def _sampling_params(fields: Fields | None) -> SamplingParams:
    if fields is None:
        return SamplingParams()
    fields.only("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    strings, ids = _stops(fields)
    return SamplingParams(
        max_tokens=fields.integer_or_none("max_tokens"),
        seed=_seed(fields),
        temperature=fields.number("temperature", 1.0),
        top_k=fields.integer("top_k", -1),
        top_p=fields.number("top_p", 1.0),
        stop_strings=strings,
        stop_token_ids=ids,
        ignore_eos=fields.values.get("stop") == [],
    )


def _stops(fields: Fields) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """`stop` as texts or as token ids; it may be one text, a list of either, or absent."""
    if not fields.has("stop"):
        return (), ()
    stop = fields.values["stop"]
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise fields.wrong("stop", "text or a list of texts or token ids")
    if all(isinstance(entry, str) for entry in stop):
        if "" in stop:
            raise Invalid(f"{fields.name('stop')}: an empty text stops nothing")
        return tuple(stop), ()
    for index, entry in enumerate(stop):
        where = f"{fields.name('stop')}[{index}]"
        if type(entry) is not int:
            raise Invalid(f"{where}: all texts or all token ids, found {kind_of(entry)}")
        if entry not in INT64:
            raise Invalid(f"{where}: {entry} is outside {INT64.start} to {INT64.stop - 1}")
    return (), tuple(stop)


DECODERS: Mapping[str, Callable[[bytes, Budget], Request]] = {
    "forward_backward": forward_backward,
    "create_custom_loss": create_custom_loss,
    "optim_step": optim_step,
    "create_model": create_model,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "load_weights": load_weights,
    "unload_model": unload_model,
    "sample": sample,
}
