"""Calibration data and number formats for diffusion language models.

This package makes the partly masked canvases that a denoiser is run on for calibration and for
parity checks. It also quantises weights and activations.
"""
