"""Makes calibration data for diffusion language models, and quantises their weights and
activations.

The calibration data are partly masked canvases. Calibration and comparisons with torch run a
denoiser on these canvases. The package also defines the number formats.
"""
