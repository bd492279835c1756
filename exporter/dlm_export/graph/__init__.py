"""Turns a network description into ONNX files.

The modules:

- ``trace`` makes a single graph that computes every pass of a denoiser.
- ``repeat`` copies the traced layers to all layers.
- ``experts`` lays out the weights of mixtures of experts.
- ``quantise`` quantises layers.
- ``fuse`` replaces groups of operators with our own operators (``functions``), for CPUs.
- ``caches`` stores keys and values in fewer bytes.
- ``widen`` makes bf16 graphs compute in fp32 on CPUs.
- ``cuda`` checks that ONNX Runtime can run all operators on a GPU.
- ``write`` writes the graph and its weights.

The package itself imports neither torch nor onnx. Boards that build their own engines import it
too, and they may lack both.

The table lists the inputs and outputs of a graph. A pass has ``B`` canvases, ``T`` tokens, ``S``
cached tokens, ``R`` scored rows and ``K`` candidates. Layer ``i`` has ``Hkv`` key heads of size
``D``.

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            a slice of the canvas, absolute positions
``score_rows``                         int64 ``[B, R]``            rows of T to predict, gathered before the head
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached rows in any order, rotated by position. In INT8
                                                                   a row is ``D + 2`` long: codes and scale
``segments``                           int64 ``[N, 4]``            requests that share a row of tokens (``functions``).
                                                                   Optional; only if all attention is fused
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   best candidate first, without the mask token
``entropy``                            fp32 ``[B, R]``             sum of p ln p, with p = 0 for the mask token
``logits``                             fp32 ``[B, R, V]``          logits, with that of the mask token
``present_key.i``, ``present_value.i`` ``[B, Hkv, T, D]``          rows of the T tokens, for the cache
=====================================  ==========================  =================================================

Graphs use opset 23, in which Attention, RotaryEmbedding and RMSNormalization are single operators.
The parser of TensorRT before 10.14 does not know these three operators. Graphs for such versions
use elementary operators of opset 21 instead.
"""

from __future__ import annotations

OPSET = 23
# opset for graphs in elementary operators, which the parser of every TensorRT 10 accepts
PLAIN_OPSET = 21
# candidates per row: the confidence is computed from the best one, the margin from the best two
TOP_K = 2
MICROSOFT_DOMAIN = "com.microsoft"  # domain of operators that only ONNX Runtime has
# key of node metadata; its value is the module path, such as blocks.3.mlp.down
LAYER_KEY = "dlm_export.layer"
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
DEVICE_FILE = "device.onnx"  # the graph for GPUs; it uses the same data file
SEGMENTS = "segments"  # graph input that says which requests share a row of tokens
PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes per element of parameters, activations and cache, for each unquantised precision."""
CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""The manifest's ``cache_dtype`` for each precision of the cache."""
