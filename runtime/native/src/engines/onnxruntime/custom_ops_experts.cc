// Custom operators for mixtures of experts.
#include <cinttypes>

#include "engines/onnxruntime/custom_op.h"

namespace dlm::ops {
namespace {

void read_experts(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  size_t count = 2, one = 1;
  ask<ort::KernelInfoGetAttributeArrayInt64>(api, info, "columns", node.columns.data(), &count);
  ask<ort::KernelInfoGetAttributeArrayInt64>(api, info, "out_columns", &node.columns[2], &one);
  // The functions with GELU call a layer for gate and for up, so they have one number for both.
  if (count == 1) node.columns[1] = node.columns[0];
  if (count < 1 || count > 2 || one != 1 || node.columns[0] != node.columns[1])
    fail(DLM_BAD_BUNDLE, "the columns of gate, up and down are invalid");
}

void read_int4_experts(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_experts(api, info, node);
  read_group_size(api, info, node);
}

// Reads the weight matrices of all experts from the operator's input `index`, and their scales from
// the next input. Checks the shapes of both inputs.
template <ExpertFormat kFormat>
ExpertWeights take_stack(const Call& call, const Experts& mixture, size_t index, int64_t inputs,
                         int64_t columns) {
  const int64_t width = padded_columns(columns), E = mixture.count, panels = width / kPanel;
  const auto refuse = [&] {
    fail(DLM_BAD_BUNDLE,
         "input %zu does not have %" PRId64 " experts of %" PRId64 " by %" PRId64 " in panels",
         index, E, inputs, columns);
  };
  const auto codes = call.input<uint8_t>(index);
  if constexpr (kFormat == ExpertFormat::fp32) {
    if (!codes.is({E, panels, inputs, kPanel})) refuse();
    return {codes.data, nullptr};
  } else {
    constexpr int64_t kTogether = kFormat == ExpertFormat::int8 ? kDot : kPairs;
    const auto scales = call.input<uint8_t>(index + 1);
    const bool fits = kFormat == ExpertFormat::int8
                          ? scales.is({E, width})
                          : scales.is({E, panels, groups_of(inputs, mixture.group_size), kPanel});
    if (inputs % kTogether != 0 || !codes.is({E, panels, inputs / kTogether, kPanel, kDot}) ||
        !fits)
      refuse();
    return {codes.data, scales.data};
  }
}

template <ExpertFormat kFormat, Activation kActivation>
void compute_experts(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0), weights = call.input<float>(2);
  const auto chosen = call.input<int64_t>(1);
  constexpr size_t kStep = kFormat == ExpertFormat::fp32 ? 1 : 2;
  Experts mixture{};
  mixture.format = kFormat, mixture.activation = kActivation;
  mixture.group_size = node.group_size;
  mixture.inputs = node.columns[2], mixture.hidden = node.columns[0];
  mixture.count = call.input<uint8_t>(3).dims[0];
  mixture.active = chosen.dims[2];
  const int64_t B = x.dims[0], T = x.dims[1], K = mixture.inputs, M = mixture.hidden;
  const auto is_size = [](int64_t size) { return size >= 1 && size <= kMostInputs; };
  if (!is_size(K) || !is_size(M) || !is_size(mixture.active) || !is_size(mixture.count) ||
      !x.is({B, T, K}) || !chosen.is({B, T, mixture.active}) || !weights.is({B, T, mixture.active}))
    fail(DLM_BAD_BUNDLE, "the shapes of tokens and their experts do not match");
  mixture.gate = take_stack<kFormat>(call, mixture, 3, K, M);
  mixture.up = take_stack<kFormat>(call, mixture, 3 + kStep, K, M);
  mixture.down = take_stack<kFormat>(call, mixture, 3 + 2 * kStep, M, K);
  mixture.rows = B * T;
  mixture.x = x.data, mixture.chosen = chosen.data, mixture.weights = weights.data;
  if (!mixture.is_in_range())
    fail(DLM_BAD_BUNDLE, "a token's expert is not below %" PRId64, mixture.count);
  mixture.y = call.output<float>(0, {B, T, K});
  const Scratch scratch(call, node.op.memory, mixture.scratch_bytes());
  kernels.experts(mixture, scratch.get(), call);
}

using namespace short_types;

}  // namespace

std::vector<Definition> expert_operators() {
  constexpr auto kFp32 = ExpertFormat::fp32, kInt8 = ExpertFormat::int8, kInt4 = ExpertFormat::int4;
  constexpr auto kSilu = Activation::silu, kGelu = Activation::gelu;
  const std::vector<int> fp32{F, L, F, F, F, F}, int8{F, L, F, C, F, C, F, C, F},
      int4{F, L, F, C, H, C, H, C, H}, out{F};
  return {
      {"Fp32Experts", fp32, out, read_experts, compute_experts<kFp32, kSilu>},
      {"Int8Experts", int8, out, read_experts, compute_experts<kInt8, kSilu>},
      {"Int4Experts", int4, out, read_int4_experts, compute_experts<kInt4, kSilu>},
      {"GeluFp32Experts", fp32, out, read_experts, compute_experts<kFp32, kGelu>},
      {"GeluInt8Experts", int8, out, read_experts, compute_experts<kInt8, kGelu>},
      {"GeluInt4Experts", int4, out, read_int4_experts, compute_experts<kInt4, kGelu>},
  };
}

}  // namespace dlm::ops
