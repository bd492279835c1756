"""Compares a torch denoiser that does not fit into memory.

The denoiser's layers are loaded one at a time, and each layer processes all canvases before the
next layer is loaded. All canvases must therefore be known in advance. Memory contains one layer,
the hidden states of all canvases, and the head in its stored type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.states import Draft
from dlm_export import families
from dlm_export.judging.sides.side import DraftPass, Side, View, rows_of
from dlm_export.network import lockstep
from dlm_export.network.layered import Carried, Layered, soft_embeddings
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.sources import Source
from dlm_export.workplace import Workplace
from dlm_runtime import Policy


class SweptPredictor(Side):
    """Implements ``Side`` with torch."""

    def __init__(
        self,
        layered: Layered,
        name: str,
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Hidden states that do not fit into ``memory_bytes`` are stored in a file in ``folder``."""
        super().__init__(name, layered.network)
        self.layered = layered
        self._memory_bytes, self._folder = memory_bytes, folder
        self._project = layered.head()
        self._features: dict[ViewKey, Tensor] = {}

    def see(self, views: Sequence[View]) -> None:
        """Implements ``Side.see``. Raises MemoryLimitError."""
        wanted = {}
        for canvas, positions, draft in views:
            rows = rows_of(self, positions, is_draft=draft is not None)
            wanted[view_key(canvas, rows, draft)] = View(canvas, rows, draft)
        carried = Carried(
            self.layered,
            [view.canvas for view in wanted.values()],
            memory_bytes=self._memory_bytes,
            folder=self._folder,
            drafts=self._drafts(list(wanted.values())),
        )
        carried.through_all()
        found = carried.features([view.positions for view in wanted.values()])
        self._features = dict(zip(wanted, found, strict=True))

    def courses(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[list[Canvas]]:
        """Implements ``Side.courses``. Raises MemoryLimitError."""
        starts = [start_canvas(prompt, room, self.mask_token_id) for prompt, room in asked]
        for course in lockstep.courses(self.layered, starts, policy, self._memory_bytes):
            yield course.canvases

    def _drafts(self, views: Sequence[View]) -> list[Draft | None]:
        """Return the draft pass of each view that has a ``draft``.

        With self-conditioning, the result is the second draft pass. The function makes the first
        draft passes, whose predictions the second passes read.
        """
        first = [(number, view.draft) for number, view in enumerate(views) if view.draft]
        found: list[Draft | None] = [None] * len(views)
        if self.layered.network.conditioning is None:
            for number, draft in first:
                found[number] = Draft(draft.start, is_updated=draft.is_updated)
            return found
        if not first:
            return found
        read = soft_embeddings(
            self.layered,
            [views[number].canvas for number, _ in first],
            [Draft(draft.start) for _, draft in first],
            [draft.temperature for _, draft in first],
            memory_bytes=self._memory_bytes,
            folder=self._folder,
        )
        for (number, draft), soft in zip(first, read, strict=True):
            found[number] = Draft(draft.start, soft)
        return found

    def logits(
        self, canvas: np.ndarray, rows: np.ndarray, draft: DraftPass | None = None
    ) -> np.ndarray:
        """Implements ``Side.logits``. The canvas and rows must have been passed to ``see``."""
        return self._logits(self._features[view_key(canvas, rows, draft)])

    @torch.no_grad()
    def _logits(self, features: Tensor) -> np.ndarray:
        found: np.ndarray = self._project(features).numpy()
        return found


def shown_source(
    source: Source, name: str, dtype: torch.dtype, workplace: Workplace | None
) -> SweptPredictor:
    """Prepare the denoiser of ``source`` so that torch can load it layer by layer."""
    place = workplace or Workplace()
    layered = families.layered(source.parameters, source.network, dtype, place.device)
    return SweptPredictor(layered, name, memory_bytes=place.activation_bytes, folder=place.folder)


ViewKey: TypeAlias = tuple[bytes, bytes, DraftPass | None]


def view_key(canvas: np.ndarray, rows: np.ndarray, draft: DraftPass | None = None) -> ViewKey:
    """Return a dictionary key for a canvas and the rows that are computed on this canvas."""
    ids, chosen = (np.asarray(each, np.int64).tobytes() for each in (canvas, rows))
    return ids, chosen, draft
