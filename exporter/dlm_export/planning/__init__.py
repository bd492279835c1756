"""Predicts or measures the time, memory and cost of a denoiser on a device.

- ``shapes`` determines a denoiser's size from a bundle, a checkpoint, or a text such as "8B".
- ``roofline`` computes the shortest possible time for a pass.
- ``generation`` predicts the passes of a generation.
- ``plan`` predicts the time, memory and cost of many denoisers on many devices.
- ``bench`` measures a bundle on this machine.
- ``prefix`` measures requests that start with the same tokens.
- ``measured`` uses results of ``bench`` to correct predictions.

This package needs neither torch nor onnx if the denoiser is a bundle.
"""
