"""Starts Ray on this machine for tests of Ray Serve.

Import this module before ``ray.serve``, which reads its time limits when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dlm_export.distributed.ray_workers import LOCAL, connected

# Ray Serve replaces a proxy that does not answer for a few seconds, and the proxy's requests fail.
# On a busy machine, a healthy proxy can be slower, so the time limits are raised to 120 s.
for name in ("READY", "HEALTH"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")


@contextmanager
def started(cores: int) -> Iterator[None]:
    """Run Ray with this number of cores while the ``with`` block runs."""
    with connected(LOCAL, cores):
        yield
