"""dlm-export: exports checkpoints of diffusion language models to bundles. Bundles run without the
models' Python code.
"""

import os

# This variable keeps the Python package of ONNX Runtime from sending telemetry. The parity check
# and the roofline model import ONNX Runtime's Python package. The native runtime sets the variable
# too.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
