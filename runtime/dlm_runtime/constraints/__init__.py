"""Constraints on generated text.

A constraint is a JSON Schema, a regular expression, a grammar, a list of texts, or the schema of
records in JSON Lines, CSV or XML.

The module ``compiled`` calls the native library, which compiles a constraint for a vocabulary. The
vocabulary belongs to a bundle, or the module ``vocabulary`` reads it from a tokenizer.
"""
