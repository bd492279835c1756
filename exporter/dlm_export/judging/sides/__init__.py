"""The two sides of a comparison: a bundle, a denoiser in torch, or one in torch that is read layer
by layer. All of them have the same methods.
"""
