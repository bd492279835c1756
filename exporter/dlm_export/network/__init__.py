"""The denoiser: its description as data, and the torch modules built from that description.

``spec`` holds the description, ``denoiser`` the modules, and ``reference`` the unmasking loop in
plain torch that the native loop is compared with. This package reads no files and knows no released
model by name.
"""
