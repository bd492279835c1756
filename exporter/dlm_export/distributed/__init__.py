"""Divides a build or a comparison of bundles into pieces, and runs the pieces as Ray tasks.

``workers`` defines the interface, and ``ray_workers`` implements it. ``record`` stores the results
of finished pieces, so that a stopped build can continue. The modules named ``in_pieces`` in
other folders divide each stage of a build into pieces.
"""
