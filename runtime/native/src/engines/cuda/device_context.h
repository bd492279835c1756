// Contexts that keep keys and values on a CUDA device, for engines whose passes read and write them
// there.
#pragma once

#include <memory>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"

namespace dlm {

// A context of the engine, which outlives it and its device; `longest` is Engine::open_context's.
// Of a pass, the keys and values lie on the device, all else in host memory; whatever the engine
// does there is done when its `run` returns.
std::unique_ptr<Context> open_device_context(HostEngine& engine, const CudaDevice& device,
                                             const CacheShape& shape, int32_t longest);

}  // namespace dlm
