"""Predicts or measures the time, memory and cost of a denoiser on a device.

``shapes`` reads sizes from a bundle, a checkpoint or a size such as 8B. ``roofline`` computes the
least time of a pass, and ``plan`` makes tables for many devices. ``bench`` measures a bundle on
this machine, and ``measured`` calibrates predictions with the result. Bundles need neither torch
nor onnx.
"""
