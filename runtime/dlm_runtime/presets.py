"""The published loops, as presets of ``Policy``.

Sources: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487), Fast-dLLM (arXiv:2505.22618), SDAR
(arXiv:2510.06303), LLaDA2 and Fast-dLLM v2 as released. ``docs/reference/policies.md`` describes
each.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_runtime.policy import Policy

PRESETS = {
    # One token a pass in blocks of 32, surest first.
    "llada": Policy(),
    # Everything that is sure enough, and at least the surest; keys and values outside the block are
    # reused.
    "fast-dllm": Policy(commit="threshold", threshold=0.9, cache="dual"),
    # The whole generation as one block, a share of the masks each pass that follows the noise
    # schedule. At the temperature and the cut of its published commands; scores are of the
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
    # Block-causal networks, in blocks of their own length over the exact cache: all that are sure
    # enough, or the step's share.
    "sdar": Policy(commit="dynamic", compare=">", threshold=0.85, cache="block", block_length=0),
    "llada2": Policy(commit="dynamic", compare=">", threshold=0.95, cache="block", block_length=0),
    # Then a finished block is looked at again, and tokens change that another one has surely
    # outdone.
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
