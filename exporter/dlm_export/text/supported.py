"""Finds out what a chat template supports, by rendering short conversations with it."""

from __future__ import annotations

import itertools
from typing import Any

from dlm_runtime.errors import RequestError
from dlm_runtime.text.tokenizer import Tokenizer

_ORDERS = (("user",), ("system", "user"), ("user", "assistant", "user"))
_NAME = "dlm_export_tool"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Turns the lights on.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string", "description": "The room."}},
            "required": ["room"],
        },
    },
}


def chat_failure(tokenizer: Tokenizer) -> str | None:
    """Return why the chat template renders no conversation, or ``None`` if it renders one."""
    reason = None
    for order, is_text in itertools.product(_ORDERS, (True, False)):
        try:
            found = {tokenizer.render(_said(order, word, is_text)) for word in ("hello", "other")}
        except RequestError as err:
            reason = reason or f"rejects every conversation ({err.__cause__})"
        else:
            if len(found) > 1:
                return None
            reason = reason or "does not write the messages into the prompt"
    return reason


def _said(order: tuple[str, ...], word: str, is_text: bool) -> list[dict[str, Any]]:
    content = word if is_text else [{"type": "text", "text": word}]
    return [{"role": role, "content": content} for role in order]


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Return True if the chat template writes tools into the prompt."""
    for order in _ORDERS:
        try:
            text = tokenizer.render(_said(order, "hello", True), [_TOOL])
        except RequestError:
            continue
        if _NAME in text:
            return True
    return False
