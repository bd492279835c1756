"""What a text may be: JSON Schema and regular expressions, compiled for a vocabulary into what the native loop keeps to.

``schema`` (with ``document``, ``conjunction``, ``validity`` and ``layout``) and ``patterns`` write expressions, ``byte_automaton`` makes automata of them, ``automaton`` brings these over the
tokens of a ``vocabulary``; ``compiled`` keeps what was made. Nothing of this is imported before a constraint is asked for.
"""
