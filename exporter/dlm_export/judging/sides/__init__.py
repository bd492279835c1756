"""Gives all compared denoisers the same interface.

A comparison has two sides: a reference and a candidate. Each side is a bundle, a torch denoiser, or
a torch denoiser that is read layer by layer. The code that compares two sides works for every kind
of side, because all sides implement the interfaces in ``side``.
"""
