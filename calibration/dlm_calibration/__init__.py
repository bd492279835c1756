"""Calibration data and number formats: masked canvases to run a denoiser on, for parity and
calibration, and the quantisation of weights and activations.
"""
