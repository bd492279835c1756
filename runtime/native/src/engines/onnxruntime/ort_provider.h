// ONNX Runtime's providers for NVIDIA GPUs: adds one to a session, and lists nodes it does not run.
#pragma once

#include <string>

#include "engines/engine.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Provider {
  const char *name, *registered, *label;  // ours, the library's, and for people
};

// The provider of this name; NULL for "cpu". Throws Error(DLM_UNSUPPORTED), with the known names,
// for an unknown one.
const Provider* find_provider(const std::string& name);

// Throws Error(DLM_ENGINE_MISSING), with what to install, if the library lacks the provider.
void check_provider_there(const ort::Api& api, const std::string& version,
                          const Provider& provider);

// Adds the provider; with allow_fallback, also the CUDA provider after TensorRT's. Throws
// Error(DLM_ENGINE_MISSING), with what to install, if a dependency cannot be loaded.
void add_provider(const ort::Api& api, const Provider& provider, const ProviderChoice& choice,
                  OrtSessionOptions* options);

// The nodes that another provider runs, in a session made with kRecordPlacement: "12 of 95 nodes: 8
// BitShift (unpack_0, ...), 4 Shape (...)". Empty if there are no such nodes.
constexpr char kRecordPlacement[] = "session.record_ep_graph_assignment_info";
std::string left_behind(const ort::Api& api, const OrtSession* session, const Provider& provider);

}  // namespace dlm
