"""Standalone servers, one for all tests of a file."""

import pytest

from tests.standalone.served import ENVS
from tests.standalone_server import standalone


@pytest.fixture(scope="module")
def cartpole():
    with standalone("CartPole-v1") as server:
        yield server


@pytest.fixture(scope="module")
def zoo():
    with standalone(f"{ENVS}:every_space", "--env-kwargs", "space=box_float32") as server:
        yield server
