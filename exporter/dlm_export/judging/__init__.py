"""The judging room: a bundle and what it was built from in, figures with a verdict out.

``parity`` is what a comparison sees, its tolerances and its verdict: ``verify`` proves it with our
denoiser in torch, ``golden`` with logits that ``capture`` kept from the released code.
``predictors`` gives the two sides of any other comparison one face: ``judge`` compares what they
predict, commit and write, ``accuracy`` runs that on bundles and sources against budgets,
``threshold`` fits the commit threshold again, and ``auto`` searches the recipe that keeps a budget.
``report`` and ``figures`` show what was found.
"""
