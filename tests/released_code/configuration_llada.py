"""The configuration class for ``modeling_llada``. It has the released keys of LLaDA, unchanged."""

from transformers import PretrainedConfig


class LLaDAConfig(PretrainedConfig):
    """Every key of config.json is an attribute."""

    model_type = "llada"
