"""Compiles a tokenizer and a chat template into one data file for the native library, and proves it
equal.

``splits`` converts split patterns to automata, ``composition`` has tables of Unicode's canonical
composition, ``vocabulary`` reads the rest of a tokenizer.json, and ``chat`` finds the segments of a
chat template. ``proof`` compares the native library's results with those of the tokenizers library
and Jinja. ``compiled`` leaves out what is not equal, and records the reason.
"""
