"""The doctor's room: this machine, a bundle and a target in; what is there, what is missing and
what to do about it, out.

``system`` is all that is asked of the machine, ``machine`` the facts that come of it, ``board``
those of a Jetson; ``checks`` judges the facts, ``bundled`` whether a bundle or a target has what it
needs. Needs no torch, and changes nothing.
"""
