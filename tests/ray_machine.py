"""Starts Ray on this machine for tests."""

from __future__ import annotations

import ray

ATTEMPTS = 4


def start(cores: int) -> None:
    """Start Ray with this number of cores.

    Ray gives up if a process of its own does not start within 30 s, which happens while other
    programs use all cores. The function then tries again.
    """
    for attempt in range(ATTEMPTS):
        try:
            ray.init(
                num_cpus=cores,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as err:
            ray.shutdown()
            if "timed out during startup" not in str(err) or attempt == ATTEMPTS - 1:
                raise
