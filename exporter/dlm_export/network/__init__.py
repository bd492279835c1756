"""Defines the denoiser: a description of the network as data, and torch modules made from it.

``spec`` contains the description, and ``denoiser`` contains the modules. ``reference`` is the
unmasking loop in plain torch, which decides the masked positions of a canvas pass by pass. Tests
compare the native loop with ``reference``. This package reads no files, and does not depend on the
names of released models.
"""
