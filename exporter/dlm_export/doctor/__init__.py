"""Examines this machine, a bundle or a target: what is there, what is missing, and what to do about
it.

``system`` asks the machine, ``machine`` collects the facts, and ``board`` those of a Jetson.
``checks`` judges the facts, and ``bundled`` checks whether a bundle or a target can run. Needs no
torch, and changes nothing.
"""
