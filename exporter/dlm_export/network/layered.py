"""Runs canvases through a denoiser layer by layer, with only one layer in memory.

A run needs memory for one layer, and for the activations of all canvases. Each weight matrix is
loaded once for all canvases. Canvases of equal length are computed together. If the activations
need more memory than the limit, they are stored in a memory-mapped file, whose disk space is
allocated in advance.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_calibration.states import Draft
from dlm_export.memory import give_back
from dlm_export.network.denoiser import (
    Block,
    Embedding,
    Packed,
    Past,
    Rotary,
    Transform,
    Turn,
    capped,
    check_built,
    counted,
    hiding,
    places_of,
    turns_of,
)
from dlm_export.network.experts import Stacked
from dlm_export.network.norms import make_norm
from dlm_export.network.pass_plan import Span
from dlm_export.network.spec import EMBEDDING, TRANSFORM, NetworkSpec
from dlm_runtime.errors import DlmError

BATCH_TOKENS = 2048
"""Largest number of tokens in a batch. A longer canvas is a separate batch.

With this many tokens, matrix products already reach full speed on a CPU.
"""
HEAD_COLUMNS = 8192
"""Number of columns of the head that are converted to fp32 at a time."""

_Module = TypeVar("_Module", bound=nn.Module)


class MemoryLimitError(DlmError):
    """Raised if the requested work needs more memory or disk space than the limit allows."""


class ReadTensor(Protocol):
    """A function that loads parameters of a denoiser."""

    def __call__(
        self, parameter: str, dtype: torch.dtype | None, rows: Tensor | None = None
    ) -> Tensor:
        """Return a parameter of ``Denoiser`` as a tensor on the CPU.

        If ``rows`` is set, the tensor contains only these entries of axis 0. If ``dtype`` is
        ``None``, the parameter keeps its stored type. The caller must not modify the result.
        """


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of B canvases of equal length L.

    ``numbers`` are the indices of the canvases. ``ids`` are their token ids, int64 ``[B, L]``.
    ``rows`` are the rows of ``Carried.states`` that belong to the canvases. ``draft_start`` is the
    first position of the draft pass over each canvas. ``None`` means that there is no draft pass.
    ``is_updated`` is true if the draft pass uses low-rank updates.
    """

    numbers: tuple[int, ...]
    ids: Tensor
    rows: slice
    draft_start: int | None = None
    is_updated: bool = False


