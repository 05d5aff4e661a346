"""A trial for each method of the SDK: called against a live server, its answer looked at.

A trial is `trial(world, call)`. `call(...)` is the method under trial on an object that suits it,
`call.on(object)(...)` the same method of another object; both wait for what it promises. An
`..._async` method has the trial of its twin; a future that stands for a client has the client's.
A trial that returns passes; one that returns text says what is worth noting.
"""

import asyncio
import inspect
from datetime import UTC, date, datetime, timedelta

import numpy as np
import tinker
import torch
from tinker import types

MODEL = "org/tiny"
TOKENS = [5, 6, 7, 8, 9]


def done(value):
    """What a method promises, however it does."""
    if inspect.isawaitable(value) and not callable(getattr(value, "result", None)):
        value = asyncio.run(awaited(value))
    while callable(getattr(value, "result", None)):
        value = value.result()
    return value


async def awaited(value):
    while inspect.isawaitable(value):
        value = await value
    return value


class Call:
    def __init__(self, name, target):
        self.name, self.target = name, target

    def on(self, target):
        return Call(self.name, target)

    def __call__(self, *args, **options):
        if self.name.endswith("_async"):
            return asyncio.run(self._later(args, options))
        return done(getattr(self.target, self.name)(*args, **options))

    async def _later(self, args, options):
        return await awaited(getattr(self.target, self.name)(*args, **options))


class World:
    """Clients of every kind, and one of everything that can be asked about. Made as needed."""

    def __init__(self, url):
        self.url = url
        self._made = {}
        self._names = 0

    def __getattr__(self, name):
        if name not in self._made:
            self._made[name] = getattr(type(self), f"make_{name}")(self)
        return self._made[name]

    def client(self, cls, **options):
        return cls(base_url=self.url, api_key="tml-local", **options)

    def name(self):
        self._names += 1
        return f"n{self._names}"

    def target(self, cls):
        """An object of a class."""
        attribute = "".join("_" + c.lower() if c.isupper() else c for c in cls).strip("_")
        return getattr(self, attribute) if hasattr(World, f"make_{attribute}") else None

    def make_service_client(self):
        return self.client(tinker.ServiceClient)

    def make_rest_client(self):
        return done(self.service_client.create_rest_client())

    def make_admin_client(self):
        return self.client(tinker.AdminClient)

    def make_training_client(self):
        return done(self.service_client.create_lora_training_client(MODEL, rank=2))

    def make_backcompat_training_client_future(self):
        return self.service_client.create_lora_training_client(MODEL, rank=2)

    def make_sampling_client(self):
        return done(self.service_client.create_sampling_client(base_model=MODEL))

    def make_backcompat_sampling_client_future(self):
        return self.service_client.create_sampling_client(base_model=MODEL)

    def make_datum(self):
        return a_datum()

    def make_prompt(self):
        return types.ModelInput.from_ints(TOKENS[:3])

    def make_params(self):
        return types.SamplingParams(max_tokens=4, seed=1)

    def make_state(self):
        return done(self.training_client.save_state("state")).path

    def make_sampler(self):
        return done(self.training_client.save_weights_for_sampler("sampler")).path

    def make_external(self):
        return done(self.training_client.save_weights_external("external")).path

    def make_run(self):
        return self.state.split("/")[2]

    def make_session(self):
        return self.run.split(":")[0]

    def make_saved(self):
        return done(self.training_client.save_state("saved"))

    def make_exported(self):
        return done(self.training_client.save_weights_for_sampler("exported"))

    def make_loss_handle(self):
        return done(self.service_client.create_custom_loss(squares, {"logprobs": 1}))

    def checkpoint(self):
        """The path of a checkpoint that a trial may spoil."""
        return done(self.training_client.save_state(self.name())).path


# ------------------------------------------------------------------ what answers look like


def squares(logprobs):
    return (logprobs**2).sum(), {"custom/rows:sum": (logprobs * 0 + 1).sum()}


def squares_of_all(data, logprobs):
    return sum((each**2).sum() for each in logprobs), {"rows": float(sum(map(len, logprobs)))}


def cubes(logprobs):
    return -(logprobs**3).sum(), {"custom/rows:sum": (logprobs * 0 + 1).sum()}


def customised(w, call):
    """Computed by the client and, where this SDK can send it, by the server: the same."""
    plain = types.Datum(
        model_input=w.datum.model_input, loss_fn_inputs={"target_tokens": TOKENS[1:]}
    )
    here = call([plain], squares_of_all).metrics
    if hasattr(tinker, "LossHandle"):
        there = call.on(w.training_client)([plain], w.loss_handle).metrics
        assert abs(there["custom/rows:sum"] - 4.0) < 1e-6, there
    assert here["rows"] == 4.0, here


