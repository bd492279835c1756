"""Finds the numbers of a quantised graph: activation ranges, folded scales, and solved weights.

A weight is *solved* if a solver such as GPTQ has rounded the weight. A *calibration state* is a
canvas on which the layers' inputs are observed.

- ``samples`` loads text, and makes calibration states from the text.
- ``calibrate`` runs the denoiser on the states, and computes ranges, scales and weights. It uses
  ``folding``, ``gptq`` and, for mixtures of experts, ``experts``.
- ``modelopt`` finds ranges and scales with NVIDIA's library instead.

``graph.quantise`` then applies the numbers to a graph, and ``judging`` measures the loss of
accuracy.
"""
