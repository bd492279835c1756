"""Requests and their results: the bundle's handle, sessions, constraints, schedulers, infilling."""
