"""Accuracy: measures what a quantised bundle loses, until all accuracy budgets are decided."""
