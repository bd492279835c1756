// The seam between the loop and whatever runs the denoiser.
//
// An engine runs one pass: it reads dlm_pass's inputs and fills its outputs (see dlm_runtime.h for shapes). The loop owns
// every buffer, keys and values included, so an engine holds weights and nothing of a request. run() is called from one
// thread a session and from several sessions at once.
#pragma once

#include <memory>
#include <string>

#include "dlm_runtime.h"

namespace dlm {

class Engine {
 public:
  virtual ~Engine() = default;
  // Runs the pass or throws Error(DLM_ENGINE_FAILED).
  virtual void run(const dlm_pass& pass) = 0;
  // One line for people: name, version, provider.
  virtual std::string description() const = 0;
};

// What the ONNX Runtime engine must know of a bundle's graph; the manifest says it.
struct GraphSpec {
  std::string path;  // of denoiser.onnx
  int32_t vocab_size, layers, kv_heads, head_size, top_k;
  bool half_cache;  // keys and values are fp16, else fp32
  bool simulated;   // quantised values are computed on in floating point, as the graph is written
};

// Loads libonnxruntime (library, or the places that dlm_open_options names) and the graph; threads = 0: all cores.
std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library, int threads);

std::unique_ptr<Engine> make_callback(dlm_pass_fn run, void* user);

}  // namespace dlm
