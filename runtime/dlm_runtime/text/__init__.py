"""A bundle's tokenizer and chat template, in a process of their own."""
