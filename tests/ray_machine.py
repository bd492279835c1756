"""Starts Ray on this machine for tests of Ray Serve.

Import this module before ``ray.serve``, which reads its time limits when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray Serve replaces a proxy that does not answer for a few seconds, and the proxy's requests fail.
# On a busy machine, a healthy proxy can be slower, so the time limits are raised to 120 s.
for name in ("READY", "HEALTH"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")


@contextmanager
def started(cores: int) -> Iterator[None]:
    """Run Ray with this number of cores while the ``with`` block runs."""
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()
