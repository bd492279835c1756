"""Compares a bundle with its source, and reports figures and a verdict.

Each folder imports only those listed before it: ``report`` (HTML pages), ``sides`` (the things to
compare), ``parity`` (does the bundle compute the same numbers as torch or the released code?),
``accuracy`` (what does quantisation cost?), ``tuning`` (thresholds and effort levels),
``precision_search`` (``--precision auto``).
"""
