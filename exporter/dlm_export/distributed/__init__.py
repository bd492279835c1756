"""Divides the slow stages of a build or a comparison into pieces, which run as Ray tasks.

``workers`` defines the interface, and ``ray_workers`` implements it. ``record`` stores the results
of finished pieces, so that a stopped build can continue. The other modules divide one stage each.
"""
