"""Implements ``/v1/edit/completions``, which rewrites a region of a file, as in Mercury's API.

The user's message has three sections: snippets that the user viewed, the current file, and the
user's last edits as diffs. The section of the current file contains the cursor, and tags around the
region to edit. This module converts the message to a canvas: first the snippets, the edits and the
old region, and then the current file, in which mask tokens replace the region. The denoiser fills
the region. It can attend to the old region, and to the text before and after the new region.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from dlm_runtime import RequestError
from dlm_serve.errors import ApiError, of_runtime, unsupported
from dlm_serve.field_arguments import Ask, hole, message, tokenizer_of
from dlm_serve.fields import ChatSampling, Items, Message
from dlm_serve.hosting import Model

CURSOR = "<|cursor|>"
FENCE = "```"
"""The line that Mercury's API writes before and after the region in an answer."""
SPARE_TOKENS = 16
"""The canvas has room for a new region that is longer than the old region by at least this number
of tokens.
"""


class EditMessage(Message):
    role: Literal["system", "developer", "user"]


class EditBody(ChatSampling):
    """The body of ``/v1/edit/completions``. A system message may precede the user's message."""

    messages: Annotated[Items[EditMessage], Field(min_length=1, max_length=2)]


def edit(body: EditBody, model: Model) -> Ask:
    """Read a request for an edit. Raises ApiError."""
    *others, last = body.messages
    if last.role != "user" or any(each.role == "user" for each in others):
        raise unsupported("messages", "give one message of the user, after the system message")
    system = [message(each, "messages[0]").get("content", "") for each in others]
    before, region, after = _read(message(last, "messages").get("content", ""))
    try:
        length = len(tokenizer_of(model).encode_plain(region))
    except RequestError as err:
        raise of_runtime(err, "messages") from err
    length += length // 2 + SPARE_TOKENS
    before = "\n\n".join([*system, before])
    ask = hole(body, model, before, after, min(length, body.length or length))
    ask.fence = FENCE
    return ask


def _read(content: str) -> tuple[str, str, str]:
    """Return three texts: the canvas text before the region, the old region, and the text after it."""
    head, file, tail = _split(content, "current_file_content")
    above, given, below = _split(file, "code_to_edit")
    if given.count(CURSOR) != 1:
        raise _wrong(f"{CURSOR} must occur once between <|code_to_edit|> and <|/code_to_edit|>")
    others = "\n\n".join(text for each in (head, tail) if (text := each.strip()))
    before = (
        f"{others}\n\n<|code_to_edit|>{given}<|/code_to_edit|>\n\n<|current_file_content|>{above}"
    )
    # The line breaks next to the tags belong to the lines of the tags, not to the region.
    region = re.sub(r"\A\r?\n|\r?\n\Z", "", given.replace(CURSOR, ""))
    return before, region, f"{below}<|/current_file_content|>"


def _split(text: str, name: str) -> tuple[str, str, str]:
    """Return the texts around and in a section. Raises ApiError unless it occurs once."""
    found = re.split(re.escape(f"<|{name}|>") + "|" + re.escape(f"<|/{name}|>"), text)
    is_whole = len(found) == 3 and text.startswith(f"<|{name}|>", len(found[0]))
    if not is_whole or not text.endswith(f"<|/{name}|>{found[2]}"):
        raise _wrong(f"<|{name}|> and <|/{name}|> must occur once, in this order")
    return found[0], found[1], found[2]


def _wrong(said: str) -> ApiError:
    return ApiError(400, f"messages: {said}", "messages", "invalid_value")
