"""Sampling clients of the official SDK: polls in batches, pickled, cancelled, in flight."""

import asyncio
import pickle
import time

import numpy as np
import pytest
import tinker
from tinker import types

from .kit import KEY, MODEL, batch, prompt


@pytest.fixture(scope="module")
def base(service):
    return service.create_sampling_client(base_model=MODEL).result()


def sample(client, *tokens, count=1, **params):
    given = {"max_tokens": 4, "seed": 1} | params
    return client.sample(
        prompt(*tokens), num_samples=count, sampling_params=types.SamplingParams(**given)
    )


def test_many_samples_share_one_poll(base, http):
    assert base.holder.get_client_config().sample_use_retrieve_futures
    found = [sample(base, 5, 6, seed=i, count=2) for i in range(40)]
    results = [future.result() for future in found]
    ids = [s.sequence_id for result in results for s in result.sequences]
    assert len(set(ids)) == 80
    again = [sample(base, 5, 6, seed=i, count=2) for i in range(40)]
    for result, future in zip(results, again, strict=True):
        assert [s.tokens for s in result.sequences] == [s.tokens for s in future.result().sequences]
    assert base._get_futures_poller()._cursor >= 80


def test_a_pickled_client_joins_and_collides_with_nobody(base):
    copies = [pickle.loads(pickle.dumps(base)) for _ in range(2)]
    futures = [sample(client, 5, 6, 7) for client in (base, *copies)]
    results = [future.result() for future in futures]
    assert len({r.sequences[0].tokens.__repr__() for r in results}) == 1
    assert len({r.sequences[0].sequence_id for r in results}) == 3
    clones = {client._cloned_sampler_id for client in copies}
    assert 0 not in clones and len(clones) == 2


def test_a_handle_makes_another_client_of_the_same_sampler(base):
    other = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=KEY)
    assert (
        sample(other, 5).result().sequences[0].tokens
        == sample(base, 5).result().sequences[0].tokens
    )


def test_cancelling_frees_the_sampler(service):
    """Far more work than the time allows, then one small request that must not wait for it."""
    client = service.create_sampling_client(base_model=MODEL).result()

    async def give_up():
        future = sample(client, 5, max_tokens=250, count=256, stop=[])
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(future.result_async(), 0.3)

    started = time.monotonic()
    for _ in range(4):
        asyncio.run(give_up())
    assert sample(client, 5).result().sequences[0].tokens
    assert time.monotonic() - started < 15


def test_prompt_scores_of_every_kind(base):
    targets = np.array([[7, 9], [-1, 3], [8, -1]])
    params = types.SamplingParams(max_tokens=2, seed=1, temperature=0.5)
    result = base.sample(
        prompt(5, 6, 7, 8), 1, params,
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_numpy(targets),
        prompt_alt_tokens_k=4,
    ).result()  # fmt: skip
    assert result.prompt_logprobs[0] is None
    top = result.topk_prompt_logprobs
    assert top[0] is None and all(len(row) == 3 for row in top[1:])
    assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in top[1:])
    found = result.target_prompt_logprobs.to_numpy()
    assert found.shape == (3, 2) and found[1, 0] == 0 and found[2, 1] == 0
    assert (found[targets >= 0] < 0).all()
    assert result.prompt_alt_tokens.tokens.to_numpy().shape == (3, 4)
    assert len(result.sequences[0].topk_logprobs) == len(result.sequences[0].tokens)

    sparse = types.TensorData(
        data=[7, 8], dtype="int64", shape=[3, 2],
        sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[0, 0],
    )  # fmt: skip
    answer = base.sample(prompt(5, 6, 7, 8), 1, params, target_prompt_logprobs=sparse).result()
    kept = answer.target_prompt_logprobs
    assert kept.sparse_crow_indices == [0, 1, 1, 2] and kept.sparse_col_indices == [0, 0]
    np.testing.assert_allclose(kept.data, [found[0, 0], found[2, 0]], atol=1e-5)

    last = base.sample(
        prompt(5, 6, 7, 8), 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2
    ).result()
    assert last.prompt_logprobs[:2] == [None, None]
    np.testing.assert_allclose(last.prompt_logprobs[2:], result.prompt_logprobs[2:], atol=1e-5)


def test_stops_reach_the_engine_in_each_form(base):
    free = sample(base, 5, 6, stop=[], max_tokens=12).result().sequences[0]
    assert len(free.tokens) == 12 and free.stop_reason == "length"
    third = free.tokens[2]
    stopped = sample(base, 5, 6, stop=[third], max_tokens=12).result().sequences[0]
    at = free.tokens.index(third)
    assert stopped.tokens == free.tokens[: at + 1] and stopped.stop_reason == "stop"


def test_an_inflight_client_follows_the_newest_weights(trained):
    follower = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = trained.save_weights_and_get_sampling_client().result()
    tokens = prompt(5, 6, 7, 8)
    before = follower.compute_logprobs(tokens).result()[1:]
    np.testing.assert_allclose(before, fixed.compute_logprobs(tokens).result()[1:], atol=1e-5)
    trained.forward_backward(batch(2), "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=0.1)).result()
    newest = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    after = newest.compute_logprobs(tokens).result()[1:]
    assert np.abs(np.subtract(after, before)).max() > 1e-3
    np.testing.assert_allclose(follower.compute_logprobs(tokens).result()[1:], after, atol=1e-5)
    np.testing.assert_allclose(fixed.compute_logprobs(tokens).result()[1:], before, atol=1e-5)


def test_a_bad_sample_is_refused_at_once(base):
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="prompt"):
        base.sample(types.ModelInput.empty(), 1, types.SamplingParams(max_tokens=1)).result()
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="max_tokens"):
        sample(base, 5, max_tokens=0).result()
