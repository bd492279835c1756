"""Runs pieces of a build's or a comparison's work as Ray tasks.

``workers`` defines the interface, and ``ray_workers`` implements it. ``record`` stores the results
of finished pieces, so that a stopped build can continue. The modules ``in_pieces`` in other folders
divide the stages.
"""
