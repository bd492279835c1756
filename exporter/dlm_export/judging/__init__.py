"""Checks that a bundle computes correct results, and measures its loss of accuracy.

In this package, the *source* of a bundle is the checkpoint from which the bundle was built.
Each of the packages below imports only packages that come earlier in the list:

- ``report`` writes HTML pages with the results.
- ``sides`` gives all compared denoisers the same interface.
- ``parity`` checks that a bundle computes the same numbers as torch or the released code.
- ``accuracy`` measures how much accuracy quantisation costs.
- ``tuning`` fits commit thresholds and effort levels to a bundle.
- ``precision_search`` chooses number formats for ``--precision auto``.
"""
