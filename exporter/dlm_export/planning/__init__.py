"""Predicts or measures the time, memory and cost of a denoiser on a device.

``shapes`` reads sizes from a bundle, from a checkpoint, or from a text such as 8B. ``roofline``
computes the shortest possible time of a pass, and ``plan`` makes tables for many devices. ``bench``
measures a bundle on this machine, and ``measured`` uses the measurements to correct predictions.
For bundles, this package needs neither torch nor onnx.
"""
