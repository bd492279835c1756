// The functions that Triton calls. Each of them returns an error instead of throwing an exception.
#include <memory>

#include "instance.h"
#include "model.h"
#include "response.h"

#define DLM_TRITON_ENTRY extern "C" __attribute__((visibility("default")))

namespace dlm::triton {
namespace {

// The version of Triton's backend API that added TRITONBACKEND_RequestIsCancelled.
constexpr uint32_t kApiMajor = 1, kLeastApiMinor = 16;

template <class Function>
TRITONSERVER_Error* guarded(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (...) {
    return error_of(thrown());
  }
}

// Returns nullptr if the model could not be loaded.
Model* model_of(TRITONBACKEND_Model* model) {
  void* state = nullptr;
  check(TRITONBACKEND_ModelState(model, &state));
  return static_cast<Model*>(state);
}

Instance* instance_of(TRITONBACKEND_ModelInstance* instance) {
  void* state = nullptr;
  check(TRITONBACKEND_ModelInstanceState(instance, &state));
  return static_cast<Instance*>(state);
}

}  // namespace
}  // namespace dlm::triton

using dlm::triton::guarded;

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  return guarded([] {
    uint32_t major = 0, minor = 0;
    dlm::triton::check(TRITONBACKEND_ApiVersion(&major, &minor));
    if (major != dlm::triton::kApiMajor || minor < dlm::triton::kLeastApiMinor)
      dlm::fail(DLM_UNSUPPORTED,
                "this Triton has version %u.%u of the backend API; the backend needs %u.%u or a "
                "later %u.x",
                major, minor, dlm::triton::kApiMajor, dlm::triton::kLeastApiMinor,
                dlm::triton::kApiMajor);
  });
}

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([model] {
    auto made = std::make_unique<dlm::triton::Model>(model);
    dlm::triton::check(TRITONBACKEND_ModelSetState(model, made.get()));
    made.release();
  });
}

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([model] { delete dlm::triton::model_of(model); });
}

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(
    TRITONBACKEND_ModelInstance* instance) {
  return guarded([instance] {
    TRITONBACKEND_Model* model = nullptr;
    dlm::triton::check(TRITONBACKEND_ModelInstanceModel(instance, &model));
    auto made = std::make_unique<dlm::triton::Instance>(instance, *dlm::triton::model_of(model));
    dlm::triton::check(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
    made.release();
  });
}

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(
    TRITONBACKEND_ModelInstance* instance) {
  return guarded([instance] { delete dlm::triton::instance_of(instance); });
}

DLM_TRITON_ENTRY TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
    const uint32_t request_count) {
  return guarded([=] {
    dlm::triton::Instance* const made = dlm::triton::instance_of(instance);
    for (uint32_t i = 0; i < request_count; ++i) made->start(requests[i]);
  });
}
