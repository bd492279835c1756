"""Parity: checks that an unquantised bundle, or each layer of a quantised one, computes correctly.

- ``against_torch`` compares a bundle with our own denoiser in torch.
- ``by_layer`` does so layer by layer.
- ``against_golden`` compares a bundle with logits that ``capture`` recorded from the released code.
"""
