"""One cluster for all tests on Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray.cluster import ray_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Ray's nodes have this machine's own address; and files that Ray leaves to the garbage collector.
        item.add_marker(pytest.mark.filterwarnings("ignore:the token travels unencrypted:RuntimeWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes, which this process is connected to."""
    with ray_cluster(3) as started:
        ray.init(address=started.address, log_to_driver=False)
        try:
            yield started
        finally:
            ray.shutdown()
