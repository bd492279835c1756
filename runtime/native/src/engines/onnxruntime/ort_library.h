// Loads libonnxruntime at run time. So the same build works with the libonnxruntime of the pip
// wheel and of the system. engines/onnxruntime/ort_api.h declares the functions of libonnxruntime.
#pragma once

#include <string>

#include "dlm_runtime.h"
#include "engines/engine.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct OrtLibrary {
  ort::Api api;
  std::string version;
};

// Loads the library. `provider` is the execution provider that will run the graph. GPU providers
// need a newer version of the library than the CPU needs. Throws an Error with status
// DLM_ENGINE_MISSING.
OrtLibrary load_onnxruntime(const std::string& given, const ProviderChoice& provider);

// Returns the status for a graph that could not be loaded. The status says whether the bundle or
// the library is the cause.
dlm_status load_failure(const ort::Api& api, const OrtStatus* reported);

}  // namespace dlm
