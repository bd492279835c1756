"""Makes calibration data for diffusion language models, and defines their number formats.

This package makes partly masked canvases. A denoiser is run on these canvases for calibration and
for parity checks. The package also quantises weights and activations.
"""