def copied(w, call):
    client = w.client(tinker.ServiceClient, project_id="p")
    assert "/weights/" in call.on(client)(w.state)


def trained(output):
    assert output.metrics["loss:sum"] > 0 and len(output.loss_fn_outputs) == 1


def sampled(response, count=2):
    assert [len(sequence.tokens) for sequence in response.sequences] == [4] * count


def scored(logprobs):
    assert logprobs[0] is None and all(each < 0 for each in logprobs[1:])


def trains(client):
    trained(done(client.forward([a_datum()], "cross_entropy")))


def a_datum():
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 4},
    )


def samples(w, client):
    sampled(done(client.sample(w.prompt, 1, w.params)), 1)


def holds(found, **expected):
    for name, value in expected.items():
        assert getattr(found, name) == value, (name, getattr(found, name), value)


def listed(found, wanted):
    assert wanted in list(found), (wanted, list(found))


def nothing(value):
    assert value is None, value


def steps(w, call):
    client = call.target
    done(client.forward_backward([w.datum], "cross_entropy"))
    assert call(types.AdamParams(learning_rate=1e-3)).metrics


def loads(w, call):
    done(call(w.state))


def in_process(w, call):
    """Telemetry is off in this process, so there may be none."""
    call()


def saves_for_sampling(w, call):
    samples(w, call())


def restores(w, call):
    trains(call(w.state))


def times():
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=1), hour + timedelta(hours=1)


def billed(w, call):
    trains(w.training_client)
    listed({each.event_info.type for each in call(*times()).data}, "training")


def audited(w, call):
    listed(
        {
            each.tinker_path
            for each in call(day=date.fromtimestamp(times()[0].timestamp() + 3600)).entries
        },
        w.state,
    )


def published(w, call):
    path = w.checkpoint()
    nothing(call(path))
    (found,) = [
        c for c in done(w.rest_client.list_checkpoints(w.run)).checkpoints if c.tinker_path == path
    ]
    assert found.public


def unpublished(w, call):
    path = w.checkpoint()
    done(w.rest_client.publish_checkpoint_from_tinker_path(path))
    nothing(call(path))


def expires(w, call):
    path = w.checkpoint()
    nothing(call(path, 7200))
    (found,) = [
        c for c in done(w.rest_client.list_checkpoints(w.run)).checkpoints if c.tinker_path == path
    ]
    assert found.expires_at is not None


def deleted(w, call):
    path = w.checkpoint()
    nothing(call(path))
    listed(
        [
            path
            not in {c.tinker_path for c in done(w.rest_client.list_checkpoints(w.run)).checkpoints}
        ],
        True,
    )


def deleted_by_id(w, call):
    path = w.checkpoint()
    nothing(call(w.run, path.split("/", 3)[3]))


def assigned(w, call):
    nothing(call(w.session, "p"))


def closes(w, call):
    nothing(call.on(w.client(tinker.ServiceClient))("success"))


def created(w, call):
    samples(w, call(w.service_client.holder, base_model=MODEL))


def from_handle(w, call):
    samples(w, call(w.sampling_client.get_sampler_handle(), api_key="tml-local"))


def refused_chunk(make):
    """The SDK makes and writes such a chunk; the server says that it reads text alone."""

    def trial(w, call):
        prompt = types.ModelInput(chunks=[make(), types.EncodedTextChunk(tokens=[1])])
        try:
            done(w.sampling_client.sample(prompt, 1, w.params))
        except tinker.BadRequestError as error:
            raise Refused(error.body["detail"]) from None
        raise AssertionError("the server took it")

    return trial


def an_image():
    return types.ImageChunk(data=b"png", format="png", expected_tokens=1)


def a_link():
    return types.ImageAssetPointerChunk(location="x", format="png", expected_tokens=1)


def a_sound():
    return types.DmelChunk(dmel=b"none")


class Refused(Exception):
    """By design; the text says why."""


def with_spans(w, call):
    span = types.SampledProvenanceSpan if hasattr(types, "SampledProvenanceSpan") else None
    sampler = done(w.service_client.create_sampling_client(base_model=MODEL))
    (sequence,) = done(sampler.sample(w.prompt, 1, w.params)).sequences
    span = span or tinker.SampledProvenanceSpan
    prompt = getattr(types, "PromptProvenanceSpan", None) or tinker.PromptProvenanceSpan
    n = len(sequence.tokens)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*TOKENS[:3], *sequence.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [0, 0, *sequence.tokens],
            "logprobs": [0.0, 0.0, *sequence.logprobs],
            "advantages": [0.0, 0.0] + [1.0] * n,
        },
    )
    name = sequence.sequence_id
    marked = call.on(datum)(
        model_input=[prompt(sequence_id=name, length=3), span(sequence_id=name, length=n - 1)],
        loss_fn_inputs=[
            prompt(sequence_id=name, offset=1, length=2), span(sequence_id=name, length=n),
        ],
    )  # fmt: skip
    done(w.training_client.forward([marked], "importance_sampling"))


