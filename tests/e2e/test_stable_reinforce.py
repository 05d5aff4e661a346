"""StableReinforce as a user writes it: record at sampling, name the sequences, train."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from .kit import KEY, MODEL, prompt

PROMPT = [10, 20, 30]

# The page's own example uses forms that this SDK means to retire.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def turn(before, sequence, advantage):
    """A datum of one completion after `before` tokens, with its provenance."""
    n, p = len(sequence.tokens), len(before)
    rows = np.arange(p - 1 + n) >= p - 1
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*before, *sequence.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [0] * (p - 1) + list(sequence.tokens),
            "logprobs": [0.0] * (p - 1) + list(sequence.logprobs),
            "advantages": np.where(rows, advantage, 0.0).astype(np.float32),
        },
    )
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=p),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=n - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=p - 1),
            SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=n),
        ],
    )


def draw(client, tokens=PROMPT, n=4, **params):
    chosen = types.SamplingParams(**({"max_tokens": 6, "seed": 3, "stop": []} | params))
    return client.sample(prompt(*tokens), n, chosen).result().sequences


def data_of(sequences, before=PROMPT):
    signs = [1.0, -1.0, 0.5, -2.0]
    return [turn(before, s, a) for s, a in zip(sequences, signs, strict=False)]


@pytest.fixture
def policy(service):
    """A model after one step, so that gradients reach every adapter."""
    client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequences = draw(sampler)
    client.forward_backward(data_of(sequences), "stable_reinforce").result()
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return client


def test_the_public_example_runs(service):
    """The two code blocks of the feature's page, as they stand there."""
    training_client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    prompt_, params = prompt(*PROMPT), types.SamplingParams(max_tokens=6, stop=[])

    async def script():
        sampling_client = training_client.save_weights_and_get_sampling_client(
            record_stability_info=True
        )
        response = await sampling_client.sample_async(
            prompt=prompt_,
            sampling_params=params,
            num_samples=4,
        )
        data = data_of(response.sequences)
        future = await training_client.forward_backward_async(
            data, loss_fn="stable_reinforce", loss_fn_config={"kl_coeff": 0.01}
        )
        return response.sequences, await future.result_async()

    sequences, result = asyncio.run(script())
    assert len({s.sequence_id for s in sequences}) == 4
    expected = -sum(
        a * np.sum(s.logprobs) for s, a in zip(sequences, [1, -1, 0.5, -2], strict=True)
    )
    assert result.metrics["loss:sum"] == pytest.approx(expected, abs=1e-3)
    for output, sequence in zip(result.loss_fn_outputs, sequences, strict=True):
        found = output["logprobs"].to_numpy()[len(PROMPT) - 1 :]
        np.testing.assert_allclose(found, sequence.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 5}]
)
def test_on_policy_it_is_reinforce(policy, params):
    """Whatever the temperature and the filters: the same gradient as weighted cross-entropy."""
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    data = data_of(draw(sampler, **params))
    found, expected = [], []
    for loss, batch, config, norms in (
        ("stable_reinforce", data, {"kl_coeff": 0.0}, found),
        ("cross_entropy", [as_weights(d) for d in data], None, expected),
    ):
        path = policy.save_state(f"before-{loss}-{len(params)}", overwrite=True).result().path
        result = policy.forward_backward(batch, loss, config).result()
        step = policy.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics
        norms += [result.metrics["loss:sum"], step["grad_norm"], *weights_seen(policy)]
        policy.load_state_with_optimizer(path).result()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def as_weights(datum):
    inputs = datum.loss_fn_inputs
    targets = inputs["target_tokens"]
    return types.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={"target_tokens": targets, "weights": inputs["advantages"]},
    )


