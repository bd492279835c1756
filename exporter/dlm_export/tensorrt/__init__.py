"""Builds TensorRT engines from a bundle's device graph, and checks what they contain.

``estimate`` computes memory before anything is built, ``builders`` finds the TensorRT that can
build for a device, ``engine`` runs it, ``audit`` reads the format of every layer, and ``bundled``
adds an engine to an existing bundle or removes it. Needs neither torch nor onnx, so a board can
build its own engine. API and limits: docs.nvidia.com/deeplearning/tensorrt (10.x, 11.x) and
docs.nvidia.com/deeplearning/tensorrt-rtx (1.x).
"""
