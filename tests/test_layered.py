"""Tests of denoisers that are loaded layer by layer.

They must give the same results as whole denoisers, and must stay within their memory limits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_export import families
from dlm_export.network import layered, linear
from dlm_export.network.layered import Carried, MemoryLimitError, make_batches
from dlm_export.sources import open_source
from dlm_export.workplace import SMALL_MATRIX, threads_for


def _canvases(vocab_size: int, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length) for length in lengths]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
@settings(max_examples=100)
def test_every_canvas_is_in_one_batch_of_its_own_length(lengths: list[int], tokens: int) -> None:
    canvases = _canvases(50, lengths)
    batches = make_batches(canvases, tokens)
    assert sorted(number for batch in batches for number in batch.numbers) == list(
        range(len(lengths))
    )
    rows = 0
    for batch in batches:
        assert batch.rows == slice(rows, rows + batch.ids.numel())
        rows = batch.rows.stop
        assert len(batch.numbers) == 1 or batch.ids.numel() <= tokens
        for number, ids in zip(batch.numbers, batch.ids, strict=True):
            assert np.array_equal(ids.numpy(), canvases[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_bytes", [None, 0])
@pytest.mark.parametrize("family", ["llada_checkpoint", "dream_checkpoint"])
def test_the_logits_are_those_of_the_whole_denoiser(
    family: str,
    dtype: torch.dtype,
    memory_bytes: int | None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    source = open_source(request.getfixturevalue(family))
    canvases = _canvases(source.network.vocab_size, [5, 9, 5, 12, 9, 5])
    rows = [np.array([0, len(canvas) - 1]) for canvas in canvases]
    parts = families.layered(source.parameters, source.network, dtype)
    carried = Carried(parts, canvases, memory_bytes=memory_bytes, folder=tmp_path)
    for i in range(len(source.network.layers)):
        carried.through(i, parts.block(i))
    project = parts.head()
    whole = families.load(source.parameters, source.network, dtype)
    for canvas, chosen, features in zip(canvases, rows, carried.features(rows), strict=True):
        with torch.no_grad():
            expected = whole(torch.from_numpy(canvas).unsqueeze(0))[
                0, torch.from_numpy(chosen)
            ].float()
        # The layered denoiser multiplies the rows of several canvases at once, which changes the
        # order of sums. In bf16, it also computes the output head in fp32.
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        assert (project(features) - expected).abs().max() <= tolerance * (
            expected.max() - expected.min()
        )
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_anything_is_computed(
    llada_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    source = open_source(llada_checkpoint)
    monkeypatch.setattr(layered.os, "posix_fallocate", full)
    with pytest.raises(
        MemoryLimitError,
        match=r"no room for [\d,]+ bytes of activations \(No space left on device\)",
    ):
        Carried(
            families.layered(source.parameters, source.network),
            [np.arange(4)],
            memory_bytes=0,
            folder=tmp_path,
        )
    assert not list(tmp_path.iterdir())


def test_a_layers_memory_is_the_next_ones_only_when_nobody_holds_it(llada_checkpoint: Path) -> None:
    source = open_source(llada_checkpoint)
    # All weights must be converted to bf16, because the checkpoint stores them in fp32.
    parts = families.layered(source.parameters, source.network, torch.bfloat16)

    def values(i: int) -> list[torch.Tensor]:
        return [weight.clone() for weight in parts.block(i).parameters()]

    expected = [values(0), values(1)]
    first = parts.block(0)
    places = {weight.data_ptr() for weight in first.parameters()}
    second = parts.block(1)
    assert places.isdisjoint(weight.data_ptr() for weight in second.parameters())
    del first
    places = {weight.data_ptr() for weight in second.parameters()}
    del second
    first = parts.block(0)
    assert {weight.data_ptr() for weight in first.parameters()} == places
    second = parts.block(1)
    for block, wanted in zip((first, second), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(block.parameters(), wanted, strict=True))


def test_small_layers_take_one_thread_for_as_long_as_they_work() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(SMALL_MATRIX + 1):
            assert torch.get_num_threads() == 2
        with threads_for(SMALL_MATRIX):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_in_bf16_is_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of the product is the exact sum, rounded to ``dtype`` once.

    The product is computed in several parts, with and without torch's kernels for bf16.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 96).to(dtype), torch.randn(96, 70).to(dtype)
    exact = x.double() @ weight.double()
    monkeypatch.setattr(linear, "WIDENED", 96 * 16)
    for has_kernels in (True, False):
        monkeypatch.setattr(linear, "_processor_has_bf16_kernels", lambda has=has_kernels: has)
        found = linear.product(x, weight)
        assert found.dtype == dtype
        # A bf16 number has 8 significant bits. In an fp32 sum of 96 products, about 20 bits are
        # correct.
        torch.testing.assert_close(
            found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-4
        )
