"""Compiles a tokenizer and a chat template into one data file for the native library.

- ``vocabulary`` reads tokenizer.json.
- ``word_pieces`` reads the WordPiece models of tokenizer.json.
- ``splits`` converts the split patterns of tokenizer.json to automata.
- ``composition`` contains tables of Unicode's canonical composition.
- ``chat_segments`` finds the texts that a chat template writes around messages.
- ``proof`` compares the native library's results with those of the tokenizers library and Jinja.
- ``compiled`` leaves out the parts whose results differ, and records the reason.
"""
