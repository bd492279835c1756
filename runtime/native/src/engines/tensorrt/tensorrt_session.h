// What a session of the TensorRT engine has on the device, and the passes that it runs there.
#pragma once

#include <memory>

#include "engines/tensorrt/tensorrt_engine.h"

namespace dlm::trt {

// Allocates everything that passes need. Throws Error(DLM_ENGINE_FAILED), Error(DLM_OUT_OF_MEMORY).
std::unique_ptr<Context> open_session(TensorRt& engine);

}  // namespace dlm::trt
