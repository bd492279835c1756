// ONNX Runtime's providers for NVIDIA's GPUs: adding one to a session, and what it does not run.
#pragma once

#include <string>

#include "engines/engine.h"
#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Provider {
  const char *name, *registered, *label;  // ours, the library's, and for people
};

// Throws Error(DLM_UNSUPPORTED), which lists the names, for one that is not known.
void check_provider_name(const std::string& name);

// The provider of a name that was checked.
const Provider& find_provider(const std::string& name);

// Throws Error(DLM_ENGINE_MISSING), with what to install, if the library lacks the provider.
void check_provider_there(const ort::Api& api, const std::string& version,
                          const Provider& provider);

// Adds the chosen provider and, with allow_fallback, the CUDA provider after TensorRT's. Throws
// Error(DLM_ENGINE_MISSING), with what to install, if it cannot load what it needs.
void add_provider(const ort::Api& api, const ProviderChoice& choice, OrtSessionOptions* options);

// The nodes of a session, made with kRecordPlacement, that another provider runs: "12 of 95 nodes:
// 8 BitShift (unpack_0, ...), 4 Shape (...)". Empty if there are none.
constexpr char kRecordPlacement[] = "session.record_ep_graph_assignment_info";
std::string left_behind(const ort::Api& api, const OrtSession* session, const Provider& provider);

}  // namespace dlm
