"""The C ABI of ``libdlm_runtime`` in ctypes, exactly as ``dlm_runtime.h`` declares it."""
