"""A Ray cluster of several nodes on this machine, of which nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from ray.cluster_utils import Cluster

__all__ = ["NODE", "ray_cluster"]

NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}
"""A node of as many CPUs, whatever this machine has."""
# Ray starts no processes ahead.
_LIGHT = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}


@contextmanager
def ray_cluster(nodes: int) -> Iterator[Cluster]:
    """Start so many nodes; afterwards all that was started has ended. Nobody is connected yet."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={**NODE, "_system_config": _LIGHT})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes(60)
        yield cluster
    finally:
        cluster.shutdown()
        started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
        _, alive = psutil.wait_procs(started, 30.0)
        assert not [process.name() for process in alive if process.is_running()], "Ray left processes behind"