def make_batches(
    canvases: Sequence[np.ndarray],
    tokens: int = BATCH_TOKENS,
    drafts: Sequence[Draft | None] | None = None,
) -> list[Batch]:
    """Group canvases by length, shortest first, into batches of at most ``tokens`` tokens.

    ``drafts`` contains the draft pass of each canvas, if any. The draft passes of a batch start at
    the same position.
    """
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for number, canvas in enumerate(canvases):
        draft = None if drafts is None else drafts[number]
        start, is_updated = (-1, False) if draft is None else (draft.start, draft.is_updated)
        alike.setdefault((len(canvas), start, is_updated), []).append(number)
    batches, first = [], 0
    for (length, draft_start, is_updated), numbers in sorted(alike.items()):
        count = max(1, tokens // length)
        for start in range(0, len(numbers), count):
            chosen = tuple(numbers[start : start + count])
            ids = torch.from_numpy(
                np.stack([canvases[number] for number in chosen]).astype(np.int64)
            )
            rows = slice(first, first + ids.numel())
            drafted = None if draft_start < 0 else draft_start
            batches.append(Batch(chosen, ids, rows, drafted, is_updated))
            first += ids.numel()
    return batches


class Layered:
    """A denoiser whose layers are loaded on demand. Only the rotary tables stay in memory."""

    def __init__(
        self,
        read: ReadTensor,
        network: NetworkSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Layers compute in ``dtype`` on ``device``, or on the CPU if ``device`` is ``None``.

        Raises UnbuiltNetworkError.
        """
        check_built(network)
        self.read, self.network, self.dtype = read, network, dtype
        self.device = device or torch.device("cpu")
        # A weak reference to the layer that was loaded last. After this layer is freed, calling the
        # reference returns None.
        self._last: Callable[[], object] = lambda: None
        self._rooms: list[Tensor] = []  # buffers for the last loaded layer's converted weights
        tables = network.rotary_tables()
        self._rotary = [
            Rotary(table, network.max_canvas_length, network.rotary_copies).to(self.device, dtype)
            for table in tables
        ]
        with torch.device("meta"):
            embedding = Embedding(network, is_plain=False)
        del embedding.weight  # ``embed`` loads only the rows that it needs
        self._embedding = self._with_parameters(embedding, "embed")

    def embed(
        self, ids: Tensor, positions: Tensor | None = None, conditioning: Tensor | None = None
    ) -> Tensor:
        """Return the input of the first layer ``[B, L, hidden]`` for token ids ``[B, L]``.

        The function loads only the table rows of these ids. ``positions`` contains the positions of
        the tokens. If ``positions`` is ``None``, the tokens are whole canvases. With
        self-conditioning, ``conditioning`` contains the soft embeddings ``[B, L, hidden]``. ``None``
        means zeros.
        """
        wanted, places = torch.unique(ids, return_inverse=True)
        rows = self.read(EMBEDDING, self.dtype, wanted)[places].to(self.device)
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=self.device).expand_as(ids)
        if conditioning is not None:
            conditioning = conditioning.to(self.device)
        counts = counted(ids.to(self.device), positions.to(self.device), self._embedding.padding)
        return self._embedding.complete(rows, counts, conditioning)

    def block(self, i: int) -> Block:
        """Load layer ``i`` with its weights.

        After the caller has freed a layer, the next layer may reuse its memory. The weights of an
        expert are loaded only when tokens are routed to this expert.
        """
        c = self.network
        with torch.device("meta"):
            block = Block(c.layers[i], c.hidden_size, is_plain=False)
        spare = self._rooms if self._last() is None else []
        self._rooms = []
        stacks = {
            name: module for name, module in block.named_modules() if isinstance(module, Stacked)
        }
        for name, module in stacks.items():
            module.read = functools.partial(self._read_expert, f"blocks.{i}.{name}.weight")
            del module.weight
        state = {
            name: self._widened(f"blocks.{i}.{name}", spare) for name, _ in block.named_parameters()
        }
        self._last = weakref.ref(block)
        return _filled(block, state)

    def _read_expert(self, parameter: str, expert: int) -> Tensor:
        return self.read(parameter, self.dtype, torch.tensor([expert]))[0].to(self.device)

    def _widened(self, parameter: str, spare: list[Tensor]) -> Tensor:
        """Load a parameter, convert it to ``dtype``, and move it to the device.

        The memory order is not changed. If possible, the function writes the converted parameter to
        a buffer in ``spare``. New memory would be slower, because the system provides it page by
        page, which takes several times as long as converting bf16.
        """
        stored = self.read(parameter, None)
        if stored.dtype == self.dtype or self.device.type != "cpu":
            return stored.to(self.device).to(self.dtype)
        fitting = (
            i
            for i, room in enumerate(spare)
            if (room.shape, room.stride()) == (stored.shape, stored.stride())
        )
        at = next(fitting, None)
        room = torch.empty_like(stored, dtype=self.dtype) if at is None else spare.pop(at)
        self._rooms.append(room)
        return room.copy_(stored)

    def positions(self, batch: Batch) -> Tensor:
        """Return the position ids of a batch of whole canvases, ``[B, L]`` (see ``Span.ids``)."""
        spans = [Span.of_canvas(self.network, canvas) for canvas in batch.ids.numpy()]
        found = np.stack([span.ids(self.network) for span in spans])
        if (start := batch.draft_start) is not None:
            length = batch.ids.shape[1]
            span = Span.of_draft(self.network, start, length, batch.is_updated)
            found[:, start:] = span.ids(self.network)
        return torch.from_numpy(found).to(self.device)

    def beside(self, i: int, batch: Batch) -> tuple[Turn | None, Tensor | None, None]:
        """Return all arguments of layer ``i`` except the hidden states of a batch.

        The arguments are the rotation and the additive attention mask. There is no cache.
        """
        positions = self.positions(batch)
        places = places_of(self.network, batch.ids.to(self.device), positions)
        turn = self._turn(i, positions, places)
        if batch.draft_start and not self.network.has_causal_drafts:
            return turn, self._drafting(i, places, batch.draft_start), None
        return turn, self._hiding(i, places, None), None

    def _drafting(self, i: int, positions: Tensor, start: int) -> Tensor:
        """Return the attention mask of a causal pass and the draft pass after it, as one mask.

        The causal pass computes the positions before ``start``, and hides all others.
        """
        attention, longest = self.network.layers[i].attention, self.network.max_canvas_length
        before = hiding(attention, positions[:, :start], 0, self.dtype, longest)
        drafted = hiding(attention, positions[:, start:], start, self.dtype, longest)
        assert before is not None
        assert drafted is not None
        length = positions.shape[1] - start
        before = F.pad(before, (0, length), value=torch.finfo(self.dtype).min)
        return torch.cat((before, drafted), 2)

    def packed(
        self,
        i: int,
        ids: Sequence[Tensor],
        positions: Sequence[np.ndarray],
        past: Sequence[Past | None],
    ) -> tuple[Turn | None, None, Packed]:
        """Return all arguments of layer ``i`` except the hidden states, for several passes.

        The hidden states of the passes are concatenated to ``[1, tokens, hidden]``. The other
        arguments have one entry per pass: ``ids`` contains the tokens ``[T]``, ``positions`` the
        position ids ``[T]``, and ``past`` the cached keys and values.
        """
        given = [torch.from_numpy(own).to(self.device).unsqueeze(0) for own in positions]
        places = [
            places_of(self.network, own.to(self.device).unsqueeze(0), there)
            for own, there in zip(ids, given, strict=True)
        ]
        passes, start = [], 0
        for there, cached in zip(places, past, strict=True):
            tokens = slice(start, start + there.shape[1])
            passes.append((tokens, self._hiding(i, there, cached), cached))
            start = tokens.stop
        return self._turn(i, torch.cat(given, 1), torch.cat(places, 1)), None, Packed(passes)

    def _turn(self, i: int, positions: Tensor, places: Tensor) -> Turn | None:
        layers = self.network.layers[i : i + 1]
        return turns_of(self.network, layers, self._rotary, positions, places)[0]

    def _hiding(self, i: int, places: Tensor, past: Past | None) -> Tensor | None:
        cached = 0 if past is None else past[0].shape[2]
        attention, longest = self.network.layers[i].attention, self.network.max_canvas_length
        return hiding(attention, places, cached, self.dtype, longest)

    def end(self) -> nn.Module:
        """Return a module for the final norm and the transform before the head, if there are any."""
        c, parts = self.network, nn.Sequential()
        with torch.device("meta"):
            if c.head.final_norm:
                norm = make_norm(c.norm_kind, c.hidden_size, c.norm_eps, is_plain=False)
                parts.append(self._with_parameters(norm, "final_norm"))
            if c.head.transform is not None:
                parts.append(self._with_parameters(Transform(c, is_plain=False), TRANSFORM))
        return parts

    def head(self) -> Head:
        """Return the head, with its weight in the stored type."""
        weight = (
            self.read(EMBEDDING, None).T
            if self.network.tied_head
            else self.read("head.weight", None)
        )
        bias = self.read("head.bias", torch.float32) if self.network.head.bias else None
        return Head(weight, self.device, bias, self.network.head.softcap)

    def _with_parameters(self, module: _Module, path: str) -> _Module:
        """Load the parameters of a small module whose parameters have no data yet."""
        state = {
            name: self.read(f"{path}.{name}", self.dtype).to(self.device)
            for name, _ in module.named_parameters()
        }
        return _filled(module, state)


def _filled(module: _Module, state: dict[str, Tensor]) -> _Module:
    module.load_state_dict(state, assign=True)
    give_back()
    return module.eval().requires_grad_(False)


class Head:
    """The head, which maps features to raw logits in fp32.

    To save memory, the head converts only a few columns of its weight matrix to fp32 at a time.
    """

    def __init__(
        self,
        weight: Tensor,
        device: torch.device,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """``weight`` is ``[hidden, V]``, and ``bias`` is fp32 ``[V]``."""
        self.weight, self.device, self.bias, self.softcap = weight, device, bias, softcap

    def __call__(self, features: Tensor) -> Tensor:
        """Map features ``[..., hidden]`` to raw logits fp32 ``[..., V]`` on the CPU."""
        wide = features.to(self.device, torch.float32)
        out = torch.empty(*features.shape[:-1], self.weight.shape[1])
        for columns, weight in self._widened():
            out[..., columns] = (wide @ weight).cpu()
        return capped(out if self.bias is None else out.add_(self.bias), self.softcap)

    def pull(self, gradients: Tensor, logits: Tensor) -> Tensor:
        """Backpropagate gradients of ``logits`` ``[..., V]``, which this head has computed.

        Returns fp32 ``[..., hidden]`` on the CPU.
        """
        if self.softcap is not None:  # the derivative of the softcap
            gradients = gradients * (1 - (logits / self.softcap).square())
        return self.mix(gradients)

    def mix(self, weights: Tensor) -> Tensor:
        """Multiply ``weights`` ``[..., V]`` by the columns of the matrix, and add them up.

        Returns fp32 ``[..., hidden]`` on the CPU.
        """
        out = torch.zeros(*weights.shape[:-1], self.weight.shape[0], device=self.device)
        for columns, weight in self._widened():
            out += weights[..., columns].to(self.device) @ weight.T
        return out.cpu()

    def soft_embedding(self, logits: Tensor, temperature: float, scale: float) -> Tensor:
        """Return what ``Denoiser.soft_embedding`` returns, for a tied head.

        ``scale`` is the network's ``embedding.scale``.
        """
        return self.mix((logits.float() / temperature).softmax(-1)) * scale

    def _widened(self) -> Iterator[tuple[slice, Tensor]]:
        # Reuse one buffer for all columns, because new memory takes longer than the conversion.
        room = None
        for start in range(0, self.weight.shape[1], HEAD_COLUMNS):
            columns = slice(start, start + HEAD_COLUMNS)
            stored = self.weight[:, columns].to(self.device)
            if stored.dtype == torch.float32:
                yield columns, stored
                continue
            if room is None:
                room = torch.empty_like(stored, dtype=torch.float32)
            yield columns, room[:, : stored.shape[1]].copy_(stored)


def named(i: int, block: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of layer ``i``. The keys are paths in the whole denoiser."""
    return {f"blocks.{i}.{name}": module for name, module in block.named_modules() if name}


class Carried:
    """The hidden states of all canvases between two layers.

    ``states`` is ``[tokens, hidden]``, in the order of ``batches``. While a layer runs, ``now`` is
    the batch that is being computed. Observers of the layer use ``now``.
    """

    now: Batch

    def __init__(
        self,
        layered: Layered,
        canvases: Sequence[np.ndarray],
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        cache_dtype: str | None = None,
        drafts: Sequence[Draft | None] | None = None,
    ) -> None:
        """Embed the canvases. ``Attention.forward`` explains ``cache_dtype``.

        ``drafts`` contains the draft pass of each canvas, if any.

        If the hidden states need more than ``memory_bytes``, the states are stored in an unnamed
        file in ``folder``. If ``memory_bytes`` is ``None``, there is no limit. Raises
        MemoryLimitError if the disk is too full.
        """
        self.layered, self.batches = layered, make_batches(canvases, drafts=drafts)
        self._cache_dtype, self._drafts = cache_dtype, drafts
        tokens = sum(batch.ids.numel() for batch in self.batches)
        self.states = room_for(
            (tokens, layered.network.hidden_size), layered.dtype, memory_bytes, folder
        )
        for batch in self.batches:
            positions = layered.positions(batch)
            conditioning = self.conditioning(batch)
            self.states[batch.rows] = (
                layered.embed(batch.ids, positions, conditioning).flatten(0, 1).cpu()
            )

    def conditioning(self, batch: Batch) -> Tensor | None:
        """Return the soft embeddings of a batch ``[B, L, hidden]``, or ``None`` if all are zeros."""
        found: Tensor | None = None
        for row, number in enumerate(batch.numbers):
            draft = None if self._drafts is None else self._drafts[number]
            if draft is None or draft.conditioning is None:
                continue
            if found is None:
                found = torch.zeros(*batch.ids.shape, self.layered.network.hidden_size)
            found[row, draft.start :] = torch.from_numpy(draft.conditioning).float()
        return found

    def read(self, batch: Batch) -> Tensor:
        """Return the hidden states ``[B, L, hidden]`` of a batch, on the device."""
        return self.states[batch.rows].view(*batch.ids.shape, -1).to(self.layered.device)

    @torch.no_grad()
    def through(self, i: int, block: Block, *, keep: bool = True) -> None:
        """Run every batch through layer ``i``. If ``keep`` is False, discard the output."""
        for batch in self.batches:
            self.now = batch
            out, _ = block(self.read(batch), *self.layered.beside(i, batch), self._cache_dtype)
            if keep:
                self.states[batch.rows] = out.flatten(0, 1).cpu()

    def through_all(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Run every batch through all layers. ``on_done`` is called after each layer."""
        for i in range(len(self.layered.network.layers)):
            block = self.layered.block(i)
            self.through(i, block)
            del block  # free the memory before the next block is read
            on_done()

    @torch.no_grad()
    def features(self, rows: Sequence[np.ndarray]) -> list[Tensor]:
        """Return the inputs of the head at the positions ``rows`` of each canvas.

        ``rows`` has the shape ``[R]``. The result has the shape ``[R, hidden]`` and is on the CPU.

        Call this method after the last layer.
        """
        end, found = self.layered.end(), [torch.empty(0)] * len(rows)
        for batch in self.batches:
            for number, states in zip(batch.numbers, self.read(batch), strict=True):
                found[number] = end(
                    states[torch.from_numpy(np.asarray(rows[number], np.int64))]
                ).cpu()
        return found


@torch.no_grad()
def soft_embeddings(
    layered: Layered,
    canvases: Sequence[np.ndarray],
    drafts: Sequence[Draft],
    temperatures: Sequence[float],
    *,
    memory_bytes: int | None = None,
    folder: Path | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Iterator[np.ndarray]:
    """Make the draft pass of every canvas, and yield the soft embeddings of its predictions.

    The result for each canvas is fp32 ``[L - start, hidden]``. The logits of each canvas are
    divided by its element of ``temperatures``. ``on_done`` is called after each layer. ``Carried``
    explains the other arguments.
    """
    carried = Carried(layered, canvases, memory_bytes=memory_bytes, folder=folder, drafts=drafts)
    carried.through_all(on_done)
    rows = [
        np.arange(draft.start, len(canvas)) for canvas, draft in zip(canvases, drafts, strict=True)
    ]
    head, scale = layered.head(), layered.network.embedding.scale
    for features, temperature in zip(carried.features(rows), temperatures, strict=True):
        yield head.soft_embedding(head(features), temperature, scale).numpy()


def room_for(
    shape: tuple[int, ...], dtype: torch.dtype, memory_bytes: int | None, folder: Path | None
) -> Tensor:
    """Allocate an array without initialising it.

    If the array needs more than ``memory_bytes``, the array is stored in an unnamed, memory-mapped
    file in ``folder``. The disk space of the file is allocated immediately, so that later writes to
    the array cannot fail. Raises MemoryLimitError if the disk is too full.
    """
    size = math.prod(shape) * dtype.itemsize
    if memory_bytes is None or size <= memory_bytes:
        return torch.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as err:
            where = folder or tempfile.gettempdir()
            raise MemoryLimitError(
                f"{where}: no room for {size:,} bytes of activations ({err.strerror}). Free disk space, use fewer samples "
                "(--calib-samples, --judged), or allow more memory (--memory)."
            ) from err
        mapped = np.memmap(file, np.uint8, "r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)
