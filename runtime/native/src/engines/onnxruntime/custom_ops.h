// The operators of domain dlm_export for ONNX Runtime, implemented with kernels/kernels.h.
//
// A bundle's graph also defines them as functions of ONNX operators, so any engine can run it. If
// this processor has kernels, the operators are registered. A registered operator takes precedence
// over a function of the same name.
#pragma once

#include <memory>

#include "engines/onnxruntime/ort_api.h"

namespace dlm {

struct Kernels;

// The operators of one session. They must outlive it.
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