def weights_seen(client):
    """What a forward pass shows of the weights."""
    rows = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5, 6]},
    )
    return client.forward([rows], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def test_stale_and_rounded_samples_are_told_in_the_metrics(policy):
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    data = data_of(draw(sampler))
    for _ in range(3):
        policy.forward_backward(data, "stable_reinforce").result()
        policy.optim_step(types.AdamParams(learning_rate=0.02)).result()
    metrics = policy.forward_backward(data, "stable_reinforce").result().metrics
    assert metrics["staleness/num:sum"] / metrics["staleness/den:sum"] == 3
    assert metrics["staleness:max"] == metrics["staleness:min"] == 3
    assert 0 < metrics["tv/num:sum"] / metrics["tv/den:sum"] < metrics["tv:max"] < 1
    assert 0 < metrics["head_mass/num:sum"] / metrics["head_mass/den:sum"] < 1
    assert 0 < metrics["negative_weight/num:sum"] / metrics["negative_weight/den:sum"] < 1
    assert 0 < metrics["negative_trace/num:sum"] / metrics["negative_trace/den:sum"] < 1
    assert metrics["provenance_unverified:sum"] == 0
    assert metrics["kl_sample_train_v2/num:sum"] > 1e-4


def test_two_turns_and_a_sequence_used_twice(policy):
    """The second turn's prompt holds the first turn; one datum names both sequences."""
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    [first] = draw(sampler, n=1)
    middle = [*PROMPT, *first.tokens, 40, 41]
    [second] = draw(sampler, middle, n=1)
    tokens = [*middle, *second.tokens]
    p, m, n = len(PROMPT), len(first.tokens), len(second.tokens)
    a, b = first.sequence_id, second.sequence_id
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * (p - 1) + first.logprobs + [0.0] * 2 + second.logprobs,
            "advantages": [0.0] * (p - 1) + [1.0] * m + [0.0] * 2 + [-1.0] * n,
        },
    ).with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=a, length=p),
            SampledProvenanceSpan(sequence_id=a, length=m),
            PromptProvenanceSpan(sequence_id=b, offset=p + m, length=2),
            SampledProvenanceSpan(sequence_id=b, length=n - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=a, offset=1, length=p - 1),
            SampledProvenanceSpan(sequence_id=a, length=m),
            PromptProvenanceSpan(sequence_id=b, offset=p + m, length=2),
            SampledProvenanceSpan(sequence_id=b, length=n),
        ],
    )
    both = policy.forward_backward([datum], "stable_reinforce").result().metrics
    assert both["staleness/den:sum"] == m + n
    alone = policy.forward_backward([turn(PROMPT, first, 1.0)] * 2, "stable_reinforce").result()
    assert alone.metrics["staleness/den:sum"] == 2 * m
    single = policy.forward_backward([turn(middle, second, -1.0)], "stable_reinforce").result()
    halves = alone.metrics["loss:sum"] / 2 + single.metrics["loss:sum"]
    assert both["loss:sum"] == pytest.approx(halves, abs=1e-4)


def test_a_sampled_sequence_of_one_token(policy):
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequences = draw(sampler, max_tokens=1)
    result = policy.forward_backward(data_of(sequences), "stable_reinforce").result()
    assert result.metrics["staleness/den:sum"] == 4
    assert np.isfinite(result.metrics["loss:sum"])


def test_every_way_to_a_recording_client(policy, service):
    path = policy.save_weights_for_sampler("recorded").result().path
    made = [
        policy.save_weights_and_get_sampling_client(record_stability_info=True).result(),
        policy.create_sampling_client(path, record_stability_info=True),
        service.create_sampling_client(model_path=path, record_stability_info=True),
        service.create_sampling_client(base_model=MODEL, record_stability_info=True),
    ]
    made.append(pickle.loads(pickle.dumps(made[0])))
    for client in made:
        policy.forward_backward(data_of(draw(client)), "stable_reinforce").result()
    plain = service.create_sampling_client(model_path=path)
    with pytest.raises(tinker.BadRequestError, match="sampled without record_stability_info"):
        policy.forward_backward(data_of(draw(plain)), "stable_reinforce").result()
    # ... but provenance is checked for it all the same, whatever the loss
    policy.forward_backward(data_of(draw(plain)), "importance_sampling").result()
    [wrong] = draw(plain, n=1)
    other = replace(wrong, tokens_np=(wrong.tokens_np + 1) % 200)
    with pytest.raises(tinker.BadRequestError, match="was recorded"):
        policy.forward_backward([turn(PROMPT, other, 1.0)], "importance_sampling").result()


def test_a_sequence_belongs_to_its_session(policy, server):
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sequences = draw(sampler)
    other = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    stranger = other.create_lora_training_client(MODEL, rank=4, seed=1).result()
    words = []
    for swap in (lambda x: x, lambda x: x.rsplit(":", 2)[0] + ":9:0"):
        moved = [replace(s, sequence_id=swap(s.sequence_id)) for s in sequences]
        with pytest.raises(tinker.BadRequestError) as told:
            stranger.forward_backward(data_of(moved), "stable_reinforce").result()
        words.append(str(told.value).replace(moved[0].sequence_id, "ID"))
    assert words[0] == words[1]  # somebody else's and nobody's: the same sentence
    other.close("success").result(10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.01])
def test_kl_coeff_is_a_finite_number_from_zero_on(policy, bad):
    sampler = policy.save_weights_and_get_sampling_client(record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="kl_coeff"):
        policy.forward_backward(
            data_of(draw(sampler)), "stable_reinforce", {"kl_coeff": bad}
        ).result()


def test_inflight_sequences_of_two_versions_train(policy):
    """Weights that change inside a sequence: the record holds what each token was drawn from."""
    sampler = policy.save_weights_and_get_sampling_client(
        record_stability_info=True, kind="inflight"
    )
    chosen = types.SamplingParams(max_tokens=200, seed=5, stop=[])
    future = sampler.sample(prompt(*PROMPT), 2, chosen)
    warm = data_of(draw(sampler))
    for _ in range(4):
        policy.forward_backward(warm, "stable_reinforce").result()
        policy.optim_step(types.AdamParams(learning_rate=0.02)).result()
        policy.save_weights_and_get_sampling_client(kind="inflight").result()
    sequences = future.result().sequences
    metrics = policy.forward_backward(data_of(sequences), "stable_reinforce").result().metrics
    assert metrics["staleness/den:sum"] == 400
    assert metrics["staleness:max"] <= 4
    assert np.isfinite(metrics["loss:sum"])
