"""Requests and their results: the open bundle's handle, sessions, constraints, schedulers and
infilling.
"""
