"""Defines the exception for a tokenizer or chat template that cannot be compiled."""

from __future__ import annotations


class NotCompiled(Exception):
    """Raised if a tokenizer or chat template cannot be compiled.

    The message gives the reason. The manifest records the message, and the C library shows it in
    its errors.
    """
