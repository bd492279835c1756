"""Tuning of a preset to one bundle: its commit threshold, and the effort levels made from it."""
