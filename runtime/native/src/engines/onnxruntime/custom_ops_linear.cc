// Linear layers, and embedding tables that share a tied head's weight.
#include <array>

#include "engines/onnxruntime/custom_op.h"

namespace dlm::ops {
namespace {

void read_columns(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  size_t count = node.op.is.weights;
  check(
      api,
      api.call<ort::KernelInfoGetAttributeArrayInt64>(info, "columns", node.columns.data(), &count),
      kWhere);
  if (count != node.op.is.weights)
    fail(DLM_BAD_BUNDLE, "columns has %zu values, expected %zu", count, node.op.is.weights);
}

void read_int4(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_columns(api, info, node);
  read_group_size(api, info, node);
}

// True if codes and scales are a weight of these inputs and columns, in panels. INT4 if it has
// groups.
template <class Scale>
bool is_in_panels(const Tensor<const uint8_t>& codes, const Tensor<Scale>& scales, int64_t inputs,
                  int64_t columns, int64_t group_size) {
  const int64_t together = group_size == 0 ? kDot : kPairs;
  if (inputs < together || inputs > kMostInputs || inputs % together != 0 || columns < 1 ||
      columns > INT32_MAX)
    return false;
  const int64_t width = padded_columns(columns), panels = width / kPanel;
  if (!codes.is({panels, inputs / together, kPanel, kDot})) return false;
  return group_size == 0 ? scales.is({width})
                         : scales.is({panels, groups_of(inputs, group_size), kPanel});
}

void compute_linear(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0);
  if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a scalar");
  const int64_t inputs = x.dims[x.rank - 1];
  Linear layer{};
  layer.x = x.data;
  layer.inputs = inputs;
  layer.rows = inputs > 0 ? x.count() / inputs : 0;
  layer.group_size = node.group_size;
  std::array<LinearWeight, kMostWeights> weights{};
  std::array<float*, kMostWeights> outputs{};
  auto shape = x.dims;
  for (size_t i = 0; i < node.op.is.weights; ++i) {
    const int64_t columns = node.columns[i];
    const auto codes = call.input<uint8_t>(1 + 2 * i);
    const auto take = [&](const auto& scales) {
      weights[i] = {codes.data, scales.data, columns};
      return is_in_panels(codes, scales, inputs, columns, node.group_size);
    };
    const bool fits = node.group_size == 0 ? take(call.input<float>(2 + 2 * i))
                                           : take(call.input<uint16_t>(2 + 2 * i));
    if (!fits || (node.op.is.is_gated && columns != node.columns[0]))
      fail(DLM_BAD_BUNDLE, "weight %zu is not %lld by %lld in panels", i,
           static_cast<long long>(inputs), static_cast<long long>(columns));
    shape[x.rank - 1] = columns;
    if (i < node.op.is.output_count) outputs[i] = call.output<float>(i, shape.data(), x.rank);
  }
  layer.weights = weights.data();
  layer.outputs = outputs.data();
  layer.count = node.op.is.weights;
  layer.is_gated = node.op.is.is_gated;
  const Scratch scratch(call, node.op.memory, layer.scratch_bytes());
  kernels.linear(layer, scratch.get(), call);
}

void compute_embedding(const Kernels& kernels, const Node& node, Call& call) {
  const auto ids = call.input<int64_t>(0);
  const auto panels = call.input<uint8_t>(1), scales = call.input<uint8_t>(2);
  if (ids.rank + 1 > kMostDims || panels.rank != 4)
    fail(DLM_BAD_BUNDLE, "the table is not in panels");
  Embedding table{};
  table.group_size = node.group_size;
  table.rows = panels.dims[0] * kPanel;
  table.hidden = panels.dims[1] * (node.group_size == 0 ? kDot : kPairs);
  if (!is_in_panels(panels, scales, table.hidden, table.rows, node.group_size))
    fail(DLM_BAD_BUNDLE, "the table is not %lld rows of %lld in panels",
         static_cast<long long>(table.rows), static_cast<long long>(table.hidden));
  table.ids = ids.data, table.tokens = ids.count();
  table.panels = panels.data, table.scales = scales.data;
  if (!table.is_in_range())
    fail(DLM_BAD_BUNDLE, "a token id is outside the %lld rows of the table",
         static_cast<long long>(table.rows));
  auto shape = ids.dims;
  shape[ids.rank] = table.hidden;
  table.y = call.output<float>(0, shape.data(), ids.rank + 1);
  kernels.embedding(table, call);
}

void compute_nvfp4_linear(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0), global_scale = call.input<float>(3);
  const auto codes = call.input<uint8_t>(1), scales = call.input<uint8_t>(2);
  if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a scalar");
  const int64_t inputs = x.dims[x.rank - 1], columns = node.columns[0];
  if (inputs < kGroup || inputs % kGroup != 0 || columns < 1 || columns > INT32_MAX) {
    fail(DLM_BAD_BUNDLE, "the weight %lld by %lld is invalid", static_cast<long long>(inputs),
         static_cast<long long>(columns));
  }
  const int64_t panels = padded_columns(columns) / kPanel;
  if (!codes.is({panels, inputs, kPanel / 2}) || !scales.is({panels, inputs / kGroup, kPanel}) ||
      !global_scale.is({}))
    fail(DLM_BAD_BUNDLE, "the weight is not %lld by %lld in panels", static_cast<long long>(inputs),
         static_cast<long long>(columns));
  auto shape = x.dims;
  shape[x.rank - 1] = columns;
  Nvfp4Linear layer{};
  layer.x = x.data;
  layer.rows = x.count() / inputs;
  layer.inputs = inputs, layer.columns = columns;
  layer.panels = codes.data, layer.scales = scales.data;
  layer.global_scale = *global_scale.data;
  layer.y = call.output<float>(0, shape.data(), x.rank);
  kernels.nvfp4_linear(layer, call);
}

