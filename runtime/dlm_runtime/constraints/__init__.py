"""Constraints on generated text: JSON Schemas, regular expressions, grammars, lists of texts, and
records of JSON Lines, CSV and XML.

``compiled`` calls the native library, which compiles a constraint for a vocabulary. This is the
vocabulary of a bundle, or a vocabulary that ``vocabulary`` reads from a tokenizer. ``automaton``
reads the arrays of a compiled constraint.
"""
