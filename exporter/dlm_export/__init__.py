"""dlm-export: diffusion language model checkpoints to bundles that run without Python's model code."""
