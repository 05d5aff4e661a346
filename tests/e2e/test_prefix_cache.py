"""The prefix cache as clients see it: counted where it is used, and nobody else's."""

import sqlite3

import numpy as np
import tinker
from tinker import types

from .kit import MODEL, datum

PROMPT = list(range(5, 65))


def draw(client, tokens, **options):
    params = types.SamplingParams(max_tokens=30, seed=3, stop=[])
    return client.sample(types.ModelInput.from_ints(tokens), 1, params, **options).result()


def test_turns_hit_for_their_owner_under_their_weights(serving, model_folder, tmp_path):
    config = {"model": (f"{MODEL}={model_folder}",), "data_dir": tmp_path, "threads": 1}
    with serving(**config, api_key=("tml-a", "tml-b")) as server:
        a, b = (tinker.ServiceClient(base_url=server.url, api_key=f"tml-{n}") for n in "ab")
        mine, theirs = (s.create_sampling_client(base_model=MODEL).result() for s in (a, b))
        first = draw(mine, PROMPT)
        turn = [*PROMPT, *first.sequences[0].tokens, 9, 10, 11]
        second = draw(mine, turn)
        found = [draw(theirs, turn), draw(theirs, turn), draw(mine, turn)]
        hits = [r.prompt_cache_hit_tokens for r in (first, second, *found)]
        assert hits == [0, 60 + 30 - 1, 0, 92, 92]
        [expected] = found[0].sequences  # computed, every token of it
        for result in (second, *found[1:]):
            [sequence] = result.sequences
            assert sequence.tokens == expected.tokens
            np.testing.assert_allclose(sequence.logprobs, expected.logprobs, atol=1e-5)
        scored = draw(mine, turn, include_prompt_logprobs=True)
        assert scored.prompt_cache_hit_tokens == 0 and None not in scored.prompt_logprobs[1:]

        client = a.create_lora_training_client(MODEL, rank=4, seed=1).result()
        live = client.save_weights_and_get_sampling_client(kind="inflight").result()
        counts = [draw(live, PROMPT).prompt_cache_hit_tokens for _ in range(2)]
        client.forward_backward([datum([5, 6, 7, 8])], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
        client.save_weights_and_get_sampling_client(kind="inflight").result()
        counts += [draw(live, PROMPT).prompt_cache_hit_tokens for _ in range(2)]
        assert counts == [0, 59, 0, 59]
        for service in (a, b):
            service.close("success").result(10)
    with sqlite3.connect(tmp_path / "trimtab.sqlite3") as db:
        used = db.execute(
            "SELECT SUM(amount) FILTER (WHERE kind = 'sampling_prefill'),"
            " SUM(amount) FILTER (WHERE kind = 'sampling_prefill_cached') FROM usage GROUP BY owner"
        ).fetchall()
    mine, theirs = (5 * 60 + 3 * 93, 89 + 92 + 2 * 59), (2 * 93, 92)
    assert set(used) == {(asked - hit, hit) for asked, hit in (mine, theirs)}
