"""Reads checkpoint folders: config, tensors, tokenizer and chat template.

All files are checked, and no code of a checkpoint is executed.

``folder`` opens config.json and the safetensors files. ``prequantised`` reads the codes and scales
of pre-quantised checkpoints. ``tokenizer`` reads the tokenizer and the chat template. The package
``families`` maps tensors to the parameters of a denoiser.
"""
