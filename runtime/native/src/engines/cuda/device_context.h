// Contexts that keep keys and values on a CUDA device.
#pragma once

#include <memory>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// A context of the engine, which outlives it; `longest` is Engine::open_context's. Keys and values
// of a pass lie on the device, all else in host memory. The engine's `run` returns when all is
// done.
std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest);

}  // namespace dlm
