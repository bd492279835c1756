"""Gives all compared denoisers the same interface.

A comparison has two sides: a reference and a candidate. Each side is a bundle, or a torch denoiser
whose layers are loaded one at a time. The code that compares two sides works for both kinds,
because all sides implement the interface ``side.Side``.
"""
