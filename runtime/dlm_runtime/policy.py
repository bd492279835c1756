"""Defines policies, which are the settings of a denoising loop.

A policy determines, for example, which tokens are committed after each pass.

Names and definitions follow the papers: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487),
Fast-dLLM (arXiv:2505.22618), SDAR (arXiv:2510.06303), entropy-bounded sampling (arXiv:2505.24857).
The native loop checks the ranges and combinations of values. This module only names the fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from dlm_runtime.errors import RequestError

# Maps a score's name in a paper or in the paper's code to the score's name in a policy.
SCORE_ALIASES = {
    "maskgit_plus": "confidence",
    "low_confidence": "confidence",
    "topk_margin": "margin",
}

# If a caller passes an unknown name, the error message suggests a known name whose similarity to
# the unknown name is at least this value. With the lower default of difflib, top_p would be
# suggested for stop.
_NEAR = 0.7


@dataclass(frozen=True)
class Policy:
    """The policy of one denoising loop.

    A policy has the same fields as ``dlm_policy`` in ``dlm_runtime.h``, in the same order.

    Args:
        select: How the token of a position is chosen. "argmax" chooses the most likely token.
            "sample" chooses a random token with ``temperature``.
        score: How positions are ranked: "confidence", "margin", "entropy" or "random".
        commit: The rule that decides how many positions are committed after a pass: "static",
            "threshold", "dynamic", "factor", "entropy_bound", "timestep", "sequential", "verify" or
            "entropy_threshold".
        compare: How a score is compared with the threshold: ">=" or ">".
        remask: "none": committed tokens do not change. "edit": passes may also replace committed
            tokens of their block, and extra passes run over a finished block. "noise": a block
            starts from random tokens, and each pass predicts all its positions again.
        cache: "none"; for full attention, also "prefix" or "dual"; for block-causal attention, also
            "block" or "block-dual".
        stop: "eos": the blocks after a block with an end token are not filled. "early-eos": the rest
            of this block is not filled either. "none": all blocks are filled.
        block_length: Number of tokens in a block. 0 means the block length of the network if
            attention is block-causal, otherwise one block for the whole generation.
        steps_per_block: Planned number of passes per block. 0 means one pass per token.
        refresh: For the caches "prefix" and "dual". 0: every block starts with a full pass. N: only
            the first block starts with a full pass. Later blocks start with a pass that begins at
            least N tokens before the block.
        threshold: For the rules "threshold" and "dynamic": the value with which scores are
            compared, 0..1.
        factor: For the rule "factor", 0 or more. The position with the r-th highest score is
            committed if its score is at least 1 - factor / (r + 1), and if the positions with
            higher scores are committed.
        entropy_bound: For the rule "entropy_bound": in nats, 0 or more. A pass commits positions,
            the highest score first, until the sum of their entropies is above this bound. For the
            rule "entropy_threshold": the largest entropy with which a position is committed.
        timestep_eps: For the rule "timestep": the last timestep of the schedule, 1e-9..1.
        temperature: For "sample", above 0. Logits are divided by this value.
        seed: Seed of the random numbers for "random" and "sample", 0..2^64-1.
        store: How the cache "block" stores a finished block: "pass", "open" or "reuse".
        sub_block_length: Number of positions in a sub-block. The sub-blocks of a block are filled
            one after the other. 0 means that a block is not divided.
        edit_passes: For "edit", the largest number of extra passes over a finished block.
        edit_threshold: For "edit", 0..1. A committed token is replaced if a pass proposes another
            token whose probability is above this value.
        top_p: For "sample", 0..1. The token is chosen from the smallest set of most likely tokens
            whose total probability is above this value.
        top_k: For "sample". The token is chosen from this number of most likely tokens. 0 means all
            tokens.
        score_of: The distribution from which scores are computed: "prediction", "draw" or
            "marginal".
        cfg_scale: The strength of classifier-free guidance, 0..1000. 0 means no guidance.
        schedule: For the rules "static", "dynamic" and "sequential": how many positions each
            planned pass commits: "masked", "block" or "floor".
        reserve: "end": the last position holds an end token from the start. "none": the last
            position is generated.
        reuse_prompt: For the caches "prefix" and "dual", with ``refresh`` above 0. 1: a request
            uses the keys and values of an earlier request if its prompt starts with the same tokens.
            This is an approximation. 0: the whole prompt is computed.
        temperature_drop: For "noise" and "sample", 0 or more: by how much the temperature falls
            over the planned passes of a block.
        stable_entropy: For "noise" and the score "entropy": in nats, 0 or more. A block ends early
            if the mean entropy of its positions is below this value, and if its most likely tokens
            are stable. 0 means that all planned passes run.
        stable_passes: For ``stable_entropy``: the most likely tokens of a block are stable if they
            did not change in this many passes before.
        cache_delay: For ``next_block`` below 1 and the cache "prefix": the number of passes after
            which the keys and values of a decided block are stored.
        refresh_interval: For ``next_block`` below 1 and the cache "prefix": the number of passes
            after which all stored keys and values are computed again. 0 means never.
    """

    select: str = "argmax"
    score: str = "confidence"
    commit: str = "static"
    compare: str = ">="
    remask: str = "none"
    cache: str = "none"
    stop: str = "eos"
    block_length: int = 32
    steps_per_block: int = 0
    refresh: int = 0
    threshold: float = 0.9
    factor: float = 1.0
    entropy_bound: float = 0.1
    timestep_eps: float = 1e-3
    temperature: float = 0.0
    seed: int = 0
    store: str = "pass"
    sub_block_length: int = 0
    edit_passes: int = 16
    edit_threshold: float = 0.9
    top_p: float = 1.0
    top_k: int = 0
    score_of: str = "prediction"
    cfg_scale: float = 0.0
    schedule: str = "masked"
    reserve: str = "none"
    reuse_prompt: int = 0
    next_block: float = 1.0
    temperature_drop: float = 0.0
    stable_entropy: float = 0.0
    stable_passes: int = 1
    cache_delay: int = 0
    refresh_interval: int = 0

    def with_fields(self, changes: dict[str, Any], beside: Sequence[str] = ()) -> Policy:
        """Return this policy with some fields changed. Raises RequestError for an unknown field.

        ``temperature`` and ``select`` depend on each other. If only ``temperature`` is changed, a
        value above 0 sets ``select`` to "sample". If only ``select`` is changed to "argmax",
        ``temperature`` becomes 0. If ``temperature`` changes but not ``temperature_drop``, the drop
        changes by the same factor. ``beside`` contains the names of the caller's other arguments.
        The error message for an unknown field may suggest one of these names.
        """
        known = [field.name for field in fields(self)]
        unknown = next((name for name in changes if name not in known), None)
        if unknown is not None:
            near = difflib.get_close_matches(str(unknown), [*beside, *known], 1, _NEAR)
            meant = f"did you mean {near[0]}? Known are" if near else "one of"
            kind = "argument" if beside else "policy field"
            raise RequestError(
                f"unknown {kind} {unknown!r}: {meant} {', '.join([*beside, *known])}"
            )
        changes = dict(changes)
        if isinstance(changes.get("score"), str):
            changes["score"] = SCORE_ALIASES.get(changes["score"], changes["score"])
        if "temperature" in changes and "select" not in changes:
            temperature = changes["temperature"]
            changes["select"] = (
                "argmax" if isinstance(temperature, Real) and temperature == 0 else "sample"
            )
        elif changes.get("select") == "argmax" and "temperature" not in changes:
            changes["temperature"] = 0.0
        if "temperature_drop" not in changes:
            if changes.get("select") == "argmax":
                changes["temperature_drop"] = 0.0
            elif self.temperature_drop and isinstance(changes.get("temperature"), Real):
                changes["temperature_drop"] = (
                    self.temperature_drop * float(changes["temperature"]) / self.temperature
                )
        return replace(self, **changes)

    def greedy(self) -> Policy:
        """Return this policy without sampling and guidance, to compare denoisers."""
        return self.with_fields({"temperature": 0.0, "cfg_scale": 0.0})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and their values, as the manifest stores them."""
        return asdict(self)


TEXT_FIELDS = tuple(field.name for field in fields(Policy) if field.type == "str")
"""The names of the fields whose values are strings."""
