"""Implements the stages of a build, which turn an opened source into a checked bundle.

``options`` defines the options of a build. ``request`` checks the options before any work starts,
and stores the options and the source in a ``Job``. Each stage is a function whose arguments are the
``Job`` and the results of earlier stages. ``dlm_export.build`` runs the stages in this order:

- ``quantising`` computes the ranges, scales and rounded weights that a recipe needs.
- ``writing`` writes the text files and the graph.
- ``proving`` compares the bundle with torch, and measures the accuracy lost by quantisation.
"""
