"""The text room: a tokenizer and a chat template in, one file of data that the native library reads
out, proved equal.

``splits`` makes automata of split patterns, ``composition`` tables of Unicode's canonical
composition, ``vocabulary`` what a tokenizer.json says beside them, ``chat`` the segments of a chat
template. ``proof`` compares what the native library makes of them with what the tokenizers library
and Jinja make, and ``compiled`` leaves out what is not equal, with the reason.
"""
