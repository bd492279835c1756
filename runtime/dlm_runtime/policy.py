"""Defines policies, which are the settings of a denoising loop.

A policy determines, for example, which tokens are committed after each pass.

Names and definitions follow the papers: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487),
Fast-dLLM (arXiv:2505.22618), SDAR (arXiv:2510.06303), entropy-bounded sampling (arXiv:2505.24857).
The native loop checks the ranges and combinations of values. This module only names the fields.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from dlm_runtime.abi.native import HEADER
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
    ``help(Policy)`` shows the comment of each field in that file, and docs/reference/policies.md
    explains how the fields work together.
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
    finish_threshold: float = 1.0
    force_next: float = 1.0

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


Policy.__doc__ = f"{Policy.__doc__}\n    Args:\n" + "\n".join(
    textwrap.fill(
        f"{name}: {said}", 100, initial_indent="        ", subsequent_indent="            "
    )
    for name, said in HEADER.policy_comments.items()
)

TEXT_FIELDS = tuple(field.name for field in fields(Policy) if field.type == "str")
"""The names of the fields whose values are strings."""
