"""The whole conversation of a training script, step by step, by the official SDK."""

import numpy as np
import pytest
import tinker
from tinker import types

from .kit import KEY, MODEL, batch, close, datum, logprobs, offered, prompt


def test_from_a_new_client_to_a_finished_session(server):
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    (found,) = offered(server.url)
    assert (found.model_name, found.max_context_length) == (MODEL, 256)

    training = service.create_lora_training_client(MODEL, rank=4).result()
    assert training.model_id.endswith(":train:0")
    assert training.get_info().lora_rank == 4
    assert training.get_tokenizer().decode(training.get_tokenizer().encode("the cat")) == "the cat"

    data = [datum([5, 6, 7, 8]), datum([9, 10])]
    losses = []
    for _ in range(3):
        output = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.003))
        losses.append(output.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[2] < losses[1] < losses[0]
    lengths = [found.size for found in logprobs(output.result())]
    assert lengths == [3, 1]

    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, seed=3)
    sampled = sampler.sample(prompt(5, 6), num_samples=2, sampling_params=params).result()
    first, second = sampled.sequences
    assert 1 <= len(first.tokens) == len(first.logprobs) <= 5
    assert first.sequence_id and first.sequence_id != second.sequence_id
    scored = sampler.compute_logprobs(prompt(5, 6, 7, 8)).result()
    forward = training.forward(data, "cross_entropy").result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], logprobs(forward)[0], atol=1e-4)

    path = training.save_state("ckpt1").result().path
    assert path == f"tinker://{training.model_id}/weights/ckpt1"
    with pytest.warns(FutureWarning):
        loading = training.load_state(path)
    loading.result()
    close(logprobs(training.forward(data, "cross_entropy").result()), logprobs(forward))

    service.close("success").result(10)


def test_chunks_are_sent_first_one_last_and_run_in_order(fresh, service, monkeypatch):
    """Five datums in chunks of two: requests 2 and 3 arrive before request 1."""
    from tinker.resources.training import AsyncTrainingResource

    sent = []
    submit = AsyncTrainingResource.forward_backward

    async def noting(self, *, request, forward_only=False):
        promise = await submit(self, request=request, forward_only=forward_only)
        sent.append(request.seq_id)
        return promise

    monkeypatch.setattr(AsyncTrainingResource, "forward_backward", noting)
    data = batch(5)
    whole = fresh.forward_backward(data, "cross_entropy").result()
    assert sent in ([2, 3, 1], [3, 2, 1])
    assert [found.size for found in logprobs(whole)] == [3, 4, 5, 6, 7]

    alone = [fresh.forward([d], "cross_entropy").result() for d in data]
    close(logprobs(whole), [logprobs(found)[0] for found in alone])
    expected = sum(found.metrics["loss:sum"] for found in alone)
    assert whole.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)

    fresh.optim_step(types.AdamParams(learning_rate=0.01)).result()
    monkeypatch.undo()
    other = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for d in data:
        other.forward_backward([d], "cross_entropy")
    other.optim_step(types.AdamParams(learning_rate=0.01)).result()
    close(
        logprobs(fresh.forward(data, "cross_entropy").result()),
        logprobs(other.forward(data, "cross_entropy").result()),
        1e-4,
    )


def test_a_client_whose_switches_stand_the_other_way_works_too(server):
    """Compressed bodies, chunks one after the other, a poll for each sample."""
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    switches = service.holder._client_config.model_copy(
        update={
            "proto_compress_fwdbwd": True,
            "parallel_fwdbwd_chunks": False,
            "sample_use_retrieve_futures": False,
        }
    )
    service.holder._client_config = service.holder._constructor_kwargs["_client_config"] = switches
    training = service.create_lora_training_client(MODEL, rank=4).result()
    output = training.forward_backward(batch(3), "cross_entropy").result()
    assert [found.size for found in logprobs(output)] == [3, 4, 5]
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3)
    futures = [sampler.sample(prompt(5, 6), 1, params) for _ in range(5)]
    assert all(1 <= len(future.result().sequences[0].tokens) <= 3 for future in futures)
    assert sampler._get_futures_poller() is None
    service.close("success").result(10)


def test_forward_leaves_the_gradients_alone(fresh, service):
    other = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    fresh.forward_backward(batch(1), "cross_entropy")
    other.forward_backward(batch(1), "cross_entropy")
    other.forward(batch(2, seed=3), "cross_entropy")
    adam = types.AdamParams(learning_rate=0.01)
    steps = [client.optim_step(adam).result().metrics for client in (fresh, other)]
    assert steps[0]["grad_norm"] == steps[1]["grad_norm"]


