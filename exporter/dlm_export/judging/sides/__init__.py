"""Gives every denoiser that is compared the same interface.

A comparison has two sides: a reference and a candidate. Each side is a bundle, a torch denoiser, or
a torch denoiser that is read layer by layer. They all have the interfaces in ``side``. So the code
that compares two sides works for every kind of side.
"""
