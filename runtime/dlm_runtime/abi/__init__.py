"""The C ABI of ``libdlm_runtime``, as ctypes types and functions read from ``dlm_runtime.h``."""
