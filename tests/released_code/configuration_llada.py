"""The configuration class of ``modeling_llada``: LLaDA's released keys as they are."""

from transformers import PretrainedConfig


class LLaDAConfig(PretrainedConfig):
    """Every key of config.json is an attribute."""

    model_type = "llada"
