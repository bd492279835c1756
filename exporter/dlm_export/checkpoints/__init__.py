"""Reads checkpoint folders: their config, tensors and text. Everything is checked, and no code is
executed.

``folder`` opens config.json and the safetensors files. ``prequantised`` reads the codes and scales
of pre-quantised checkpoints. ``tokenizer`` reads the tokenizer and the chat template. What a tensor
means to a denoiser is decided in ``families``.
"""
