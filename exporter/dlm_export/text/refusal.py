"""The exception for a tokenizer or chat template that cannot be compiled."""

from __future__ import annotations


class NotCompiled(Exception):
    """Raised if a tokenizer or chat template cannot be compiled.

    The message gives the reason. The message is written to the manifest, and the C library shows
    the message in its errors.
    """