template <class Element>
void compute_tied_head(const Kernels& kernels, const Node& node, Call& call, TableType type) {
  const auto x = call.input<float>(0);
  const auto table = call.input<Element>(1);
  if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a scalar");
  const int64_t inputs = x.dims[x.rank - 1], columns = table.dims[0];
  if (inputs < 1 || columns < 1 || columns > INT32_MAX || !table.is({columns, inputs}))
    fail(DLM_BAD_BUNDLE, "the table does not have rows of %lld", static_cast<long long>(inputs));
  TiedHead head{};
  head.x = x.data, head.table = table.data, head.type = type;
  head.rows = x.count() / inputs, head.inputs = inputs, head.columns = columns;
  if (node.op.is.input_count > 2) {
    const auto scales = call.input<float>(2);
    if (!scales.is({columns, 1}))
      fail(DLM_BAD_BUNDLE, "the table does not have %lld scales", static_cast<long long>(columns));
    head.scales = scales.data;
  }
  auto shape = x.dims;
  shape[x.rank - 1] = columns;
  head.y = call.output<float>(0, shape.data(), x.rank);
  kernels.tied_head(head, call);
}

template <TableType kType>
void compute_tied_head(const Kernels& kernels, const Node& node, Call& call) {
  if constexpr (kType == TableType::fp32)
    compute_tied_head<float>(kernels, node, call, kType);
  else if constexpr (kType == TableType::fp8)
    compute_tied_head<uint8_t>(kernels, node, call, kType);
  else
    compute_tied_head<uint16_t>(kernels, node, call, kType);
}

constexpr int F = kFloat, L = kInt64, H = kFloat16, B = kBfloat16, C = kUint8, S = kFloat8;

}  // namespace

void read_group_size(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  check(api, api.call<ort::KernelInfoGetAttributeInt64>(info, "group_size", &node.group_size),
        kWhere);
  if (node.group_size < kPairs || node.group_size > kMostInputs || node.group_size % kPairs != 0)
    fail(DLM_BAD_BUNDLE, "the group size %lld is invalid", static_cast<long long>(node.group_size));
}

std::vector<Definition> linear_operators() {
  return {
      {"Int8Linear", {F, C, F}, 3, {F}, 1, 1, false, read_columns, compute_linear},
      {"Int8Linear2", {F, C, F, C, F}, 5, {F, F}, 2, 2, false, read_columns, compute_linear},
      {"Int8Linear3",
       {F, C, F, C, F, C, F},
       7,
       {F, F, F},
       3,
       3,
       false,
       read_columns,
       compute_linear},
      {"Int8GatedLinear", {F, C, F, C, F}, 5, {F}, 1, 2, true, read_columns, compute_linear},
      {"Int4Linear", {F, C, H}, 3, {F}, 1, 1, false, read_int4, compute_linear},
      {"Int4Linear2", {F, C, H, C, H}, 5, {F, F}, 2, 2, false, read_int4, compute_linear},
      {"Int4Linear3", {F, C, H, C, H, C, H}, 7, {F, F, F}, 3, 3, false, read_int4, compute_linear},
      {"Int4GatedLinear", {F, C, H, C, H}, 5, {F}, 1, 2, true, read_int4, compute_linear},
      {"NVFP4Linear", {F, C, S, F}, 4, {F}, 1, 1, false, read_columns, compute_nvfp4_linear},
      {"Int8Embedding", {L, C, F}, 3, {F}, 1, 0, false, nullptr, compute_embedding},
      {"Int4Embedding", {L, C, H}, 3, {F}, 1, 0, false, read_group_size, compute_embedding},
      {"Fp32TiedHead", {F, F}, 2, {F}, 1, 0, false, nullptr, compute_tied_head<TableType::fp32>},
      {"Bf16TiedHead", {F, B}, 2, {F}, 1, 0, false, nullptr, compute_tied_head<TableType::bf16>},
      {"Fp16TiedHead", {F, H}, 2, {F}, 1, 0, false, nullptr, compute_tied_head<TableType::fp16>},
      {"Fp8TiedHead", {F, C, F}, 3, {F}, 1, 0, false, nullptr, compute_tied_head<TableType::fp8>},
  };
}

}  // namespace dlm::ops
