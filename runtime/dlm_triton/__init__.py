"""Writes model repositories for Triton Inference Server.

``repository`` writes a model of a repository: its configuration, its bundle and its libraries. The
code of the backend is in the folder ``backend``.
"""
