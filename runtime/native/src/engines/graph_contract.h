// What the engines of a bundle share: the inputs and outputs that the manifest gives a graph, and
// the checks of files and passes against them.
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

// Sizes that change from pass to pass stand in a Port's dims as these; the others are numbers.
enum Extent : int64_t { kT = -1, kS = -2, kR = -3, kB = -4 };

using Dims = std::vector<int64_t>;

struct Port {
  std::string name;
  int32_t type;
  Dims dims;
  bool is_there = false;

  // The dims in a pass of B requests, T tokens, S cached ones and R rows; at most 4.
  std::array<int64_t, 4> shape(int32_t batch, int32_t tokens, int32_t cached, int32_t rows) const;
  // Of such a shape. Throws Error(DLM_OUT_OF_MEMORY).
  size_t bytes(const std::array<int64_t, 4>& shape) const;
};

// inputs: input_ids, position_ids, score_rows, then past key and past value of every layer;
// outputs: top_token, top_prob, entropy, logits, then present key and present value. Their names
// are the manifest's; where they are in the graph is found by name.
struct Ports {
  std::vector<Port> inputs, outputs;
};
constexpr size_t kFirstPast = 3, kFirstPresent = 4;

// batch: kB, or the only B that the engine takes.
Ports list_ports(const GraphSpec& graph, int64_t batch);

// The port of this name, or nullptr.
Port* find_port(std::vector<Port>& ports, const std::string& name);

// Notes that the port is there; dims below 0 are open. Throws Error(DLM_BAD_BUNDLE), naming the
// file `path` and the `kind` of port ("input" or "output"), if type or dims are not the manifest's.
void note_port(const std::string& path, const char* kind, Port& port, int32_t type,
               const Dims& dims);

// Throws Error(DLM_BAD_BUNDLE) if a port that has to be there is not.
void check_complete(const std::string& path, const char* kind, const std::vector<Port>& ports);

[[noreturn]] void refuse_port(const std::string& path, const char* kind, const std::string& name,
                              const std::string& reason);

// NaN anywhere in the denoiser ends up in top_probs [B, R, K]. Throws Error(DLM_ENGINE_FAILED).
void check_finite(const float* top_probs, size_t count);

// Throws Error(DLM_INTERNAL) for sizes that the loop never asks for.
void check_pass(const dlm_pass& pass);

}  // namespace dlm
