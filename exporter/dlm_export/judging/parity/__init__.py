"""Checks parity, which means that a bundle computes the same numbers as its checkpoint.

- ``against_torch`` compares an unquantised bundle with dlm-export's own denoiser in torch.
- ``by_layer`` compares each layer of a quantised bundle with torch.
- ``capture`` runs the code that was released with the checkpoint, and records the logits.
- ``against_golden`` compares a bundle with the logits that ``capture`` recorded.
"""
