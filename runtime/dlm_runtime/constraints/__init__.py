"""Constraints on generated text: JSON Schemas, regular expressions, grammars, lists of texts, and
records of JSON Lines, CSV and XML.

The native library compiles them (``compiled``) for a bundle's vocabulary, or for one that
``vocabulary`` reads. ``automaton`` shows the arrays of the result.
"""
