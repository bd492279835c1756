// The entry point for programs that load this library into their own ONNX Runtime as a library of
// custom operators. In Python, these programs call SessionOptions.register_custom_ops_library. In
// C, they call OrtApi::RegisterCustomOpsLibrary_V2. ONNX Runtime then calls the function below.
// After that, the program's sessions can run a bundle's graph with our kernels.
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
  // If `table` is NULL, the program's ONNX Runtime is too old. ONNX Runtime will reject the graph
  // with its own error message when the program creates a session.
  if (table == nullptr) return nullptr;
  const dlm::ort::Api api(table);
  try {
    const dlm::Kernels* const kernels = dlm::find_kernels();
    // If there are no kernels for the processor, do not register operators. ONNX Runtime then runs
    // the functions of standard operators in the graph.
    if (kernels == nullptr) return nullptr;
    // The operators are never freed, because sessions do not report when they stop using an
    // operator. Each pair of a loaded ONNX Runtime and a kernel set gets its operators only once.
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
