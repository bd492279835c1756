"""Fits the decoding loop to a bundle: commit threshold, effort levels and default loop."""
