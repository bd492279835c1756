"""Tests of ``build --ray`` and ``compare --ray``, with two workers on this machine."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")

from dlm_export.build import BuildOptions, QuantiseOptions, build  # noqa: E402
from dlm_export.distributed.ray_workers import RayWorkers, connected  # noqa: E402
from dlm_export.distributed.record import Record  # noqa: E402
from dlm_export.distributed.workers import WorkerError, WorkerInputError  # noqa: E402
from dlm_export.judging.accuracy.rounds import Effort  # noqa: E402
from dlm_export.quantising.samples import CalibrationOptions  # noqa: E402
from dlm_runtime.manifest import read_manifest  # noqa: E402
