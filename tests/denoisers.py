"""Runs torch denoisers with the native loop, through ``dlm_runtime.from_callback``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_random import philox
from dlm_export.network.loop_scores import log_odds
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, from_callback


def load(checkpoint: Path) -> Denoiser:
    """Load a checkpoint as a torch denoiser in fp32."""
    opened = Checkpoint(checkpoint)
    network = families.read_network(opened, Overrides())
    return families.load(families.open_weights(opened, network), network)


def under_native_loop(
    denoiser: Denoiser, note: Callable[[CallbackPass], None] = lambda p: None
) -> Bundle:
    """Return a bundle that runs the native loop, but lets a torch denoiser compute each pass and
    its keys and values.

    ``note`` is called with every pass.
    """
    c = denoiser.network
    (cache,) = set(c.cache_shapes())

    @torch.no_grad()
    def run(p: CallbackPass) -> None:
        note(p)
        past = None
        if p.past:
            past = [(torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for k, v in p.past]
        ids, positions = torch.from_numpy(p.input_ids)[None], torch.from_numpy(p.position_ids)[None]
        conditioning = None if p.conditioning is None else torch.from_numpy(p.conditioning)[None]
        features, present = denoiser.hidden(ids, positions, past, conditioning=conditioning)
        logits = denoiser.project(features[0, torch.from_numpy(p.score_rows)]).float()
        if p.logits is not None:
            p.logits[:] = logits.numpy()
        if p.next_conditioning is not None:
            temperature = torch.from_numpy(p.temperature)
            p.next_conditioning[:] = denoiser.soft_embedding(logits, temperature).numpy()
        logits[:, c.mask_token_id : c.mask_token_id + 1] = -torch.inf
        probs = logits.softmax(-1)
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :2]
        p.top_tokens[:] = order.int().numpy()
        p.top_probs[:] = probs.gather(1, order).numpy()
        for rank in range(2):
            p.top_log_odds[:, rank] = log_odds(logits.numpy(), order[:, rank].numpy())
        if p.entropy is not None:
            p.entropy[:] = (probs * (probs + 1e-10).log()).sum(-1).numpy()
        for (k, v), (new_k, new_v) in zip(p.present or [], present, strict=False):
            k[:], v[:] = new_k[0].numpy(), new_v[0].numpy()

    info = DenoiserInfo(
        vocab_size=c.vocab_size,
        mask_token_id=c.mask_token_id,
        max_canvas_length=c.max_canvas_length,
        eos_token_ids=c.eos_token_ids,
        layers=len(c.layers),
        kv_heads=cache[0],
        head_size=cache[1],
        shift=c.shift,
        has_cache=True,
        visible_block=c.visible_block,
        draft_block=c.draft_block,
        conditioning_size=0 if c.conditioning is None else c.hidden_size,
        expand_token_id=c.expand_token_id,
        delete_token_id=c.delete_token_id,
        shifted_drafts=c.has_shifted_drafts,
        blocks_after_prompt=c.blocks_after_prompt,
        split_token_id=c.split_token_id,
    )
    return from_callback(info, run)


class ArithmeticDenoiser:
    """A denoiser without weights.

    The denoiser predicts tokens and probabilities by hashing integers, so the results are equal on
    every machine.

    The prediction of a row depends on the row's position, the row's token and the number of masked
    positions. ``past`` is ignored. The denoiser counts its passes.
    """

    def __init__(
        self,
        vocab_size: int = 40,
        shift: int = 0,
        eos: int | None = None,
        visible_block: int | None = None,
        trained: int = 128,
    ) -> None:
        self.info = DenoiserInfo(
            vocab_size=vocab_size,
            mask_token_id=vocab_size - 1,
            max_canvas_length=512,
            eos_token_ids=() if eos is None else (eos,),
            shift=shift,
            has_cache=True,
            visible_block=visible_block,
            max_new_tokens=trained,
        )
        self.passes = 0
        self.bundle = from_callback(self.info, self._run)

    def predict(self, position: int, token: int, masked: int) -> tuple[int, float]:
        """Return the predicted token of a row and its probability, a multiple of 2**-16."""
        word = philox(0xD1F, (position, token, masked, 1))
        return word[0] % (self.info.vocab_size - 1), (word[1] >> 16) / 2**16

    def _run(self, p: CallbackPass) -> None:
        self.passes += 1
        masked = int((p.input_ids == self.info.mask_token_id).sum())
        for i, row in enumerate(p.score_rows):
            token, prob = self.predict(int(p.position_ids[row]), int(p.input_ids[row]), masked)
            p.top_tokens[i] = token, (token + 1) % (self.info.vocab_size - 1)
            p.top_probs[i] = prob, prob / 4
            if p.entropy is not None:
                p.entropy[i] = -(1 - prob)
            if p.logits is not None:  # the predicted token gets the highest logit
                p.logits[i] = (7 * np.arange(self.info.vocab_size) + token) % 16 / 8
                p.logits[i, token] = 2
