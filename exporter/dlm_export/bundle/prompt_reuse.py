"""Computes how requests share the keys and values of equal leading tokens, and the memory cost.

A scheduler reuses the keys and values of whole pages. A page is a fixed number of tokens. The
native files ``cache/arena.h`` and ``decode/prefix_reuse.h`` follow the same rules.
docs/guides/reusing-prompts.md explains these rules to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlm_export.bundle.manifest import network_of
from dlm_export.network.pass_plan import block_length_of
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.policy import Policy

LEAST_PAGE_TOKENS = 16
FULL_ATTENTION = (
    "its attention is full, so the keys and values of a token depend on all tokens of the canvas"
)


SEEN_PROMPT = (
    "the tokens of its prompt see each other, so their keys and values depend on the whole prompt"
)


def page_tokens(visible_block: int | None) -> int:
    """Return the tokens per page: the smallest multiple of the block length that is at least 16."""
    return whole_pages(LEAST_PAGE_TOKENS, visible_block or LEAST_PAGE_TOKENS)


def whole_pages(tokens: int, page: int) -> int:
    """Round a number of tokens up to whole pages of ``page`` tokens."""
    return -(-tokens // page) * page


def reused_tokens(common: int, prompt_tokens: int, network: NetworkSpec, policy: Policy) -> int:
    """Return the number of a prompt's leading tokens whose keys and values a scheduler reuses.

    ``common`` is the number of leading tokens for which an earlier request stored keys and values.
    The block in which the prompt ends is always computed. With ``shift`` 1, the last token before
    this block is computed too, because its logits predict the first token of the block. A network
    with draft passes may reuse the whole prompt, except the last token if it predicts a token. With
    ``blocks_after_prompt``, nothing is reused.
    """
    assert network.visible_block is not None
    if network.blocks_after_prompt:
        return 0
    block_length, shift = block_length_of(policy, network.visible_block), network.shift
    if network.draft_block is not None:
        block_length, shift = 1, int(policy.remask != "noise")
    page = page_tokens(network.visible_block)
    last = prompt_tokens - prompt_tokens % block_length - shift
    return max(0, min(common, last)) // page * page


@dataclass(frozen=True)
class PromptReuse:
    """Describes how requests of a bundle share the keys and values of equal leading tokens.

    - ``refusal``: the reason why requests share nothing, or ``None`` if requests can share keys and
      values on a CPU.
    - ``page_tokens``: number of tokens in a page.
    - ``bytes_per_token``: number of bytes that the keys and values of a token take.
    - ``tokens_per_gib``: number of tokens whose keys and values fit into 1 GiB, in whole pages.
    """

    refusal: str | None
    page_tokens: int
    bytes_per_token: int
    tokens_per_gib: int


def prompt_reuse_of(manifest: Mapping[str, Any]) -> PromptReuse:
    """Describe the reuse of prompts for a bundle. ``manifest`` must be valid."""
    loop = manifest["loop"]
    visible_block, graph = loop.get("visible_block"), loop["graph"]
    refusal = None
    if visible_block is None:
        refusal = FULL_ATTENTION
    elif loop.get("blocks_after_prompt"):
        refusal = SEEN_PROMPT
    elif not graph["ports"].keys() & {"segments", "cached_rows"}:
        refusal = "its graph cannot compute several requests in one pass"
    page = page_tokens(visible_block)
    row = network_of(manifest).cache_bytes(*CACHE_ROWS[graph["cache_dtype"]])
    return PromptReuse(refusal, page, row, (1 << 30) // (row * page) * page)
