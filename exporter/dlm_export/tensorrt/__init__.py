"""Builds TensorRT engines from the device graph of a bundle, and checks what the engines contain.

- ``estimate`` computes the memory that a build and its engine need.
- ``builders`` finds an installed TensorRT that can build for a device.
- ``engine`` builds an engine with the TensorRT that was found.
- ``audit`` finds the number format of every layer of an engine.
- ``bundled`` adds an engine to an existing bundle, or removes an engine from a bundle.

This package needs neither torch nor onnx, so it also runs on a board that builds its own engine.
NVIDIA documents the API and its limits at docs.nvidia.com/deeplearning/tensorrt (10.x, 11.x) and
docs.nvidia.com/deeplearning/tensorrt-rtx (1.x).
"""
