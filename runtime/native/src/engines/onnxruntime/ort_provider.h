// Adds one of ONNX Runtime's providers for NVIDIA GPUs to a session, and lists the nodes that the
// provider does not run.
#pragma once

#include <string>

#include "engines/cuda/cuda_api.h"
#include "engines/engine.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Provider {
  const char *name, *registered, *label;  // the names in this library, in ONNX Runtime, and in
                                          // messages
};

// Returns the provider with this name, or NULL for "cpu". Throws an Error with status
// DLM_UNSUPPORTED for an unknown name. The message lists the known names.
const Provider* find_provider(const std::string& name);

// Throws an Error with status DLM_ENGINE_MISSING if ONNX Runtime was built without the provider,
// unless the provider is in a separate library. The message says what to install.
void check_provider_there(const ort::Api& api, const std::string& version,
                          const Provider& provider);

// Adds the provider to the session options. If the provider is TensorRT and allow_fallback is set,
// also adds the CUDA provider, which runs the nodes that TensorRT does not run. Throws an Error
// with status DLM_ENGINE_MISSING if a dependency cannot be loaded. The message says what to
// install.
//
// TensorRT-RTX is in a separate library. The function registers this library in `env`, unless
// `env` knows the provider already. `device` is the device that `choice` names. `graph` is the path
// of the graph file.
void add_provider(const ort::Api& api, const Provider& provider, const ProviderChoice& choice,
                  const CudaDevice& device, const std::string& graph, OrtEnv* env,
                  OrtSessionOptions* options);

// Lists the nodes of a session that the provider does not run, for example "12 of 95 nodes: 8
// BitShift (unpack_0, ...), 4 Shape (...)". Does not list nodes that only compute sizes of tensors.
// Returns "" if the provider runs all other nodes. The session must have been created with the
// option kRecordPlacement.
constexpr char kRecordPlacement[] = "session.record_ep_graph_assignment_info";
std::string left_behind(const ort::Api& api, const OrtSession* session, const Provider& provider);

}  // namespace dlm
