"""Killed at every named point, a server loses nothing that its client could notice.

Three clients train at once, each over a server that dies at one point after another; each ends with
the weights, the answers, the journal and the records of a run that was never disturbed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from .chain import Chain
from .kit import Home
from .points import POINTS

CYCLES = 9
CHAINS = {
    "requests": (
        "open:before:create_model", "open:after:create_model", "finish:before:create_model",
        "finish:after:create_model", "open:before:forward_backward",
        "open:after:forward_backward", "finish:before:forward_backward",
        "finish:after:forward_backward", "open:after:optim_step", "finish:before:optim_step",
        "finish:after:optim_step",
    ),
    "files": (
        "file:middle:checkpoints", "rename:before:checkpoints", "rename:after:checkpoints",
        "finish:after:save_weights", "file:middle:snapshots", "rename:before:snapshots",
        "rename:after:snapshots", "snapshot:copied", "snapshot:row", "load:linked",
        "finish:before:load_weights",
    ),
    "answers": (
        "finish:after:load_weights", "replay:begin", "finish:after:optim_step", "replay:step",
        "finish:before:save_weights_for_sampler", "finish:after:save_weights_for_sampler",
        "open:after:sample", "finish:before:sample", "finish:after:sample", "commit:middle",
        "commit:after", "answer:submit", "answer:retrieve",
    ),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # load_state, on its way out


@pytest.fixture(scope="module")
def chains(nursery, crash_model, tmp_path_factory):
    """Every chain, and under "" the run that nothing happened to, all at the same time."""
    path = tmp_path_factory.mktemp("chains")

    def run(name):
        home = Home(nursery, crash_model, path / (name or "undisturbed"))
        return Chain(home, CHAINS.get(name, ()), CYCLES).run()

    with ThreadPoolExecutor(4) as threads:
        names = ["", *CHAINS]
        return dict(zip(names, threads.map(run, names), strict=True))


@pytest.mark.parametrize("name", CHAINS)
def test_a_client_of_a_server_that_keeps_dying_notices_nothing(chains, name):
    chain, undisturbed = chains[name], chains[""]
    assert chain.trouble == []
    assert chain.hit == list(CHAINS[name])
    expected, found = undisturbed.compared(), chain.compared()
    for what in expected:
        assert found[what] == expected[what], what


def test_points_that_are_named_exist():
    assert {point for points in CHAINS.values() for point in points} <= set(POINTS)