def tensor(values=(1.0, 2.0)):
    return types.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def sparse(w, call):
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert call(dense).to_torch().to_dense().tolist() == dense.tolist()


def promised(w, call):
    trained(call.on(w.training_client.forward([w.datum], "cross_entropy"))())


def a_future(w, call):
    promise = w.training_client.forward([w.datum], "cross_entropy")
    trained(getattr(promise, call.name)().result(30))


def a_coroutine(w, call):
    trained(asyncio.run(w.training_client.forward([w.datum], "cross_entropy").coroutine()))


def stands_for_a_client(w, call):
    assert call() is not None


def a_clients_future(w, call):
    assert getattr(call.target, call.name)().result(30) is not None


def a_clients_coroutine(w, call):
    assert asyncio.run(call.target.coroutine()) is not None


def text(words, found):
    assert words.decode(words.encode("the cat")) == "the cat", found


# ------------------------------------------------------------------ the table

TRAINING = {
    "create_sampling_client": lambda w, call: samples(w, call(w.sampler)),
    "forward": lambda w, call: trained(call([w.datum], "cross_entropy")),
    "forward_backward": lambda w, call: trained(call([w.datum], "cross_entropy")),
    "forward_backward_custom": customised,
    "get_info": lambda w, call: holds(call().model_data, model_name=MODEL),
    "get_telemetry": in_process,
    "get_console_url": lambda w, call: "a link of the hosted service's console" if call() else None,
    "get_tokenizer": lambda w, call: text(call(), MODEL),
    "load_state": loads,
    "load_state_with_optimizer": loads,
    "optim_step": steps,
    "save_state": lambda w, call: call(w.name()).path.index("/weights/"),
    "save_weights_and_get_sampling_client": saves_for_sampling,
    "save_weights_external": lambda w, call: call(w.name()).path.index("/external_weights/"),
    "save_weights_for_sampler": lambda w, call: call(w.name()).path.index("/sampler_weights/"),
}
SAMPLING = {
    "compute_logprobs": lambda w, call: scored(call(w.prompt)),
    "create": created,
    "from_sampler_handle": from_handle,
    "get_base_model": lambda w, call: listed([call()], MODEL),
    "get_sampler_handle": lambda w, call: listed([bool(call())], True),
    "get_telemetry": in_process,
    "get_tokenizer": lambda w, call: text(call(), MODEL),
    "on_queue_state_change": lambda w, call: "called by the SDK itself",
    "sample": lambda w, call: sampled(call(w.prompt, 2, w.params)),
}
CLIENT_FUTURE = {
    "result": stands_for_a_client,
    "future": a_clients_future,
    "coroutine": a_clients_coroutine,
}
USAGE = {
    "get_audit_log": audited,
    "get_billing_usage": billed,
    "get_current_checkpoint_storage_usage": lambda w, call: listed(
        [w.state and call().data[0].checkpoint_count > 0], True
    ),
    "get_telemetry": in_process,
}
TABLE = {
    "ServiceClient": {
        "close": closes,
        "copy_weights": copied,
        "create_custom_loss": lambda w, call: listed(
            [call(cubes, {"logprobs": 1}).loss_id is not None], True
        ),
        "create_lora_training_client": lambda w, call: trains(call(MODEL, rank=2)),
        "create_rest_client": lambda w, call: done(call().list_sessions()),
        "create_sampling_client": lambda w, call: samples(w, call(model_path=w.sampler)),
        "create_training_client_from_state": restores,
        "create_training_client_from_state_with_optimizer": restores,
        "get_console_url": TRAINING["get_console_url"],
        "get_server_capabilities": lambda w, call: listed(
            [model.model_name for model in call().supported_models], MODEL
        ),
        "get_telemetry": in_process,
        "holder": lambda w, call: None if w.service_client.holder else 1 / 0,
    },
    "TrainingClient": TRAINING,
    "SamplingClient": SAMPLING,
    "BackcompatTrainingClientFuture": TRAINING | CLIENT_FUTURE,
    "BackcompatSamplingClientFuture": SAMPLING | CLIENT_FUTURE,
    "AdminClient": USAGE,
    "RestClient": USAGE
    | {
        "assign_session_project": assigned,
        "copy_weights": lambda w, call: call(w.state, "p").index("/weights/"),
        "delete_checkpoint": deleted_by_id,
        "delete_checkpoint_from_tinker_path": deleted,
        "export_session_trace": lambda w, call: call(w.session).index("http"),
        "get_external_weights_urls": lambda w, call: listed(
            call(w.external).urls, "adapter_config.json"
        ),
        "get_sampler": lambda w, call: holds(
            call(w.sampling_client._sampling_session_id), base_model=MODEL
        ),
        "get_server_capabilities": lambda w, call: listed(
            [model.model_name for model in call().supported_models], MODEL
        ),
        "get_session": lambda w, call: listed(call(w.session).training_run_ids, w.run),
        "get_training_run": lambda w, call: holds(call(w.run), base_model=MODEL),
        "get_training_run_by_tinker_path": lambda w, call: holds(call(w.state), base_model=MODEL),
        "get_weights_info_by_tinker_path": lambda w, call: holds(call(w.state), base_model=MODEL),
        "list_checkpoints": lambda w, call: listed(
            [each.tinker_path for each in (w.state, call(w.run).checkpoints)[1]], w.state
        ),
        "list_sessions": lambda w, call: listed((w.session, call().sessions)[1], w.session),
        "list_training_runs": lambda w, call: listed(
            [run.training_run_id for run in (w.run, call(limit=100).training_runs)[1]], w.run
        ),
        "list_user_checkpoints": lambda w, call: listed(
            [each.tinker_path for each in (w.state, call().checkpoints)[1]], w.state
        ),
        "publish_checkpoint_from_tinker_path": published,
        "search_sessions": lambda w, call: listed(
            [
                each.session_id
                for each in call(types.SessionSearchRequest(session_id=w.session)).sessions
            ],
            w.session,
        ),
        "set_checkpoint_ttl_from_tinker_path": expires,
        "unpublish_checkpoint_from_tinker_path": unpublished,
        "whoami": lambda w, call: listed([call().user_urn], "tml:user:local"),
    },
    "APIFuture": {"coroutine": a_coroutine, "future": a_future, "result": promised},
    "Datum": {"with_provenance": with_spans},
    "LossHandle": {
        "input_names": lambda w, call: listed([w.loss_handle.input_names], ()),
        "key": lambda w, call: w.loss_handle.key and None,
    },
    "EncodedTextChunk": {
        "length": lambda w, call: listed([types.EncodedTextChunk(tokens=[1, 2]).length], 2),
    },
    "ModelInput": {
        "append": lambda w, call: listed(
            [call.on(w.prompt)(types.EncodedTextChunk(tokens=[1])).length], 4
        ),
        "append_int": lambda w, call: listed([call.on(w.prompt)(1).length], 4),
        "empty": lambda w, call: listed([call.on(types.ModelInput)().length], 0),
        "from_ints": lambda w, call: listed([call.on(types.ModelInput)([1, 2]).to_ints()], [1, 2]),
        "length": lambda w, call: listed([w.prompt.length], 3),
        "to_ints": lambda w, call: listed([call.on(w.prompt)()], TOKENS[:3]),
    },
    "ParsedCheckpointTinkerPath": {
        "from_tinker_path": lambda w, call: holds(
            call.on(types.ParsedCheckpointTinkerPath)(w.state), training_run_id=w.run
        ),
    },
    "TensorData": {
        "data": lambda w, call: listed([list(tensor().data)], [1.0, 2.0]),
        "from_numpy": lambda w, call: listed(
            [call.on(types.TensorData)(np.array([1.0], np.float32)).tolist()], [1.0]
        ),
        "from_torch": lambda w, call: listed(
            [call.on(types.TensorData)(torch.tensor([1.0])).tolist()], [1.0]
        ),
        "from_torch_sparse": lambda w, call: sparse(w, call.on(types.TensorData)),
        "to_numpy": lambda w, call: listed([call.on(tensor())().tolist()], [1.0, 2.0]),
        "to_torch": lambda w, call: listed([call.on(tensor())().tolist()], [1.0, 2.0]),
        "tolist": lambda w, call: listed([call.on(tensor())()], [1.0, 2.0]),
    },
    "SaveWeightsResponse": {
        "get_console_url": lambda w, call: TRAINING["get_console_url"](w, call.on(w.saved)),
    },
    "SaveWeightsForSamplerResponse": {
        "get_console_url": lambda w, call: TRAINING["get_console_url"](w, call.on(w.exported)),
        "get_playground_url": lambda w, call: TRAINING["get_console_url"](w, call.on(w.exported)),
    },
    "DmelChunk": dict.fromkeys(
        ("length", "serialize_dmel", "validate_dmel"), refused_chunk(a_sound)
    ),
    "ImageChunk": dict.fromkeys(
        ("length", "serialize_data", "validate_data"), refused_chunk(an_image)
    ),
    "ImageAssetPointerChunk": {"length": refused_chunk(a_link)},
}


def trial_of(method):
    """The trial of `Class.method`, or None where nobody has written one."""
    cls, name = method.split(".")
    trials = TABLE.get(cls, {})
    return trials.get(name) or trials.get(name.removesuffix("_async"))
