"""The denoiser: a description of the network as data, and torch modules built from that
description.

``spec`` has the description and ``denoiser`` the modules. ``reference`` is the unmasking loop in
plain torch, which the native loop is compared with. This package reads no files, and no code in it
depends on the name of a released model.
"""
