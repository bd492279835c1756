"""Implements the stages of a build, which turn an opened checkpoint or bundle into a new bundle.

``options`` defines the options of a build. ``request`` checks the options before any work starts.
It creates a ``Job``, which contains the options and the opened checkpoint or bundle. Each stage is
a function whose arguments are the ``Job`` and the results of earlier stages. ``dlm_export.build``
runs the stages in this order:

- ``quantising`` quantises the weights. A recipe says which format each layer gets.
- ``writing`` writes the files of the tokenizer, and the graph.
- ``proving`` compares the bundle with torch, and measures the accuracy lost by quantisation.
"""
