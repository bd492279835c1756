// Replaces engines/tensorrt/tensorrt_engine.cc in a library that is built without TensorRT's
// headers.
#include "base/error.h"
#include "engines/engine.h"

namespace dlm {

std::unique_ptr<Engine> open_tensorrt(const GraphSpec&, const std::vector<EngineSpec>&,
                                      const std::string&, const Log&) {
  fail(DLM_UNSUPPORTED,
       "this build of libdlm_runtime has no TensorRT: compile it with "
       "-DDLM_TENSORRT_INCLUDE_DIR=..., or use engine \"onnxruntime\", which runs the bundle's "
       "graph on the CPU");
}

}  // namespace dlm
