"""Compares a bundle with its source: are its results correct, and how accurate are they?

Each of these packages imports only packages that come before it in the list:

- ``report`` writes HTML pages with the results.
- ``sides`` gives every denoiser that is compared the same interface.
- ``parity`` checks that a bundle computes the same numbers as torch or the released code.
- ``accuracy`` measures how much accuracy quantisation costs.
- ``tuning`` fits commit thresholds and effort levels to a bundle.
- ``precision_search`` chooses number formats for ``--precision auto``.
"""
