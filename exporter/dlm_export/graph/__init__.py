"""Turns a network description into ONNX files.

The modules:

- ``trace`` makes one graph that can compute every pass of a denoiser.
- ``repeat`` makes all layers of the graph from the few layers that were traced.
- ``experts`` arranges the weights of mixtures of experts in memory.
- ``quantise`` quantises layers.
- ``fuse`` replaces groups of operators with this project's operators (``functions``), for CPUs.
- ``caches`` stores keys and values in fewer bytes.
- ``widen`` makes bf16 graphs compute in fp32 on CPUs.
- ``cuda`` checks that ONNX Runtime can run all operators on a GPU.
- ``write`` writes the graph and its weights.

This file imports neither torch nor onnx. Boards that build their own engines import this file. On
such a board, torch and onnx may be missing.

The table lists the inputs and outputs of a graph. A pass computes ``B`` canvases. For each canvas,
the pass reads ``T`` tokens and ``S`` cached tokens, scores ``R`` rows, and returns the ``K`` best
tokens of each scored row. Layer ``i`` has ``Hkv`` key heads of size ``D``.

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            token ids, and their positions in the canvas
``score_rows``                         int64 ``[B, R]``            indices among the T tokens: the rows to predict
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached keys and values, in any order. Keys are rotated
                                                                   already. In INT8, a row has D codes and 2 scale bytes
``segments``                           int64 ``[N, 4]``            requests that share a row (see ``functions``).
                                                                   Optional; only if all attention is fused
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   the best tokens, best first; never the mask token
``entropy``                            fp32 ``[B, R]``             sum of p ln p, with p = 0 for the mask token
``logits``                             fp32 ``[B, R, V]``          raw logits, including the mask token's
``present_key.i``, ``present_value.i`` ``[B, Hkv, T, D]``          keys and values of the T tokens, for the cache
=====================================  ==========================  =================================================

Graphs use opset 23, in which Attention, RotaryEmbedding and RMSNormalization are single operators.
TensorRT before version 10.14 cannot parse these three operators. Graphs for such versions use
elementary operators of opset 21 instead.
"""

from __future__ import annotations

OPSET = 23
# opset for graphs that contain only elementary operators, which every TensorRT 10 can parse
PLAIN_OPSET = 21
# Best tokens per scored row. The margin is computed from the probabilities of the two best tokens.
TOP_K = 2
MICROSOFT_DOMAIN = "com.microsoft"  # domain of operators that only ONNX Runtime defines
# Node metadata stores the module path under this key, for example blocks.3.mlp.down.
LAYER_KEY = "dlm_export.layer"
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
DEVICE_FILE = "device.onnx"  # the graph for GPUs, which uses the same data file
SEGMENTS = "segments"  # graph input for passes that compute several requests in one sequence
PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""The bytes per element of parameters, activations and cache, for each precision without
quantisation.
"""
CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""For each precision of the cache, the ``cache_dtype`` in the manifest."""
