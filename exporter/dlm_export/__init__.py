"""dlm-export: exports checkpoints of diffusion language models to bundles, which run without
Python's model code.
"""

import os

# ONNX Runtime's package, which parity and the roofline import, starts its telemetry on import
# unless this is set. The native runtime sets it for the library that it loads.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
