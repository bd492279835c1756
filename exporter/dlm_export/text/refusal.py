"""The error for a tokenizer or template that cannot be compiled."""

from __future__ import annotations


class NotCompiled(Exception):
    """The reason, as shown in the manifest and in the C library's messages."""
