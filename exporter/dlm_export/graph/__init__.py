"""Turns a network description into ONNX files.

``trace`` makes a single graph that computes all passes of a denoiser. ``repeat`` copies its layers,
``experts`` lays out the weights of mixtures of experts, ``quantise`` quantises layers, and ``fuse``
inserts calls of our operators (``functions``). ``caches`` stores keys and values in fewer bytes,
``widen`` makes bf16 graphs compute in fp32 on CPUs, ``cuda`` lists the operators that ONNX Runtime
can run on a GPU, and ``write`` writes the graph and its weights. This module does not import torch
or onnx, because boards that build their own engines also import this module.

The table lists the inputs and outputs of a graph. A pass has ``B`` canvases, ``T`` tokens, ``S``
cached tokens, ``R`` scored rows and ``K`` candidates. Layer ``i`` has ``Hkv`` key heads of size
``D``.

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            a slice of the canvas, absolute positions
``score_rows``                         int64 ``[B, R]``            rows of T to predict, gathered before the head
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached rows in any order, position-encoded; in INT8
                                                                   ``D + 2``: codes and scale
``segments``                           int64 ``[N, 4]``            requests that share a row of tokens (``functions``);
                                                                   optional, only in graphs whose kernels support it
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   best first, the mask token excluded
``entropy``                            fp32 ``[B, R]``             sum of p ln p, with p = 0 for the mask token
``logits``                             fp32 ``[B, R, V]``          raw
``present_key.i``, ``present_value.i`` ``[B, Hkv, T, D]``          the T new rows
=====================================  ==========================  =================================================

Graphs use opset 23, where Attention, RotaryEmbedding and RMSNormalization are single nodes. The
parser of TensorRT before 10.14 lacks these three operators, so graphs for these versions use
elementary operators of opset 21.
"""

from __future__ import annotations

OPSET = 23
PLAIN_OPSET = 21  # for graphs in elementary operators, which every TensorRT 10 parses
TOP_K = 2  # confidence needs the best candidate, margin the best two
MICROSOFT_DOMAIN = "com.microsoft"  # operators of ONNX Runtime only
LAYER_KEY = "dlm_export.layer"  # node metadata: the module path, e.g. blocks.3.mlp.down
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
DEVICE_FILE = "device.onnx"  # the graph in the form for GPUs, over the same data
SEGMENTS = "segments"  # input that describes requests that share a row of tokens
PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Unquantised precisions -> bytes per element of parameters, activations and cache."""
CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""Cache precision -> ``cache_dtype`` of the manifest."""
