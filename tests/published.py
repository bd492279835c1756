"""Random networks and prompts.

``make_published_loops.py`` runs published decoding loops on the random networks and records the
results. ``test_published_loops.py`` runs this project's loops and compares the results.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from networks import make_network
from test_visibility import seeing

from dlm_export.network.denoiser import Denoiser

MASK, END, VOCABULARY = 99, 7, 100
REWRITING = {"delete_token_id": 3, "split_token_id": 5}
"""The fields of networks for the loop of LLaDA2.2."""


def random_network(
    block: int,
    shift: int,
    seed: int,
    *,
    visibility: str = "block",
    has_masks_last: bool = False,
    **fields: Any,
) -> Denoiser:
    """Return a random network with block-causal attention, or with full attention if ``block`` is
    0. With ``has_masks_last``, the attention has the visibility ``masks-last`` instead. ``fields``
    contains other fields of ``NetworkSpec``.

    The weights come from numpy's legacy generator, which gives the same numbers in every numpy
    version.
    """
    tokens = {"vocab_size": VOCABULARY, "mask_token_id": MASK, "eos_token_ids": (END,)}
    network = make_network(
        layers=2, heads=4, kv_heads=2, head_size=8, shift=shift, **tokens | fields
    )
    if block:
        network = seeing(network, [(visibility, block)] * 2)
    if has_masks_last:
        network = seeing(network, [("masks-last", None)] * 2)
    denoiser = Denoiser(network).eval().requires_grad_(False)
    numbers = np.random.RandomState(seed)
    for name, parameter in sorted(denoiser.named_parameters()):
        parameter.fill_(1.0)  # the weights of norms
        if parameter.ndim == 2:
            std = 1.0 if name == "embed.weight" else 2 / math.sqrt(parameter.shape[0])
            values = numbers.standard_normal(tuple(parameter.shape)) * std
            parameter.copy_(torch.from_numpy(values))
    return denoiser


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of random tokens, without the mask token and the end token."""
    found: list[int] = np.random.RandomState(1000 + seed).randint(8, MASK, length).tolist()
    return found
