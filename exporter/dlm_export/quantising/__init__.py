"""The quantising room: an open source, a recipe and samples in; ranges, folded scales and solved
weights out.

``samples`` chooses the text and makes the denoiser's states of it, ``calibrate`` runs them and
finds the ``numbers``, with ``folding``, ``gptq`` and, for the experts of mixtures, ``experts``;
``modelopt`` lets NVIDIA's library find them instead. What a graph makes of the numbers is
``graph.quantise``, what they cost is for ``judging``.
"""
