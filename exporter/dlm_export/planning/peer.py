"""Compares a bundle with an autoregressive model, to decide whether diffusion is worth it on a
device.

An autoregressive model makes one token per pass. A pass of a denoiser takes longer, but commits
several tokens. The denoiser is faster if it commits more tokens per pass than the model makes in
the time of that pass. The denoiser's passes include reading the prompt. The model's time per token
does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare_with_peer(
    token_ms: float, generation: Mapping[str, Any], requests: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Compare with an autoregressive model that takes ``token_ms`` per token.

    ``generation`` and ``requests`` are results of ``bench``. The time of a pass is taken from the
    requests, or from the generation if there are no requests. The generation has made-up tokens,
    which do not show how many tokens a pass commits. Without requests, ``tokens_per_pass`` and
    ``speedup`` are therefore ``None``.
    """
    measured = generation if requests is None else requests
    break_even = measured["ms_per_pass"] / token_ms
    tokens_per_pass = None if requests is None else requests["tokens_per_pass"]
    return {
        "token_ms": token_ms,
        "ms_per_pass": measured["ms_per_pass"],
        "break_even_tokens_per_pass": break_even,
        "data": None if requests is None else requests["data"],
        "tokens_per_pass": tokens_per_pass,
        "speedup": None if tokens_per_pass is None else tokens_per_pass / break_even,
    }


def verdict(peer: Mapping[str, Any]) -> str:
    """The result of ``compare_with_peer`` in words."""
    condition = (
        f"faster than an autoregressive model of {peer['token_ms']:.4g} ms a token from "
        f"{peer['break_even_tokens_per_pass']:.2f} tokens a pass on"
    )
    if peer["speedup"] is None:
        return (
            f"Diffusion is {condition}. Give --data to measure how many tokens a pass your "
            "prompts give."
        )
    found = (
        f"{peer['data']} gave {peer['tokens_per_pass']:.2f}, {peer['speedup']:.2f} times as fast"
    )
    if peer["speedup"] > 1:
        return f"Diffusion pays on this device: it is {condition}, and {found}."
    return f"Diffusion does not pay on this device: it is {condition}, but {found}."
