// ONNX Runtime's providers for NVIDIA GPUs. The code adds a provider to a session, and lists the
// nodes that the provider does not run.
#pragma once

#include <string>

#include "engines/engine.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Provider {
  const char *name, *registered, *label;  // our name, ONNX Runtime's name, and the name for people
};

// Returns the provider with this name, or NULL for "cpu". For an unknown name, throws
// Error(DLM_UNSUPPORTED) with a list of the known names.
const Provider* find_provider(const std::string& name);

// Throws Error(DLM_ENGINE_MISSING) if the library was built without the provider. The message says
// what to install.
void check_provider_there(const ort::Api& api, const std::string& version,
                          const Provider& provider);

// Adds the provider to the session options. If the provider is TensorRT and allow_fallback is set,
// also adds the CUDA provider after it. Throws Error(DLM_ENGINE_MISSING) if a dependency cannot be
// loaded. The message says what to install.
void add_provider(const ort::Api& api, const Provider& provider, const ProviderChoice& choice,
                  OrtSessionOptions* options);

// Lists the nodes of a session that another provider runs, for example "12 of 95 nodes: 8 BitShift
// (unpack_0, ...), 4 Shape (...)". Returns "" if there are none. The session must have been created
// with the option kRecordPlacement.
constexpr char kRecordPlacement[] = "session.record_ep_graph_assignment_info";
std::string left_behind(const ort::Api& api, const OrtSession* session, const Provider& provider);

}  // namespace dlm
