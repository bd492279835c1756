"""Policies: the fields of a denoising loop, which decide what commits after each pass.

Names and definitions follow the papers: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487),
Fast-dLLM (arXiv:2505.22618), SDAR (arXiv:2510.06303), entropy-bounded sampling (arXiv:2505.24857).
The native loop checks ranges and combinations; this module only names the fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from dlm_runtime.errors import RequestError

# Other names of the same scores in papers and their code.
SCORE_ALIASES = {
    "maskgit_plus": "confidence",
    "low_confidence": "confidence",
    "topk_margin": "margin",
}

# The similarity at which a name counts as misspelled. difflib's default confuses top_p and stop.
_NEAR = 0.7


@dataclass(frozen=True)
class Policy:
    """One loop. The fields are those of ``dlm_policy`` in ``dlm_runtime.h``, in the same order.

    Args:
        select: "argmax", or "sample": draw at ``temperature``.
        score: "confidence", "margin", "entropy" or "random".
        commit: "static", "threshold", "dynamic", "factor", "entropy_bound", "timestep" or "sequential".
        compare: ">=" or ">": how a score passes the threshold.
        remask: "none", or "edit": the tokens of a finished block may still change.
        cache: "none"; "prefix" or "dual" for full attention; "block" or "block-dual" for block-causal attention.
        stop: "eos": skip the blocks after one that committed eos; or "none".
        block_length: Tokens. 0: one block for the whole generation, or the network's block length if attention is
            block-causal.
        steps_per_block: Planned passes per block. 0: one per token.
        refresh: For "prefix" and "dual". 0: every block starts with a full pass. N: later blocks start with a pass over
            at least N tokens before them.
        threshold: For "threshold" and "dynamic", 0..1.
        factor: For "factor", 0 or more.
        entropy_bound: For "entropy_bound", nats, 0 or more.
        timestep_eps: For "timestep", 1e-9..1.
        temperature: For "sample", above 0; divides logits.
        seed: Of "random" and "sample", 0..2^64-1.
        store: For "block": "pass", "open" or "reuse": how a finished block is stored.
        sub_block_length: Positions of a block that are decided before the next ones. 0: all together.
        edit_passes: For "edit": the most passes over a finished block.
        edit_threshold: For "edit", 0..1: a token changes if another one's probability is above this.
        top_p: For "sample", 0..1: draw from the shortest list of likely tokens with a total probability above this.
        top_k: For "sample": draw from this many of the most likely tokens. 0: all.
        score_of: "prediction", "draw" or "marginal": the distribution that scores use.
        cfg_scale: Scale of classifier-free guidance, 0..1000. 0: none.
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

    def with_fields(self, changes: dict[str, Any], beside: Sequence[str] = ()) -> Policy:
        """Return this policy with some fields changed. Raises RequestError for an unknown field.

        If only one of ``temperature`` and ``select`` is given, the other follows: a temperature
        above 0 means "sample", and "argmax" means temperature 0. ``beside``: the caller's other
        arguments; the error message may suggest one of them.
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
        return replace(self, **changes)

    def greedy(self) -> Policy:
        """The same loop without sampling and guidance, for comparing the predictions of denoisers."""
        return self.with_fields({"temperature": 0.0, "cfg_scale": 0.0})

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, in the manifest's form."""
        return asdict(self)


TEXT_FIELDS = tuple(field.name for field in fields(Policy) if field.type == "str")
"""Fields with text values."""
