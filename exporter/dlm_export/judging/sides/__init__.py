"""Gives all compared denoisers the same interface.

A comparison has two sides: a reference and a candidate. Each side is a bundle, a torch denoiser in
memory, or a torch denoiser whose layers are loaded one at a time. The code that compares two sides
works for every kind of side, because all sides implement the interfaces in ``side``.
"""
