"""Sides of a comparison: a bundle, a torch denoiser, or a torch denoiser read layer by layer.

All have the same methods.
"""
