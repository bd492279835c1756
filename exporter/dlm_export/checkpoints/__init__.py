"""Reads checkpoint folders: config, tensors and text, checked and never executed.

``folder`` opens config.json and the safetensors files, ``prequantised`` reads codes and scales of
pre-quantised checkpoints, and ``tokenizer`` the tokenizer and the chat template. ``families``
decides what a tensor means to a denoiser.
"""
