"""Compares a bundle with its source, and reports figures and a verdict.

Each folder imports only folders that are listed before it:

- ``report`` writes the HTML pages.
- ``sides`` has the things that are compared, such as a bundle or a denoiser in torch.
- ``parity`` checks that a bundle computes the same numbers as torch or the released code.
- ``accuracy`` measures what quantisation costs.
- ``tuning`` fits commit thresholds and effort levels.
- ``precision_search`` chooses formats for ``--precision auto``.
"""
