"""Presets: policies that describe the denoising loops of published papers and released code.

Sources: LLaDA (arXiv:2502.09992), Dream (arXiv:2508.15487), Fast-dLLM (arXiv:2505.22618), SDAR
(arXiv:2510.06303), d3LLM (arXiv:2601.07568), SDLM (arXiv:2509.24007), D2F (arXiv:2508.09192), and
the released code of RND1, LLaDA2, Fast-dLLM v2, Stable-DiffCoder, Nemotron-Labs-Diffusion,
DiffusionGemma and DreamOn. ``docs/reference/policies.md`` describes each preset.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_runtime.policy import Policy

_BLOCKS = Policy(
    commit="dynamic",
    schedule="block",
    compare=">",
    threshold=0.95,
    cache="block",
    block_length=0,
    score_of="draw",
)

_D3LLM = Policy(commit="entropy_threshold", score="entropy", entropy_bound=0.5, next_block=0.1)

PRESETS = {
    "llada": Policy(),
    "fast-dllm": Policy(commit="threshold", threshold=0.9, cache="dual"),
    # temperature and top_p are from the authors' published commands.
    "dream": Policy(
        select="sample",
        commit="timestep",
        score="entropy",
        block_length=0,
        temperature=0.2,
        top_p=0.95,
        score_of="draw",
    ),
    # The loop of Fast-dLLM, for denoisers whose row i predicts position i + 1.
    "dream-block": Policy(commit="threshold", threshold=0.9, cache="dual", score_of="draw"),
    "d3llm": _D3LLM,
    # In the code for Dream, only the first unfinished block must commit a token.
    "d3llm-dream": _D3LLM.with_fields({"compare": ">"}),
    # The released code plans 256 passes by default.
    "rnd1": Policy(
        score="entropy",
        schedule="floor",
        block_length=0,
        steps_per_block=256,
        reserve="end",
        score_of="draw",
    ),
    "sdar": _BLOCKS.with_fields({"threshold": 0.85}),
    "llada2": _BLOCKS,
    "llada2.1": _BLOCKS.with_fields({"remask": "edit"}),
    # The values are the defaults of SGLang's loop.
    "llada2.2": _BLOCKS.with_fields({"remask": "rewrite", "threshold": 0.5, "edit_threshold": 0.0}),
    "fast-dllm-v2": Policy(
        commit="threshold",
        compare=">",
        cache="block",
        block_length=0,
        sub_block_length=8,
        score_of="draw",
    ),
    # The authors' command sets no threshold. It commits one token per pass, as with "static".
    "stable-diffcoder": Policy(commit="threshold", threshold=0.95, cache="block", block_length=0),
    # The released code has no defaults. 16 is the window size of another loop in this code.
    "wedlm": Policy(commit="threshold", cache="block", block_length=16),
    "self-speculation": Policy(commit="verify", cache="block", block_length=0),
    # Generates the same text as "self-speculation", but one token per pass.
    "autoregressive": Policy(commit="verify", cache="block", block_length=1),
    "nemotron-diffusion": Policy(
        commit="threshold", cache="block", block_length=0, stop="early-eos"
    ),
    "sdlm": Policy(
        commit="longest_prefix", compare=">", cache="block", block_length=0, score_of="draw"
    ),
    "d2f": Policy(
        commit="threshold",
        compare=">",
        cache="block",
        block_length=0,
        next_block=0.1,
        force_next=0.95,
        score_of="draw",
    ),
    "diffusion-gemma": Policy(
        select="sample",
        commit="entropy_bound",
        score="entropy",
        score_of="draw",
        remask="noise",
        cache="block",
        block_length=0,
        steps_per_block=48,
        temperature=0.8,
        temperature_drop=0.4,
        stable_entropy=0.005,
    ),
    # temperature and top_p are from the authors' published commands.
    "dreamon": Policy(
        select="sample",
        score="entropy",
        stop="none",
        block_length=0,
        temperature=0.2,
        top_p=0.9,
        score_of="draw",
    ),
}

_OF_DRAFTS = [
    PRESETS[name] for name in ("self-speculation", "autoregressive", "nemotron-diffusion")
]
"""The presets for networks with draft passes."""
_OWN = ("dreamon", "sdlm", "d2f", "llada2.2")
"""The presets that are the only preset of their networks."""


def presets_for(
    visible_block: int | None,
    shift: int,
    draft_block: int | None = None,
    noise: str = "absorbing",
    own: str | None = None,
) -> dict[str, Policy]:
    """Return the presets that a denoiser supports.

    ``visible_block`` is the block length of the denoiser's attention, or None if attention is full.
    For block-causal attention, a ``block_length`` of 0 in a preset is replaced by the block length
    of the network. ``draft_block`` is the number of tokens of a draft pass, or None if the denoiser
    has no draft passes. ``noise`` is "absorbing" for denoisers with a mask token, and "uniform" for
    denoisers that start from random tokens. ``own`` is the name of the denoiser's only preset, if
    there is just one for its kind of network.
    """
    found = {
        name: policy
        for name, policy in PRESETS.items()
        if (name == own if own else _suits(policy, visible_block, shift, draft_block, noise))
    }
    if visible_block is None:
        return found
    return {
        name: replace(policy, block_length=policy.block_length or draft_block or visible_block)
        for name, policy in found.items()
    }


def _suits(
    policy: Policy, visible_block: int | None, shift: int, draft_block: int | None, noise: str
) -> bool:
    """Return True if a denoiser supports the policy.

    In the native library, ``pass_plan.cc`` checks the same rules.
    """
    if draft_block is not None and shift:  # an autoregressive network with draft passes
        return policy.commit == "verify"
    if (policy.remask == "noise") != (noise == "uniform"):
        return False
    if any(policy == PRESETS[name] for name in _OWN):
        return False
    if policy == PRESETS["wedlm"] and (visible_block, draft_block) != (1, None):
        return False
    if draft_block is not None:
        length = policy.block_length or draft_block
        is_divisible = length % (policy.sub_block_length or 1) == 0
        return policy.cache == "block" and policy.remask != "edit" and is_divisible
    if policy in _OF_DRAFTS:
        return False
    if visible_block is None:
        is_cached = policy.next_block < 1 and policy.cache != "none"
        return not policy.cache.startswith("block") and not (is_cached and shift)
    if policy.next_block < 1:
        return False
    lengths = (
        (policy.block_length or visible_block) % visible_block,
        visible_block % (policy.sub_block_length or 1),
    )
    return (
        policy.cache not in ("prefix", "dual")
        and lengths == (0, 0)
        and not (policy.remask == "edit" and shift)
    )
