"""The exception for a tokenizer or chat template that cannot be compiled."""

from __future__ import annotations


class NotCompiled(Exception):
    """Raised if a tokenizer or chat template cannot be compiled.

    The message is the reason, which the manifest and the messages of the C library show.
    """
