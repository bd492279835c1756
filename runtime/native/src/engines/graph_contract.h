// The inputs and outputs that the manifest requires of a bundle's graph. All engines of bundles use
// this file to check files and passes against them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engines/engine.h"

namespace dlm {

// Element types, with the numbers that ONNX (TensorProto.DataType) and ONNX Runtime
// (ONNXTensorElementDataType) share.
constexpr int32_t kFloat = 1, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16;

size_t element_bytes(int32_t type);

// In a Port's dims, these stand for sizes that change from pass to pass. Other values are fixed
// sizes.
enum Extent : int64_t { kT = -1, kS = -2, kR = -3, kB = -4 };

using Dims = std::vector<int64_t>;

struct Port {
  std::string name;
  int32_t type;
  Dims dims;
  bool is_there = false;

  // The port's shape in a pass of B requests, T tokens, S cached tokens and R rows. A port has at
  // most 4 dimensions.
  std::array<int64_t, 4> shape(int32_t batch, int32_t tokens, int32_t cached, int32_t rows) const;
  // The bytes of a tensor of this shape. Throws Error(DLM_OUT_OF_MEMORY) if the number is too
  // large.
  size_t bytes(const std::array<int64_t, 4>& shape) const;
};

// All inputs and outputs of a graph. The inputs are input_ids, position_ids and score_rows, then
// the past key and past value of every layer. The outputs are top_token, top_prob, entropy and
// logits, then the present key and present value of every layer. The manifest has their names, and
// the graph's inputs and outputs are found by these names.
struct Ports {
  std::vector<Port> inputs, outputs;
};
constexpr size_t kFirstPast = 3, kFirstPresent = 4;

// Lists the ports that the manifest requires. `batch` is kB, or the only batch size that the engine
// accepts.
Ports list_ports(const GraphSpec& graph, int64_t batch);

// Returns the port with this name, or nullptr.
Port* find_port(std::vector<Port>& ports, const std::string& name);

// Marks the port as found, after comparing the graph's `type` and `dims` with the port's. Dims
// below 0 are open. If there is a difference, throws Error(DLM_BAD_BUNDLE) with the file's `path`
// and the `kind` of port ("input" or "output").
void note_port(const std::string& path, const char* kind, Port& port, int32_t type,
               const Dims& dims);

// Throws Error(DLM_BAD_BUNDLE) if a required port was not found.
void check_complete(const std::string& path, const char* kind, const std::vector<Port>& ports);

[[noreturn]] void refuse_port(const std::string& path, const char* kind, const std::string& name,
                              const std::string& reason);

// Throws Error(DLM_ENGINE_FAILED) if a value of top_probs [B, R, K] is not finite. A NaN anywhere
// in the denoiser ends up there.
void check_finite(const float* top_probs, size_t count);

// Throws Error(DLM_INTERNAL) if the pass has sizes that the loop never uses.
void check_pass(const dlm_pass& pass);

}  // namespace dlm
