"""Compares the speed of a bundle with the speed of an autoregressive model on the same device.

An autoregressive model generates one token per pass. A denoiser's pass takes longer, but commits
several tokens. The denoiser is faster if it commits more tokens in a pass than the autoregressive
model generates in the same time. The denoiser's time includes the computation of the prompt. The
autoregressive model's time does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compare_with_peer(
    token_ms: float, generation: Mapping[str, Any], requests: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Compare a bundle with an autoregressive model that takes ``token_ms`` per token.

    ``generation`` and ``requests`` are results of ``bench``. If ``requests`` is not ``None``, the
    function takes the time of a pass and the number of tokens per pass from ``requests``.

    Otherwise, the function takes the time of a pass from ``generation``, and ``tokens_per_pass``
    and ``speedup`` are ``None``. The prompts of ``generation`` are random, so ``generation`` does
    not show how many tokens a pass commits.
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
    """Describe the result of ``compare_with_peer`` in one sentence."""
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
