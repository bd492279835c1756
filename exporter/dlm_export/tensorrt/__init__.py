"""Builds TensorRT engines from the device graph of a bundle, and checks what the engines contain.

``estimate`` computes the memory needed before anything is built. ``builders`` finds the TensorRT
that can build for a device, and ``engine`` runs it. ``audit`` reads the format of every layer of an
engine. ``bundled`` adds an engine to an existing bundle or removes it.

This package needs neither torch nor onnx, so a board can build its own engine. NVIDIA documents the
API and its limits at docs.nvidia.com/deeplearning/tensorrt (10.x, 11.x) and
docs.nvidia.com/deeplearning/tensorrt-rtx (1.x).
"""
