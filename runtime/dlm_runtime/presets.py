"""The published loops, as presets of ``Policy``.

Sources: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487), Fast-dLLM (arXiv:2505.22618), SDAR
(arXiv:2510.06303), LLaDA2 and Fast-dLLM v2 as released. ``docs/reference/policies.md`` describes
each.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_runtime.policy import Policy

PRESETS = {
    # One token per pass in blocks of 32, surest first.
    "llada": Policy(),
    # All tokens above the threshold, and at least the surest. Keys and values outside the block are
    # reused.
    "fast-dllm": Policy(commit="threshold", threshold=0.9, cache="dual"),
    # One block for the whole generation. Each pass commits a share of the masks by the noise
    # schedule. Temperature and top_p are those of its published commands; scores use the
    # distribution that is drawn from.
    "dream": Policy(
        select="sample",
        commit="timestep",
        score="entropy",
        block_length=0,
        temperature=0.2,
        top_p=0.95,
        score_of="draw",
    ),
    # Fast-dLLM's loop for denoisers that predict the next position.
    "dream-block": Policy(commit="threshold", threshold=0.9, cache="dual"),
    # Block-causal networks with their own block length and the exact cache: all tokens above the
    # threshold, or the step's share.
    "sdar": Policy(commit="dynamic", compare=">", threshold=0.85, cache="block", block_length=0),
    "llada2": Policy(commit="dynamic", compare=">", threshold=0.95, cache="block", block_length=0),
    # Then further passes over a finished block replace tokens when another one is clearly more
    # likely.
    "llada2.1": Policy(
        commit="dynamic", compare=">", threshold=0.95, remask="edit", cache="block", block_length=0
    ),
    # Fast-dLLM v2 decides its blocks eight positions at a time.
    "fast-dllm-v2": Policy(
        commit="threshold", compare=">", cache="block", block_length=0, sub_block_length=8
    ),
}


def presets_for(visible_block: int | None, shift: int) -> dict[str, Policy]:
    """The presets that suit a denoiser. ``visible_block``: its block length, or None for full
    attention.

    For block-causal attention, a preset's ``block_length`` of 0 becomes the network's block length.
    """
    found = {
        name: policy for name, policy in PRESETS.items() if _suits(policy, visible_block, shift)
    }
    if visible_block is None:
        return found
    return {
        name: replace(policy, block_length=policy.block_length or visible_block)
        for name, policy in found.items()
    }


def _suits(policy: Policy, visible_block: int | None, shift: int) -> bool:
    """The same rules as in the native loop (``plan.cc``)."""
    if visible_block is None:
        return not policy.cache.startswith("block")
    lengths = (
        (policy.block_length or visible_block) % visible_block,
        visible_block % (policy.sub_block_length or 1),
    )
    return (
        policy.cache not in ("prefix", "dual")
        and lengths == (0, 0)
        and not (policy.remask == "edit" and shift)
    )
