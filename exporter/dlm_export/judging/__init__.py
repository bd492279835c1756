"""Judging: a bundle and its source in, figures and a verdict out.

The folders, each imports only those above it: ``report`` (the HTML pages), ``sides`` (what is
compared), ``parity`` (same numbers as torch or the released code?), ``accuracy`` (what quantisation
costs), ``tuning`` (thresholds and effort levels), ``precision_search`` (``--precision auto``).
"""
