"""Tries every method of the installed SDK against the server at a URL; prints what came of it.

    python -m tests.compat.walk http://127.0.0.1:8000 [core]

One JSON object: `sdk`, `core` (step: what went wrong, null, or "absent") and `methods` (method:
verdict and note). Verdicts: works; refused, by the server and on purpose; fails; unknown, where
there is no trial. The environment must be set as `trimtab serve` prints it.
"""

import inspect
import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import tinker
from tinker import types

from tests.compat.methods import public_methods
from tests.compat.trials import TOKENS, Call, Refused, World, done, trial_of

SECONDS = 60  # a trial that takes longer fails
ABSENT = "absent"  # what the SDK does not have


def main(url, what="all"):
    warnings.simplefilter("ignore")
    world = World(url)
    found = {"sdk": tinker.__version__, "core": {}, "methods": {}}
    for step in (trains, samples, saves, loads, stabilises):
        told, wrong = failure(lambda step=step: step(world))
        found["core"][step.__name__] = told or wrong
        if wrong is not None:  # the others would wait on it
            break
    if what != "core":
        for method in public_methods():
            found["methods"][method] = verdict(world, method)
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of trials that hang


def verdict(world, method):
    trial = trial_of(method)
    if trial is None:
        return {"verdict": "unknown", "note": "nobody has tried it yet"}
    cls, name = method.split(".")
    told, wrong = failure(lambda: trial(world, Call(name, world.target(cls))))
    if isinstance(wrong, Refused):
        return {"verdict": "refused", "note": str(wrong)}
    if wrong is not None:
        return {"verdict": "fails", "note": wrong}
    return {"verdict": "works", "note": told if isinstance(told, str) else ""}


def failure(action):
    """(what it returned, None) or (None, what it raised in a line)."""
    with_limit = ThreadPoolExecutor(1)
    try:
        return with_limit.submit(action).result(SECONDS), None
    except Refused as error:
        return None, error
    except TimeoutError:
        return None, f"no end within {SECONDS} s"
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {line}"[:200]
    finally:
        with_limit.shutdown(wait=False)


# ------------------------------------------------------------------ the core


def trains(world):
    client = world.training_client
    before, _ = (step(client, world.datum) for _ in range(2))
    assert step(client, world.datum) < before


def step(client, datum):
    loss = done(client.forward_backward([datum], "cross_entropy")).metrics["loss:sum"]
    done(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    return loss


def samples(world):
    client = done(world.training_client.save_weights_and_get_sampling_client())
    response = done(client.sample(world.prompt, 2, world.params))
    assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4]


def saves(world):
    assert "/weights/" in world.state


def loads(world):
    client = done(world.service_client.create_training_client_from_state(world.state))
    assert done(client.forward([world.datum], "cross_entropy")).metrics["loss:sum"] > 0


def stabilises(world):
    """stable_reinforce, where this SDK can record a sample and name it."""
    client = world.training_client
    recording = inspect.signature(client.save_weights_and_get_sampling_client).parameters
    if "record_stability_info" not in recording:
        return ABSENT
    sampler = done(client.save_weights_and_get_sampling_client(record_stability_info=True))
    (sequence,) = done(sampler.sample(world.prompt, 1, world.params)).sequences
    n, name = len(sequence.tokens), sequence.sequence_id
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*TOKENS[:3], *sequence.tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [0, 0, *sequence.tokens],
            "logprobs": [0.0, 0.0, *sequence.logprobs],
            "advantages": [0.0, 0.0] + [1.0] * n,
        },
    )
    prompt, sampled = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
    marked = datum.with_provenance(
        model_input=[
            prompt(sequence_id=name, length=3), sampled(sequence_id=name, length=n - 1),
        ],
        loss_fn_inputs=[
            prompt(sequence_id=name, offset=1, length=2), sampled(sequence_id=name, length=n),
        ],
    )  # fmt: skip
    done(client.forward_backward([marked], "stable_reinforce"))
    done(client.optim_step(types.AdamParams(learning_rate=1e-3)))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
