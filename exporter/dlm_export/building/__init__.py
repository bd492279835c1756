"""Builds a bundle from an open source and options, and proves that it is right.

``options`` has the options of a build; ``request`` checks it before any work. The stages are
functions of the ``Job`` and of earlier results: ``quantising`` finds a recipe's numbers,
``writing`` writes text and graph, and ``proving`` compares the bundle with torch and judges it.
``dlm_export.build`` runs them in order.
"""
