"""Requests and their results: handles, sessions, constraints, schedulers and infilling."""
