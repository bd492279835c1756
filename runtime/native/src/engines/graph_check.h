// The inputs and outputs that a bundle's graph must have, according to the manifest. All engines
// use this file to check graphs and passes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engines/engine.h"

namespace dlm {

// Element types. ONNX (TensorProto.DataType) and ONNX Runtime (ONNXTensorElementDataType) both use
// these numbers.
constexpr int32_t kFloat = 1, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16;

size_t element_bytes(int32_t type);
// Returns the name that the manifest uses for a type of the cache.
const char* type_name(int32_t type);

// Negative numbers in Port::dims stand for sizes that change from pass to pass: T new tokens, S
// cached tokens, R rows for which the pass predicts tokens, B requests, and W cached tokens in
// layers with a window. All other numbers in Port::dims are fixed sizes.
enum Extent : int64_t { kT = -1, kS = -2, kR = -3, kB = -4, kW = -5 };

using Dims = std::vector<int64_t>;

struct Port {
  std::string name;
  int32_t type;
  Dims dims;
  bool is_there = false;

  // Returns the port's shape in a pass of B requests, T tokens, S cached tokens and R scored rows.
  // `window_cached` is W. A port has at most 4 dimensions.
  std::array<int64_t, 4> shape(int32_t batch, int32_t tokens, int32_t cached, int32_t rows,
                               int32_t window_cached) const;
  // Returns the number of bytes of a tensor with this shape. Throws an Error with status
  // DLM_OUT_OF_MEMORY if the number overflows size_t.
  size_t bytes(const std::array<int64_t, 4>& shape) const;
};

// All inputs and outputs of a graph. An input or output is called a port. The inputs are input_ids,
// position_ids and score_rows, then the past key and past value of every layer. The outputs are
// top_token, top_prob, top_log_odds, entropy and logits, then the present key and present value of
// every layer.
// If the denoiser has self-conditioning, the inputs end with conditioning and temperature, and the
// outputs end with next_conditioning. The manifest gives the name of each port. The graph may have
// its ports in any order.
struct Ports {
  std::vector<Port> inputs, outputs;
};
constexpr size_t kFirstPast = 3, kFirstPresent = 5;

// Lists the ports that the manifest requires. `batch` is kB if the engine accepts any batch size.
// Otherwise `batch` is the only batch size that the engine accepts.
Ports list_ports(const GraphSpec& graph, int64_t batch);

// Returns the port with this name, or nullptr if there is no such port.
Port* find_port(std::vector<Port>& ports, const std::string& name);

// Compares a port of the graph with the manifest, and marks the port as found. `type` and `dims`
// are those of the graph. If a dim is below 0, the graph accepts any size. Throws an Error with
// status DLM_BAD_BUNDLE if the type or the dims differ. The message contains the file `path` and
// the `kind` of port ("input" or "output").
void note_port(const std::string& path, const char* kind, Port& port, int32_t type,
               const Dims& dims);

// Throws an Error with status DLM_BAD_BUNDLE if a required port was not found.
void check_complete(const std::string& path, const char* kind, const std::vector<Port>& ports);

[[noreturn]] void refuse_port(const std::string& path, const char* kind, const std::string& name,
                              const std::string& reason);

// Throws an Error with status DLM_ENGINE_FAILED if one of the `count` numbers in top_probs is not
// finite. If the denoiser computes a NaN anywhere, at least one of these numbers is NaN.
void check_finite(const float* top_probs, size_t count);

// Throws an Error with status DLM_INTERNAL if the pass has sizes that the decoding loop never uses.
void check_pass(const dlm_pass& pass);

}  // namespace dlm
