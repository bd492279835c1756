"""Makes calibration data for diffusion language models, and defines their number formats.

This package makes partly masked canvases. Calibration and parity checks run a denoiser on these
canvases. The package also quantises weights and activations.
"""
