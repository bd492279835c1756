"""A side of a comparison that runs a whole torch denoiser, as the reference of tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from dlm_calibration.states import Draft
from dlm_export.judging.sides.side import DraftPass, Side
from dlm_export.network import reference as loop
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas, reserve_end, start_canvas
from dlm_export.network.states import features_of
from dlm_runtime import Policy


class TorchPredictor(Side):
    """A torch denoiser that predicts tokens, and generates text with the reference loop."""

    def __init__(self, denoiser: Denoiser, name: str) -> None:
        super().__init__(name, denoiser.network)
        self.denoiser = denoiser

    @torch.no_grad()
    def logits(
        self,
        canvas: np.ndarray,
        rows: np.ndarray | None = None,
        draft: DraftPass | None = None,
    ) -> np.ndarray:
        """Implements ``Side.logits``.

        As in a graph, the head computes only the logits of ``rows``.
        """
        if draft is not None:
            assert rows is not None
            return self._drafted(canvas, torch.from_numpy(np.asarray(rows, np.int64)), draft)
        ids = (
            torch.from_numpy(np.asarray(canvas, np.int64))
            .unsqueeze(0)
            .to(self.denoiser.embed.weight.device)
        )
        features = self.denoiser.hidden(
            ids, torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        )[0][0]
        if rows is not None:
            features = features[torch.from_numpy(np.asarray(rows, np.int64)).to(ids.device)]
        out: np.ndarray = self.denoiser.project(features).float().cpu().numpy()
        return out

    def _drafted(self, canvas: np.ndarray, rows: torch.Tensor, draft: DraftPass) -> np.ndarray:
        """Return the logits of a draft pass. With self-conditioning, it is the second of two."""
        made = Draft(draft.start, is_updated=draft.is_updated)
        if self.denoiser.network.conditioning is not None:
            block = torch.arange(draft.start, len(canvas))
            logits = self.denoiser.project(features_of(self.denoiser, canvas, block, made))
            temperature = torch.full((len(block),), draft.temperature, device=logits.device)
            soft = self.denoiser.soft_embedding(logits, temperature).float().cpu().numpy()
            made = replace(made, conditioning=soft)
        out: np.ndarray = (
            self.denoiser.project(features_of(self.denoiser, canvas, rows, made))
            .float()
            .cpu()
            .numpy()
        )
        return out

    def courses(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[list[Canvas]]:
        """See ``Side``."""
        for prompt, room in asked:
            start = start_canvas(prompt, room, self.mask_token_id)
            seen = [reserve_end(start, policy, self.eos_token_ids)]
            done = loop.fill(self.denoiser, seen[0], policy, on_step=seen.append)
            finished = Canvas(np.array(done.tokens), np.zeros(len(done.tokens), bool))
            yield [*seen[: done.nfe], finished]
