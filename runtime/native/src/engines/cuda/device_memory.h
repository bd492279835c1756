// Memory of a CUDA device for the keys and values of requests that share passes.
#pragma once

#include <memory>

#include "cache/row_memory.h"
#include "engines/cuda/cuda_api.h"

namespace dlm {

// The device must outlive the returned object. Copies use a separate stream.
std::unique_ptr<RowMemory> make_device_memory(const CudaDevice& device);

}  // namespace dlm
