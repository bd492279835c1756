"""Accuracy: what a quantised bundle loses against its source, measured until the stated budgets are
decided.
"""
