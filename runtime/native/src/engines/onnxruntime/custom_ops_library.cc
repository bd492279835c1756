// The entry point for programs that load this library as a library of custom operators. Such
// programs call SessionOptions.register_custom_ops_library in Python, or
// OrtApi::RegisterCustomOpsLibrary_V2 in C. ONNX Runtime then calls the function below. After that,
// the program's own sessions can run a bundle's graph with our kernels.
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
  // This version of ONNX Runtime is too old. When the program creates a session, ONNX Runtime
  // rejects the graph with its own error message.
  if (table == nullptr) return nullptr;
  const dlm::ort::Api api(table);
  try {
    const dlm::Kernels* const kernels = dlm::find_kernels();
    // Without kernels, ONNX Runtime runs the functions in the graph.
    if (kernels == nullptr) return nullptr;
    // Sessions do not report when they stop using the operators, so the operators are never freed.
    // The operators are created once for each copy of ONNX Runtime in the process and each kernel
    // set.
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
