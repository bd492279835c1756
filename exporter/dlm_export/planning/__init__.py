"""Predicts or measures the time, memory and cost of a denoiser on a device.

- ``shapes`` describes the size of a denoiser. The user names a bundle, a checkpoint or a parameter
  count such as "8B".
- ``roofline`` computes the shortest possible time of a pass.
- ``predicted_passes`` lists the passes that a generation will make.
- ``plan`` predicts the time, memory and cost of many denoisers on many devices.
- ``bench`` measures a bundle on this machine.
- ``prefix`` measures requests that start with the same tokens.
- ``measured`` uses results of ``bench`` to correct predictions.

This package needs neither torch nor onnx if the denoiser is a bundle.
"""
