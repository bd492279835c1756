"""Runs a whole torch denoiser on calibration states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.states import Draft
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.pass_plan import Span


def features_of(
    denoiser: Denoiser, canvas: np.ndarray, rows: Tensor, draft: Draft | None = None
) -> Tensor:
    """Return the features after the final norm at R rows of a canvas ``[L]``, as ``[R, hidden]``.

    ``draft`` is a draft pass over the end of the canvas. The function then makes two passes: a
    causal pass over the positions before the block, and the draft pass, which reads the keys and
    values of the first pass. All rows must be in the block.
    """
    device = denoiser.embed.weight.device
    ids = torch.from_numpy(np.asarray(canvas, np.int64)).unsqueeze(0).to(device)
    places = Span.of_canvas(denoiser.network, np.asarray(canvas)).ids(denoiser.network)
    positions = torch.from_numpy(places).to(device).unsqueeze(0)
    if draft is None:
        return denoiser.hidden(ids, positions)[0][0, rows.to(device)]
    start, past, conditioning = draft.start, None, None
    if start:
        _, past = denoiser.hidden(ids[:, :start], positions[:, :start])
    if draft.conditioning is not None:
        conditioning = torch.from_numpy(draft.conditioning).float().unsqueeze(0).to(device)
    span = Span.of_draft(denoiser.network, start, ids.shape[1], draft.is_updated)
    drafted = torch.from_numpy(span.ids(denoiser.network)).to(device).unsqueeze(0)
    features, _ = denoiser.hidden(ids[:, start:], drafted, past, conditioning=conditioning)
    return features[0, rows.to(device) - start]
