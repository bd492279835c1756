"""Chooses a number format for each layer, for ``--precision auto``.

``sensitivity`` measures how much accuracy each layer loses in each format, and ``layer_times`` how
long each layer takes. ``search`` then finds the smallest or fastest combination of formats whose
loss is within the budget.
"""
