"""Measures how much accuracy a quantised bundle loses, and checks the loss against budgets."""