def test_a_custom_loss_of_the_client_moves_the_weights_as_the_same_loss_of_the_server(
    fresh, service
):
    other = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    data = batch(3)

    def negative_log_likelihood(data, logprobs):
        loss = -sum(found.sum() for found in logprobs)
        return loss, {"mine": loss.item()}

    custom = fresh.forward_backward_custom(data, negative_log_likelihood).result()
    plain = other.forward_backward(data, "cross_entropy").result()
    assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    assert custom.metrics["mine"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    adam = types.AdamParams(learning_rate=0.01)
    norms = [c.optim_step(adam).result().metrics["grad_norm"] for c in (fresh, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_many_targets_a_row_dense_and_sparse_are_the_same(trained):
    import torch

    targets = torch.zeros(4, 8, dtype=torch.int64)
    weights = torch.zeros(4, 8)
    targets[0, 2], targets[3, 7], targets[1, 0] = 9, 11, 4
    weights[0, 2], weights[3, 7], weights[2, 5] = 1.0, 0.5, 2.0
    tokens = types.ModelInput.from_ints([3, 4, 5, 6])
    sparse = types.Datum(
        model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    dense = types.Datum(
        model_input=tokens,
        loss_fn_inputs={"target_tokens": targets.numpy(), "weights": weights.numpy()},
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    found = [trained.forward([d], "cross_entropy").result() for d in (sparse, dense)]
    assert logprobs(found[0])[0].shape == (4, 8)
    np.testing.assert_array_equal(logprobs(found[0])[0], logprobs(found[1])[0])
    weighted = -(logprobs(found[0])[0] * weights.numpy()).sum()
    assert found[0].metrics["loss:sum"] == pytest.approx(weighted, rel=1e-5)
    narrow = types.Datum(
        model_input=tokens, loss_fn_inputs={"target_tokens": targets[:, :3].numpy()}
    )
    mixed = trained.forward([dense, narrow], "cross_entropy").result()
    assert [array.shape for array in logprobs(mixed)] == [(4, 8), (4, 3)]


# ------------------------------------------------------------------ checkpoints


def step(client, seed, rate=0.02):
    client.forward_backward(batch(2, seed), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=rate)).result()


def state(client):
    return logprobs(client.forward(batch(2, seed=9), "cross_entropy").result())


def test_a_client_made_from_a_state_goes_on_as_if_never_stopped(fresh, service):
    for seed in range(3):
        step(fresh, seed)
    path = fresh.save_state("a").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    restarted = service.create_training_client_from_state(path).result()
    assert resumed.model_id != fresh.model_id
    assert resumed.get_info().lora_rank == 4
    close(state(resumed), state(fresh), 0)
    close(state(restarted), state(fresh), 0)
    for client in (fresh, resumed, restarted):
        step(client, 7)
    close(state(resumed), state(fresh), 0)
    with pytest.raises(AssertionError):
        close(state(restarted), state(fresh), 1e-4)


def test_named_sampler_weights_are_found_by_their_path(trained, service):
    path = trained.save_weights_for_sampler("named").result().path
    assert path == f"tinker://{trained.model_id}/sampler_weights/named"
    named = service.create_sampling_client(model_path=path).result()
    assert named.get_base_model() == MODEL
    direct = trained.save_weights_and_get_sampling_client().result()
    tokens = prompt(5, 6, 7, 8)
    close(
        [np.array(named.compute_logprobs(tokens).result()[1:])],
        [np.array(direct.compute_logprobs(tokens).result()[1:])],
    )


def test_a_name_in_use_is_refused_at_once_and_the_client_goes_on(trained):
    trained.save_state("twice").result()
    step(trained, 1)
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="twice"):
        trained.save_state("twice").result()
    assert trained.save_state("twice", overwrite=True).result().path.endswith("/weights/twice")


# ------------------------------------------------------------------ failures


def test_a_failed_request_names_its_field_and_the_next_one_runs(trained):
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)) as found:
        trained.forward_backward([datum([5, 6])], "ppo").result()
    assert "logprobs" in str(found.value) or "advantages" in str(found.value)
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="9999"):
        trained.forward([datum([5, 9999])], "cross_entropy").result()
    assert trained.forward([datum([5, 6])], "cross_entropy").result().metrics["loss:sum"] > 0


def test_a_wrong_key_is_told_at_once(serving, model_folder, tmp_path):
    with serving(
        model=(f"{MODEL}={model_folder}",), data_dir=tmp_path, api_key=("tml-right",)
    ) as server:
        with pytest.raises(tinker.AuthenticationError, match="does not know the key"):
            offered(server.url, "tml-wrong")
        assert offered(server.url, "tml-right")[0].model_name == MODEL
