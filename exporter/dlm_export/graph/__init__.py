"""The graph room: a network description in, ONNX files out.

``trace`` makes one graph for every pass of a denoiser, of which ``repeat`` makes all layers of a
kind out of one, ``experts`` lays mixtures out, ``quantise`` replaces layers' operands, ``fuse``
puts operators of ours (``functions``) in, ``caches`` stores keys and values in fewer bytes,
``widen`` gives bf16 graphs arithmetic that a CPU has, ``cuda`` knows what ONNX Runtime runs on a
GPU, and ``write`` streams the weights behind it. Importing the room itself imports neither torch
nor onnx: what is here, a board that builds its own engine reads too.

Inputs and outputs of a graph, with ``B`` rows, ``T`` tokens of this pass, ``S`` cached tokens,
``R`` scored rows, ``K`` candidates, ``Hkv`` and ``D`` those of layer ``i``:

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            a slice of the canvas, absolute positions
``score_rows``                         int64 ``[B, R]``            rows of T to predict, gathered before the head
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached rows in any order, position-encoded; in INT8
                                                                   ``D + 2``: codes and scale
``segments``                           int64 ``[N, 4]``            several requests in one row of tokens (``functions``);
                                                                   may be left out, and is there if a kernel knows it
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   best first, the mask token excluded
``entropy``                            fp32 ``[B, R]``             sum of p ln p, the mask token's p being 0
``logits``                             fp32 ``[B, R, V]``          raw
``present_key.i``, ``present_value.i`` ``[B, Hkv, T, D]``          the T new rows
=====================================  ==========================  =================================================

ONNX operators at opset 23 (Attention, RotaryEmbedding, RMSNormalization are whole nodes there), or
in elementary ones at opset 21 for TensorRT before 10.14, whose parser does not know those three.
"""

from __future__ import annotations

OPSET = 23
PLAIN_OPSET = 21  # of graphs in elementary operators, which every TensorRT 10 parses
TOP_K = 2  # confidence needs the best candidate, margin the best two
MICROSOFT_DOMAIN = "com.microsoft"  # operators that ONNX Runtime alone has
LAYER_KEY = "dlm_export.layer"  # node metadata: the module path, e.g. blocks.3.mlp.down
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
DEVICE_FILE = "device.onnx"  # the same graph in the form that GPUs take, over the same data
SEGMENTS = "segments"  # the port of passes in which several requests share a row of tokens
PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Full precisions -> bytes of an element of parameters, activations and cache."""
CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""What a cache is stored in -> ``cache_dtype`` of the manifest."""
