"""What keeps a tokenizer or a template from being compiled."""

from __future__ import annotations


class NotCompiled(Exception):
    """The reason, as it stands in the manifest and in the C library's messages."""
