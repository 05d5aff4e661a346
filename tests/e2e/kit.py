"""Small data for the tiny model, and how tests read what comes back."""

import numpy as np
import tinker
from tinker import types

MODEL = "org/tiny"
KEY = "tml-local"


def datum(tokens, weights=None):
    """Predict each token from the ones before it."""
    rows = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [1.0] * rows if weights is None else weights,
        },
    )


def batch(count, seed=0):
    """Datums of 3, 4, 5, ... rows."""
    rng = np.random.default_rng(seed)
    return [datum(rng.integers(0, 256, size=4 + i).tolist()) for i in range(count)]


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens))


def offered(url, key=KEY):
    """The models a server says it has."""
    client = tinker.RestClient(base_url=url, api_key=key)
    return client.get_server_capabilities().result().supported_models


def logprobs(output):
    return [np.asarray(found["logprobs"].to_numpy()) for found in output.loss_fn_outputs]


def close(left, right, tolerance=1e-5):
    """Equal lists of arrays, to a tolerance."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)
