"""``/v1/edit/completions``: Mercury's message with a region to edit becomes an infill of the region.

The message has the sections of Mercury's API: snippets that the user viewed, the content of a file
with the region and the cursor, and the user's last edits as diffs. On the canvas the file comes
last, with mask tokens in place of the region. All other sections come before it, then the region as
it is now. So the denoiser sees the old text of the region, and the text around its new one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from dlm_export.serving.conversation import Ask, hole, message
from dlm_export.serving.errors import ApiError
from dlm_export.serving.fields import Count, Message, Sampling
from dlm_export.serving.hosting import Model
from dlm_export.serving.replies import Answer, Head, usage

CURSOR = "<|cursor|>"
FENCE = "```"
"""Encloses the region in an answer, as in Mercury's."""
SPARE_TOKENS = 16
"""Tokens by which a new region may always be longer than the old one."""
WHERE = "messages[0].content"


class UserMessage(Message):
    role: Literal["user"]


class EditBody(Sampling):
    """The body of ``/v1/edit/completions``."""

    messages: Annotated[list[UserMessage], Field(min_length=1, max_length=1)]
    max_completion_tokens: Count | None = None
    stream: Literal[False] | None = None


def edit(body: EditBody, model: Model) -> Ask:
    """Read a request for an edit. Raises ApiError."""
    content = message(body.messages[0], "messages[0]").get("content", "")
    before, region, after = _read(content)
    most = body.max_completion_tokens or body.max_tokens
    tokenizer = model.bundle.tokenizer
    length = 0 if tokenizer is None else len(tokenizer.encode_plain(region))
    length += length // 2 + SPARE_TOKENS
    return hole(body, model, before, after, length if most is None else min(length, most))


def _read(content: str) -> tuple[str, str, str]:
    """The text of the canvas before the region, the region, and the text after it."""
    head, file, tail = _split(content, "current_file_content")
    above, given, below = _split(file, "code_to_edit")
    if given.count(CURSOR) != 1:
        raise _wrong(f"{CURSOR} must occur once between <|code_to_edit|> and <|/code_to_edit|>")
    others = "\n\n".join(text for each in (head, tail) if (text := each.strip()))
    before = (
        f"{others}\n\n<|code_to_edit|>{given}<|/code_to_edit|>\n\n<|current_file_content|>{above}"
    )
    # The line breaks beside the tags belong to the tags' lines, not to the region.
    region = re.sub(r"\A\r?\n|\r?\n\Z", "", given.replace(CURSOR, ""))
    return before, region, f"{below}<|/current_file_content|>"


def _split(text: str, name: str) -> tuple[str, str, str]:
    """The text before a section, in it, and after it. Raises ApiError."""
    found = re.split(re.escape(f"<|{name}|>") + "|" + re.escape(f"<|/{name}|>"), text)
    is_whole = len(found) == 3 and text.startswith(f"<|{name}|>", len(found[0]))
    if not is_whole or not text.endswith(f"<|/{name}|>{found[2]}"):
        raise _wrong(f"<|{name}|> and <|/{name}|> must occur once, in this order")
    return found[0], found[1], found[2]


def _wrong(said: str) -> ApiError:
    return ApiError(400, f"{WHERE}: {said}", WHERE, "invalid_value")


class Edits:
    """The form of answers: messages with the new text of the region between two fences."""

    def __init__(self, body: EditBody) -> None:
        self._head = Head("editcmpl", "edit.completion", body.model)

    def whole(self, ask: Ask, _: Model, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the response."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": f"{FENCE}\n{each.text}\n{FENCE}"},
                "finish_reason": each.finish,
            }
            for index, each in enumerate(answers)
        ]
        return self._head.around(choices=choices, usage=usage(answers, ask))
