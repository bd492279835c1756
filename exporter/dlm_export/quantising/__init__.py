"""Finds the numbers of a quantised graph: ranges, folded scales and solved weights.

``samples`` loads text and creates calibration states from it. ``calibrate`` runs the states and
computes the ``numbers``, with ``folding``, ``gptq`` and, for mixtures, ``experts``. ``modelopt``
can find ranges and scales with NVIDIA's library instead. ``graph.quantise`` applies the numbers;
``judging`` measures what they cost.
"""
