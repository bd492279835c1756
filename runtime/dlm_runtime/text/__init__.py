"""A bundle's tokenizer and chat template, in a separate process."""
