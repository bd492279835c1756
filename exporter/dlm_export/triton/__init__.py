"""Writes model repositories for Triton Inference Server.

- ``repository`` writes a model of a repository: its configuration, its bundle and its code.
- ``model`` is the code of a model for Triton's Python backend. It is copied to the repository, and
  runs only inside Triton.

The code of the C++ backend is in ``runtime/native/src/triton``. Both backends use the same tensors
and parameters, which docs/guides/triton.md describes.
"""
