"""The checkpoints room: a folder from elsewhere in, its config, tensors and text out, checked and
never executed.

``folder`` opens config.json and the safetensors files, ``prequantised`` reads codes and scales of
those that were quantised before, ``tokenizer`` the tokenizer and the chat template. What a tensor
means to a denoiser is the business of ``families``.
"""
