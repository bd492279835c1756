"""Constraints on generated text: JSON Schemas, regular expressions and lists of texts.

The native library compiles them (``compiled``) for a bundle's vocabulary, or for one that
``vocabulary`` reads. ``automaton`` shows the arrays of the result.
"""
