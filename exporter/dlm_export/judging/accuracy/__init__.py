"""Accuracy: measures what a quantised bundle loses against its source, and checks budgets."""
