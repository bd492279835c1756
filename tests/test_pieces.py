"""Tests of functions that process an array in pieces, with several threads.

Processing an array in pieces must give the same result as processing the whole array. Errors must
be reported.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llada_config, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dlm_calibration import pieces
from dlm_calibration.pieces import Lazy, ahead, row_slices
from dlm_calibration.precision_rounding import NUMBER_FORMATS, quantise_weight
from dlm_calibration.precisions import RECIPES
from dlm_export.build import build
from dlm_export.building.options import BuildOptions
from dlm_export.bundle.folder import sha256
from dlm_export.cli import printing
from dlm_export.graph import DATA_FILE, operators, write
from dlm_export.sources import Source, open_source


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_results_come_in_order_whoever_is_first(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    later = threading.Event()

    def work(number: int) -> int:
        if cores > 1 and number == 0:  # finish the first piece after a later one
            assert later.wait(60)
        later.set()
        return -number

    assert list(ahead(work, range(20))) == [-number for number in range(20)]


@pytest.mark.parametrize("cores", [1, 3])
def test_an_error_is_raised_at_its_turn_and_ends_the_work(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    seen: list[int] = []
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        seen.extend(ahead(work, range(1000)))
    assert seen == [] or seen == [0, 1, 2]
    assert len(begun) < 100


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3))
def test_rows_are_cut_into_all_of_them_once(shape: list[int]) -> None:
    rows = row_slices(tuple(shape))
    assert [i for part in rows for i in range(shape[0])[part]] == list(range(shape[0]))
    assert all((part.stop - part.start) * math.prod(shape[1:]) % 2 == 0 for part in rows[:-1])
    assert all(
        (part.stop - part.start) * math.prod(shape[1:])
        <= max(pieces.PIECE, 32 * math.prod(shape[1:]))
        for part in rows
    )


@pytest.mark.parametrize("format", NUMBER_FORMATS)
def test_a_matrix_read_by_columns_quantises_to_the_same_codes(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = np.random.default_rng(0).standard_t(3, (160, 96)).astype(np.float32)
    whole = quantise_weight(w, format)
    monkeypatch.setattr("dlm_calibration.blocks._BLOCK", 160 * 7)
    stored = np.asfortranarray(w)
    ours = quantise_weight(Lazy(w.shape, lambda at: stored[at]), format)
    assert ours.codes.tobytes() == whole.codes.tobytes()
    assert ours.scales.tobytes() == whole.scales.tobytes()
    assert ours.global_scale == whole.global_scale


def test_panels_in_pieces_are_the_panels() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (64, 150)).astype(np.int8)
    whole = operators.panels(codes)
    shifted = np.pad(codes.astype(np.int16) + 128, ((0, 0), (0, 10)), constant_values=128).astype(
        np.uint8
    )
    assert np.array_equal(whole, shifted.reshape(16, 4, 5, 32).transpose(2, 0, 3, 1))
    lazy = operators.lazy_panels("int8", codes)
    assert lazy.shape == whole.shape
    assert np.array_equal(np.concatenate([lazy[(slice(i, i + 2),)] for i in (0, 2, 4)]), whole)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    import torch

    folder = tmp_path_factory.mktemp("pieces")
    return open_source(
        write_checkpoint(folder / "checkpoint", llada_config(n_layers=1), dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_part_of_a_parameter_is_that_part_of_it(
    source: Source, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    for name in ("embed.weight", "blocks.0.mlp.up.weight", "final_norm.weight"):
        whole = source.parameters.read(name, np.dtype(dtype))
        assert whole.flags.c_contiguous
        for at in ((slice(3, 9),), (slice(None), slice(5, 40)))[: whole.ndim]:
            assert np.array_equal(source.parameters.read(name, np.dtype(dtype), at), whole[at]), (
                name,
                at,
            )


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-rtn"])
def test_what_is_written_in_pieces_is_what_the_manifest_hashes(
    source: Source, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    counted: list[int] = []
    taken = write.write_graph

    def written(
        graph: object, parameter: object, folder: Path, advance: object, device: object
    ) -> object:
        hashed = taken(graph, parameter, folder, counted.append, device)  # type: ignore[arg-type]
        assert hashed[DATA_FILE]["sha256"] == sha256(folder / DATA_FILE)
        assert hashed[DATA_FILE]["bytes"] == (folder / DATA_FILE).stat().st_size
        return hashed

    monkeypatch.setattr(write, "write_graph", written)
    report = build(
        source.path, tmp_path / "bundle", BuildOptions(precision=precision, check_parity=False)
    )
    size = report.files_bytes[DATA_FILE]
    assert size - 4096 * len(counted) <= sum(counted) <= size
    layers = list(source.network.quantisable())
    formats = RECIPES[precision].formats(layers) if precision in RECIPES else {}
    assert size <= write.data_bytes(source.network, "fp32", formats)


def test_a_long_command_says_how_far_it_is_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printing, "LINE_EVERY_S", 0.01)
    said = ""
    with printing.Bars() as bars:
        bars.start("write weights", 8 << 20)
        bars.advance(2 << 20)
        for _ in range(6000):  # the loop waits at most a minute
            time.sleep(0.01)
            said += capsys.readouterr().err
            if "25%" in said:
                break
    assert re.search(
        r"write weights 25%, 2\.0 MiB of 8\.0 MiB, .*B/s, \d+ s left, \d+ s so far, .*iB in memory\n",
        said,
    )


def test_progress_of_one_unit_promises_nothing() -> None:
    assert printing.told_progress("trace graph", 0, 1, 3.0).startswith("trace graph, 3 s so far")
    assert printing.told_progress("judge", 10, 40, 5.0).startswith(
        "judge 25%, 10 of 40, 2/s, 15 s left, 5 s so far"
    )
