"""The denoiser: a description of the network as data, and torch modules built from that
description.

``spec`` contains the description, and ``denoiser`` contains the modules. ``reference`` is the
unmasking loop in plain torch. The native loop is tested against ``reference``. This package reads
no files, and does not depend on the names of released models.
"""
