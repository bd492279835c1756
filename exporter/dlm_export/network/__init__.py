"""The network room: the description of a denoiser in, the denoiser in torch out.

``denoiser`` has the description and the modules that follow from it, ``reference`` the loop in
plain torch, which what runs elsewhere is compared with. Nothing here knows a file or a released
name.
"""
