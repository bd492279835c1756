"""Fits a bundle's decoding loop: the commit threshold, the effort levels and the default loop."""
