// The operators of domain dlm_export for ONNX Runtime, over the kernels of kernels/kernels.h.
//
// A bundle's graph calls them as functions that it defines itself in ONNX's operators, so any
// engine can run it. Where this processor has kernels they are registered, and a registered
// operator goes before a function of its name.
#pragma once

#include <memory>

#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Kernels;

// The operators of one session, which must end before them.
class CustomOps {
 public:
  CustomOps(const ort::Api& api, const Kernels& kernels);
  ~CustomOps();

  void add_to(OrtSessionOptions* options) const;

 private:
  struct Domain;
  const std::unique_ptr<Domain> domain_;
};

}  // namespace dlm
