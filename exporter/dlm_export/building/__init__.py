"""The building room: an open source and options in, the files of a bundle with what they proved
out.

``options`` is what a caller may ask for, ``request`` what was found good of it before any work. The
stages follow, each a function of the ``Job`` and of what earlier ones gave: ``quantising`` finds a
recipe's numbers, ``writing`` puts text and graph into the folder, ``proving`` compares it with
torch and judges it. ``dlm_export.build`` runs them in order.
"""
