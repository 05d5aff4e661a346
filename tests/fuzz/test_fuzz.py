"""Thousands of malformed requests on the real routes: none is answered with a 5xx, none hangs, none
leaves anything behind that the journal does not know of. `make fuzz` sends a hundred thousand.
"""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.wire.app import ROUTES

from .app import HOLD
from .bodies import JSON_BODIES, is_proto, new_world
from .campaign import Report, end, fuzz
from .judge import faults_of, rows
from .mutate import malformed, whole

WALKS, DRAWN = 2500, 1000
EXPECTED = {"/unload_model": 404}  # of a model nobody has: the others need theirs


@pytest.mark.parametrize(
    "route", [r for r in ROUTES if is_proto(r) or r.path in JSON_BODIES], ids=lambda r: r.path
)
def test_what_is_mutated_is_valid(app, route):
    """Otherwise nothing below would get past the first check."""
    world = new_world(app)
    for seed in range(6):  # every kind of protobuf body among them
        answer = app.send(whole(route, world, Random(seed)))
        assert answer.status == EXPECTED.get(route.path, 200), answer
    assert end(app, world) == []


def test_bodies_are_of_routes_that_exist():
    assert {route.path for route in ROUTES} >= set(JSON_BODIES)


def test_malformed_requests_by_number(app):
    """No fault, and no row but those that were asked for."""
    before = rows(app)["requests"]
    report = Report()
    fuzz(app, WALKS, seed=11, report=report)
    assert report.faults == []
    assert report.requests == WALKS
    assert {400, 401, 404, 405, 413} <= set(report.statuses)
    assert rows(app)["requests"] - before < WALKS
    assert max(report.slowest[0], HOLD) < 10


@settings(
    max_examples=DRAWN,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(rng=st.randoms(use_true_random=False))
def test_malformed_requests_that_shrink(app, world, rng):
    sent = malformed(world, rng)
    assert faults_of(app, sent, app.send(sent)) == [], sent.shown()


def test_nothing_is_left(app, world):
    assert end(app, world) == []
