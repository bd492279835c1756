"""What a denoising loop commits after each pass, as data, and the published loops as presets of it.

The names and definitions are those of the papers: LLaDA (arXiv:2502.09992), Dream
(arXiv:2508.15487), Fast-dLLM (arXiv:2505.22618), SDAR (arXiv:2510.06303), entropy-bounded sampling
(arXiv:2505.24857). The native loop checks ranges and combinations; this module only names the
fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from dlm_runtime.errors import RequestError

# Names that papers and their code use for the same score.
SCORE_ALIASES = {
    "maskgit_plus": "confidence",
    "low_confidence": "confidence",
    "topk_margin": "margin",
}

# likeness from which a name is taken for another's misspelling; difflib's default takes top_p for
# stop
_NEAR = 0.7


@dataclass(frozen=True)
class Policy:
    """One loop, its fields in the order of the C struct. ``steps_per_block`` 0 plans one pass a
    token; ``block_length`` 0 makes the generation one block, or takes a block-causal network's own;
    ``refresh`` 0 starts every block with a full pass, as published; ``sub_block_length`` 0 decides
    a block as a whole.
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
        """This policy with some fields changed. Raises RequestError for a field that is not one of
        a policy's.

        ``temperature`` and ``select`` follow each other where only one is given: above 0 is a draw,
        and argmax has none. ``beside`` are the arguments that the caller takes beside these fields:
        a message may mean one of them.
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
        """The same loop without draws and guidance, for those who compare what denoisers predict."""
        return self.with_fields({"temperature": 0.0, "cfg_scale": 0.0})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the manifest holds them."""
        return asdict(self)


TEXT_FIELDS = tuple(field.name for field in fields(Policy) if field.type == "str")
"""Fields whose values are names."""
