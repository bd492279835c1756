"""Constraints on generated text: JSON Schemas and regular expressions, compiled for a vocabulary.

``schema`` writes a JSON Schema as a regular expression, with ``document``, ``conjunction``,
``validity``, ``layout`` and ``patterns``. ``byte_automaton`` compiles an expression, ``automaton``
extends it to the tokens of a ``vocabulary``, and ``compiled`` caches the result.
"""
