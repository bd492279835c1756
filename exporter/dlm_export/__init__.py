"""Exports checkpoints of diffusion language models to bundles.

A bundle runs without the model's Python code.
"""

import os

# Keep the Python package of ONNX Runtime from sending telemetry. The parity check and the roofline
# model import this package. The native runtime sets the variable too.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
