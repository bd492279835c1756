"""Exports checkpoints of diffusion language models to bundles.

A bundle runs without the model's Python code.
"""

import os

# Keep the Python package onnxruntime from sending telemetry. The parity check and the roofline
# model import onnxruntime. The native runtime sets the same variable.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
