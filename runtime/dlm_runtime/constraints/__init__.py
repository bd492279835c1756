"""Constraints on generated text: JSON Schemas, regular expressions, grammars, lists of texts, and
records of JSON Lines, CSV and XML.

``compiled`` calls the native library, which compiles a constraint for a vocabulary. The vocabulary
belongs to a bundle, or the module ``vocabulary`` reads it from a tokenizer. ``automaton`` reads the
arrays of a compiled constraint.
"""
