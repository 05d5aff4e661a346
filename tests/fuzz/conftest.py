"""One application for all of these tests, and a session of one's own for each module."""

import pytest

from .app import with_app
from .bodies import new_world


@pytest.fixture(scope="session")
def app(tmp_path_factory):
    app = with_app(tmp_path_factory.mktemp("fuzz"))
    yield app
    app.close()


@pytest.fixture(scope="module")
def world(app):
    return new_world(app)
