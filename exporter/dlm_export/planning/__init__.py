"""Predicts or measures the time, memory and cost of a denoiser on a device.

- ``shapes`` determines the size of a denoiser from a bundle, a checkpoint, or a text such as "8B".
- ``roofline`` computes the shortest possible time of a pass.
- ``plan`` predicts the time, memory and cost of many denoisers on many devices.
- ``bench`` measures a bundle on this machine.
- ``measured`` uses the results of ``bench`` to correct predictions.

For bundles, this package needs neither torch nor onnx.
"""
