"""Starts Ray on this machine for tests.

Import this module before ``ray.serve``, which reads its time limits when it is imported.
"""

from __future__ import annotations

import os

import ray

ATTEMPTS = 4
# Ray Serve replaces a proxy that does not answer for a few seconds. The requests of the proxy then
# fail. While other programs use all cores, a healthy proxy can take longer.
for name in ("READY", "HEALTH"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")


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
