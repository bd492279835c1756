"""Turns a network description into ONNX files.

The modules:

- ``trace`` makes one graph that can compute every pass of a denoiser.
- ``repeat`` makes all layers of the graph from the few layers that were traced.
- ``experts`` replaces mixtures of experts, and defines how a file stores the experts' weights.
- ``quantise`` quantises the layers of a graph.
- ``fuse`` replaces groups of operators with this project's operators (``operators``), for CPUs.
- ``cache_dtypes`` defines the types in which the cache stores keys and values.
- ``widen`` changes bf16 graphs so that CPUs compute them in fp32.
- ``row_choice`` lets a pass on a GPU choose cached rows, and compute several requests at once.
- ``cuda`` checks that ONNX Runtime can run all operators of a graph on a GPU.
- ``write`` writes the graph and its weights.

This file imports neither torch nor onnx. A board that builds its own engine imports this file, and
may not have torch or onnx.

The table lists the inputs and outputs of a graph. A pass computes ``B`` canvases. For each canvas,
the inputs of the pass are ``T`` new tokens and the keys and values of ``S`` cached tokens. The pass
computes logits for ``R`` of the ``T`` tokens (the scored rows), and returns the ``K`` most likely
tokens of each scored row. Layer ``i`` has ``Hkv`` key heads of size ``D``. ``V`` is the vocabulary
size. A layer with a window (``NetworkSpec.cache_windows``) reads only the last ``W`` of the cached
tokens, in the order of their positions.

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            token ids, and their positions in the canvas
``score_rows``                         int64 ``[B, R]``            indices among the T tokens: the rows to predict
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached keys and values, in any order. Keys are rotated
                                                                   already. In INT8, a row has D codes and 2 scale bytes
``segments``                           int64 ``[N, 4]``            requests in one sequence (see ``operators``).
                                                                   Optional; only if all attention is fused
``window_segments``                    int64 ``[N, 4]``            like ``segments``, for layers with a window
``cached_rows``                        int64 ``[C]``               the rows among S that the pass reads; only in
                                                                   ``device.onnx`` (see ``row_choice``)
``cached_requests``                    int64 ``[C]``               the request of each of these rows; -1: of none
``token_requests``                     int64 ``[T]``               the request of each token, from 0 on
``window_rows``, ``window_requests``   int64 ``[D]``               like ``cached_rows`` and ``cached_requests``, for layers
                                                                   with a window
``window_distances``                   int64 ``[D]``               how far each of these rows is before its request's
                                                                   first new token
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   the most likely tokens, in order; never the mask token
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
# opset of graphs that every TensorRT 10 can parse, because all their operators are elementary
PLAIN_OPSET = 21
# Number of tokens that a graph returns per scored row. The decoding loop needs two, because the
# score "margin" is the difference between the probabilities of the two most likely tokens.
TOP_K = 2
MICROSOFT_DOMAIN = "com.microsoft"  # domain of operators that only ONNX Runtime defines
TRT_DOMAIN = "trt"  # domain of operators that only TensorRT's parser defines
MOE_LAYER = "TRT_MoE"  # the operator for TensorRT's MoE layer
# Node metadata stores the module path under this key, for example blocks.3.mlp.down.
LAYER_KEY = "dlm_export.layer"
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
# File name of the graph for GPUs, which uses the data file of the CPU graph.
DEVICE_FILE = "device.onnx"
# Name of the graph input that lets a pass compute several requests in one sequence, and of the
# same input for layers with a window.
SEGMENTS, WINDOW_SEGMENTS = "segments", "window_segments"
# Names of the graph inputs that choose cached rows on a GPU.
CACHED_ROWS, CACHED_REQUESTS, TOKEN_REQUESTS = "cached_rows", "cached_requests", "token_requests"
WINDOW_ROWS, WINDOW_REQUESTS = "window_rows", "window_requests"
WINDOW_DISTANCES = "window_distances"
PRECISIONS = {"fp32": 4, "fp16": 2, "bf16": 2}
"""The bytes per element of parameters, activations and cache, for each precision without
quantisation.
"""
