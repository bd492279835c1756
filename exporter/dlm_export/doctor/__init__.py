"""Implements ``dlm-export doctor``, which checks if a machine has everything that dlm-export needs.

The command can also check whether a given bundle or target runs on this machine. The package
consists of these modules:

- ``system`` runs programs, reads files and loads libraries.
- ``machine`` uses ``system`` to collect facts about the machine.
- ``board`` collects facts that only a Jetson has.
- ``checks`` compares the facts with what dlm-export needs.
- ``bundled`` compares the facts with what a bundle or a target needs.
- ``report`` collects the results of these comparisons.

The doctor does not need torch, and changes nothing on the machine.
"""
