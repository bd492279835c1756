"""Tuning: fits a preset's commit threshold to a bundle, and creates effort levels from the
preset.
"""
