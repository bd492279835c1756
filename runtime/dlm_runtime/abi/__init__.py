"""The C ABI of ``libdlm_runtime`` in ctypes, as ``dlm_runtime.h`` declares it, and nothing more."""
