// Shared by the engines of a bundle: the graph inputs and outputs that the manifest defines, and
// checks of files and passes against them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engines/engine.h"

namespace dlm {

// TensorProto.DataType of ONNX, and ONNX Runtime's ONNXTensorElementDataType.
constexpr int32_t kFloat = 1, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16;

size_t element_bytes(int32_t type);

// A Port's dims use these for sizes that change from pass to pass; other values are fixed sizes.
enum Extent : int64_t { kT = -1, kS = -2, kR = -3, kB = -4 };

using Dims = std::vector<int64_t>;

struct Port {
  std::string name;
  int32_t type;
  Dims dims;
  bool is_there = false;

  // The dims in a pass of B requests, T tokens, S cached tokens and R rows; at most 4.
  std::array<int64_t, 4> shape(int32_t batch, int32_t tokens, int32_t cached, int32_t rows) const;
  // The bytes of such a shape. Throws Error(DLM_OUT_OF_MEMORY).
  size_t bytes(const std::array<int64_t, 4>& shape) const;
};

// inputs: input_ids, position_ids, score_rows, then past key and past value of every layer;
// outputs: top_token, top_prob, entropy, logits, then present key and present value. The manifest
// names them, and the graph's ports are matched by name.
struct Ports {
  std::vector<Port> inputs, outputs;
};
constexpr size_t kFirstPast = 3, kFirstPresent = 4;

// batch: kB, or the only B that the engine accepts.
Ports list_ports(const GraphSpec& graph, int64_t batch);

// The port of this name, or nullptr.
Port* find_port(std::vector<Port>& ports, const std::string& name);

// Marks the port as found; dims below 0 are open. Throws Error(DLM_BAD_BUNDLE), naming the file
// `path` and the `kind` of port ("input" or "output"), if type or dims differ from the manifest's.
void note_port(const std::string& path, const char* kind, Port& port, int32_t type,
               const Dims& dims);

// Throws Error(DLM_BAD_BUNDLE) if a required port was not found.
void check_complete(const std::string& path, const char* kind, const std::vector<Port>& ports);

[[noreturn]] void refuse_port(const std::string& path, const char* kind, const std::string& name,
                              const std::string& reason);

// NaN anywhere in the denoiser reaches top_probs [B, R, K]. Throws Error(DLM_ENGINE_FAILED).
void check_finite(const float* top_probs, size_t count);

// Throws Error(DLM_INTERNAL) for sizes that the loop never uses.
void check_pass(const dlm_pass& pass);

}  // namespace dlm
