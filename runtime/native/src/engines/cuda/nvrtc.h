// Compiles the kernel of engines/cuda/draw_kernel.h with NVRTC, NVIDIA's compiler library, which is
// loaded at run time. pip's package onnxruntime-gpu[cuda] installs it.
#pragma once

#include <cstdint>
#include <string>

namespace dlm {

// The name of the compiled kernel.
constexpr char kDrawKernel[] = "dlm_draw";

// Returns the code of the kernel for a compute capability; 89 means 8.9. Loads the library that
// $DLM_NVRTC names. If the variable is not set, searches for libnvrtc.so.13 and libnvrtc.so.12.
// Throws an Error with status DLM_ENGINE_MISSING if the library is missing or cannot compile the
// kernel.
std::string compile_draw_kernel(int32_t sm);

}  // namespace dlm
