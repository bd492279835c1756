"""The sides of a comparison: a bundle, a torch denoiser, or a torch denoiser read layer by layer.

A comparison has two sides, a reference and a candidate. All kinds of sides share the interfaces in
``side``, so the code that compares does not need to know the kind.
"""
