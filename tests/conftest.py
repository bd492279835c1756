"""Checkpoints and bundles that many tests share. Each bundle is made once per test run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import dream_config, llada_config, write_checkpoint
from serving_process import Served, serving
from shared import made_once
from traces import trace_once

from dlm_export.graph import trace

pytest_plugins = ["processor_time"]

# For tiny denoisers, a second thread costs more time than it saves, especially on a busy machine.
# The variable sets the number of torch's threads in programs that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Property tests draw the same examples on every machine and in every run, so that a first run of
# `make test` fails only if the code is wrong. `make test-slow` selects the profile "search", which
# draws new examples in each run.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("fixed")

# pytest-xdist runs all tests of a group in the same process. Test files that share slow fixtures
# or a traced graph (engines, the demo) form a group. Each other test file is a separate group. All processes use the
# same folder for the native build.
GROUPS = {
    "gemma": ("test_diffusion_gemma", "test_gemma_loop", "test_gemma_quantised"),
    "cuda": ("test_cuda_target", "test_row_choice"),
    "demo": ("test_demo", "test_tools", "test_chat", "test_special_tokens"),
    "served": (
        "test_lm_eval",
        "test_serving_clients",
        "test_serving_decisions",
        "test_serving_edits",
        "test_serving_public_clients",
        "test_serving_responses",
    ),
    "engines": (
        "test_engines",
        "test_audit",
        "test_device_graph",
        "test_device_builds",
        "test_engine_refusals",
    ),
}


@pytest.hookimpl(tryfirst=True)  # this hook must run before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign each test to a group for pytest-xdist's ``--dist loadgroup``, and mark native tests."""
    of = {name: group for group, names in GROUPS.items() for name in names}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(of.get(item.path.stem, item.path.stem)))
        if "sanitized" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.native)


DEMO_CHECKPOINT = Path(__file__).parent.parent / "examples" / "demo-denoiser"


def _build(checkpoint: Path) -> Callable[[Path], object]:
    """A function that builds a bundle. Other tests compare bundles with torch: test_parity.py those
    of ``llada`` and ``dream``, test_docs.py that of the demo.
    """

    def make(output: Path) -> object:
        from dlm_export.build import BuildOptions, build

        return build(checkpoint, output, BuildOptions(check_parity=False))

    return make


@pytest.fixture(scope="session", autouse=True)
def _traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "trace_pass", trace_once)
        yield


@pytest.fixture(scope="session")
def llada_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaDA with as many key and value heads as query heads, in one fp32 file."""
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "llada", llada_config(), seed=1
    )


@pytest.fixture(scope="session")
def dream_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Dream with grouped queries, biases of q, k and v, and shift 1, in three bf16
    shards.
    """
    path = tmp_path_factory.mktemp("checkpoints") / "dream"
    return write_checkpoint(path, dream_config(), seed=2, dtype=torch.bfloat16, shards=3)


@pytest.fixture(scope="session")
def llada_bundle(llada_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "llada", _build(llada_checkpoint))


@pytest.fixture(scope="session")
def dream_bundle(dream_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "dream", _build(dream_checkpoint))


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained demo denoiser as an fp32 bundle."""
    return made_once(tmp_path_factory, "demo", _build(DEMO_CHECKPOINT))


@pytest.fixture(scope="session")
def several_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second demo, which is block-causal, as an fp32 bundle."""
    checkpoint = DEMO_CHECKPOINT.parent / "demo-several"
    return made_once(tmp_path_factory, "several", _build(checkpoint))


@pytest.fixture(scope="session")
def served(demo_bundle: Path) -> Iterator[Served]:
    """A server of the demo bundle with default options."""
    with serving(demo_bundle) as process:
        yield process
