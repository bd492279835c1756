"""Torch denoisers under the native loop, through its callback engine."""

from __future__ import annotations

from pathlib import Path

import torch

from dlm_export import families
from dlm_export.checkpoint import Checkpoint
from dlm_export.denoiser import Denoiser
from dlm_export.families.base import Overrides
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, from_callback


def load(checkpoint: Path) -> Denoiser:
    """A checkpoint as a torch denoiser in fp32."""
    opened = Checkpoint(checkpoint)
    capabilities = families.read_capabilities(opened, Overrides())
    return families.load(families.Weights(opened, capabilities), capabilities)


def under_native_loop(denoiser: Denoiser) -> Bundle:
    """A bundle whose passes torch makes, cache included: the loop is native, the network is the reference's."""
    c = denoiser.capabilities

    @torch.no_grad()
    def run(p: CallbackPass) -> None:
        past = None
        if p.past:
            past = [(torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for k, v in p.past]
        ids, positions = torch.from_numpy(p.input_ids)[None], torch.from_numpy(p.position_ids)[None]
        features, present = denoiser.hidden(ids, positions, past)
        logits = denoiser.project(features[0, torch.from_numpy(p.score_rows)]).float()
        if p.logits is not None:
            p.logits[:] = logits.numpy()
        logits[:, c.mask_token_id] = -torch.inf
        probs = logits.softmax(-1)
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :2]
        p.top_tokens[:] = order.int().numpy()
        p.top_probs[:] = probs.gather(1, order).numpy()
        if p.entropy is not None:
            p.entropy[:] = (probs * (probs + 1e-10).log()).sum(-1).numpy()
        for (k, v), (new_k, new_v) in zip(p.present or [], present, strict=False):
            k[:], v[:] = new_k[0].numpy(), new_v[0].numpy()

    info = DenoiserInfo(
        vocab_size=c.vocab_size,
        mask_token_id=c.mask_token_id,
        max_canvas_length=c.max_canvas_length,
        eos_token_ids=c.eos_token_ids,
        layers=c.layers,
        kv_heads=c.kv_heads,
        head_size=c.head_size,
        shift=c.shift,
        has_cache=True,
    )
    return from_callback(info, run)
