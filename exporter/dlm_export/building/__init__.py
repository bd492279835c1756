"""The stages of a build, which make a bundle from an open source and check it.

``options`` has the options of a build. ``request`` checks them before any work, and makes a ``Job``
of the options and the source. Each stage is a function of the ``Job`` and of the results of earlier
stages: ``quantising`` finds the numbers that a recipe needs, ``writing`` writes the text files and
the graph, and ``proving`` compares the bundle with torch and judges it. ``dlm_export.build`` runs
the stages in order.
"""
