"""Parity: checks that a bundle computes what it should.

``against_torch`` compares it with our own denoiser in torch, ``against_golden`` with logits that
``capture`` recorded from the released code.
"""
