// The entry point that ONNX Runtime calls in a library of operators
// (SessionOptions.register_custom_ops_library in Python, OrtApi::RegisterCustomOpsLibrary_V2 in C).
// With it, a caller's own session runs a bundle's graph with our kernels.
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "dlm_runtime.h"
#include "engines/onnxruntime/custom_op.h"
#include "kernels/kernels.h"

extern "C" DLM_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                const dlm::ort::ApiBase* base) {
  const void* const table = base->get_api(dlm::ort::kApiVersion);
  if (table == nullptr) return nullptr;  // the library is too old; its sessions reject the graph
  const dlm::ort::Api api(table);
  try {
    const dlm::Kernels* const kernels = dlm::find_kernels();
    if (kernels == nullptr) return nullptr;  // the graph's own functions run
    // Sessions use them without reporting it, so there is one set for each copy of ONNX Runtime in
    // the process and each set of kernels. It is never freed.
    static std::mutex mutex;
    static auto& registered =
        *new std::map<std::pair<const void*, const dlm::Kernels*>, std::unique_ptr<dlm::CustomOps>>;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<dlm::CustomOps>& ops = registered[{table, kernels}];
    if (ops == nullptr) ops = std::make_unique<dlm::CustomOps>(api, *kernels);
    ops->add_to(options);
    return nullptr;
  } catch (const std::exception& error) {
    return api.call<dlm::ort::CreateStatus>(dlm::ort::kInvalidArgument, error.what());
  }
}
