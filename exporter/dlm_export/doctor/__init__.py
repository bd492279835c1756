"""``dlm-export doctor``: reports what a machine has, what is missing, and what to do about it.

It can also check whether a bundle or a target runs on this machine. The modules:

- ``system`` runs programs, reads files and loads libraries.
- ``machine`` and ``board`` collect facts with it; ``board`` collects those of a Jetson.
- ``checks`` judges the machine, and ``bundled`` judges a bundle or a target.
- ``report`` puts the findings together.

The doctor does not need torch, and changes nothing on the machine.
"""
