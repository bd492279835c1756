"""Finds the numbers that a quantised graph needs: ranges, folded scales, and solved weights.

A solved weight is one that a solver such as GPTQ has rounded. ``samples`` loads text and makes
calibration states from it. ``calibrate`` runs the states and computes the ``numbers``. It uses
``folding``, ``gptq`` and, for mixtures, ``experts``. Instead, ``modelopt`` can find ranges and
scales with NVIDIA's library. The numbers are applied by ``graph.quantise``, and ``judging``
measures what they cost.
"""
