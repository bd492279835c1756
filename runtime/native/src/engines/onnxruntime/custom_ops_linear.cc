// Custom operators for linear layers, and for embedding tables that are stored like the weight
// matrix of a tied head.
#include <algorithm>
#include <array>
#include <cinttypes>

#include "engines/onnxruntime/custom_op.h"

namespace dlm::ops {
namespace {

// Returns the number of weight matrices of a layer. The first input of the operator is x. After it,
// there are two inputs for each matrix: the codes and the scales. An NVFP4 layer has one matrix
// with three inputs, so this function also returns 1 for it.
size_t weights_of(const Definition& layer) { return (layer.inputs.size() - 1) / 2; }

// The rows of a layer's input x [..., inputs], and the layer's outputs [..., columns].
struct Rows {
  Call& call;
  Tensor<const float> x = call.input<float>(0);
  int64_t inputs = 0, count = 0;

  explicit Rows(Call& given) : call(given) {
    if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a scalar");
    inputs = x.dims[x.rank - 1];
    count = inputs > 0 ? x.count() / inputs : 0;
  }
  float* output(size_t index, int64_t columns) const {
    auto shape = x.dims;
    shape[x.rank - 1] = columns;
    return call.output<float>(index, shape.data(), x.rank);
  }
};

void read_columns(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  size_t count = weights_of(node.op.is);
  ask<ort::KernelInfoGetAttributeArrayInt64>(api, info, "columns", node.columns.data(), &count);
  if (count != weights_of(node.op.is))
    fail(DLM_BAD_BUNDLE, "columns has %zu values, expected %zu", count, weights_of(node.op.is));
}

void read_int4(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_columns(api, info, node);
  read_group_size(api, info, node);
}

// Returns true if codes and scales have the right shapes for a weight matrix [inputs, columns] that
// is stored in panels. If group_size is not 0, the matrix is INT4.
bool is_in_panels(const Tensor<const uint8_t>& codes, const Tensor<const uint8_t>& scales,
                  int64_t inputs, int64_t columns, int64_t group_size) {
  const int64_t together = group_size == 0 ? kDot : kPairs;
  if (inputs < together || inputs > kMostInputs || inputs % together != 0 || columns < 1 ||
      columns > INT32_MAX)
    return false;
  const int64_t width = padded_columns(columns), panels = width / kPanel;
  if (!codes.is({panels, inputs / together, kPanel, kDot})) return false;
  return group_size == 0 ? scales.is({width})
                         : scales.is({panels, groups_of(inputs, group_size), kPanel});
}

// Runs a linear layer for at most 512 rows at a time. So the scratch memory needs room for the
// quantised inputs of only 512 rows, even in a long pass. The results do not depend on this limit.
void run_in_parts(const Kernels& kernels, const Node& node, const Linear& layer, Call& call) {
  constexpr int64_t kMostRows = 512, kTogether = 32;  // kernels pad to 32 rows
  const int64_t parts = (layer.rows + kMostRows - 1) / kMostRows;
  if (parts == 0) return;
  const int64_t even = (layer.rows + parts - 1) / parts,
                size = (even + kTogether - 1) / kTogether * kTogether;
  std::array<float*, kMostWeights> outputs{};
  Linear part = layer;
  part.rows = std::min(size, layer.rows);
  const Scratch scratch(call, node.op.memory, part.scratch_bytes());
  for (int64_t first = 0; first < layer.rows; first += size) {
    part.x = layer.x + first * layer.inputs;
    part.rows = std::min(size, layer.rows - first);
    for (size_t i = 0; i < layer.count; ++i)
      if (layer.outputs[i] != nullptr)
        outputs[i] = layer.outputs[i] + first * layer.weights[i].columns;
    part.outputs = outputs.data();
    kernels.linear(part, scratch.get(), call);
  }
}

void compute_linear(const Kernels& kernels, const Node& node, Call& call) {
  const Rows rows(call);
  Linear layer{};
  layer.x = rows.x.data, layer.inputs = rows.inputs, layer.rows = rows.count;
  layer.group_size = node.group_size;
  layer.count = weights_of(node.op.is);
  layer.activation = node.op.is.outputs.size() < layer.count ? Activation::silu : Activation::none;
  std::array<LinearWeight, kMostWeights> weights{};
  std::array<float*, kMostWeights> outputs{};
  for (size_t i = 0; i < layer.count; ++i) {
    const int64_t columns = node.columns[i];
    const auto codes = call.input<uint8_t>(1 + 2 * i), scales = call.input<uint8_t>(2 + 2 * i);
    if (!is_in_panels(codes, scales, rows.inputs, columns, node.group_size) ||
        (layer.is_gated() && columns != node.columns[0]))
      fail(DLM_BAD_BUNDLE, "weight %zu is not %" PRId64 " by %" PRId64 " in panels", i, rows.inputs,
           columns);
    weights[i] = {codes.data, scales.data, columns};
    if (i < node.op.is.outputs.size()) outputs[i] = rows.output(i, columns);
  }
  layer.weights = weights.data();
  layer.outputs = outputs.data();
  run_in_parts(kernels, node, layer, call);
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
    fail(DLM_BAD_BUNDLE, "the table is not %" PRId64 " rows of %" PRId64 " in panels", table.rows,
         table.hidden);
  table.ids = ids.data, table.tokens = ids.count();
  table.panels = panels.data, table.scales = scales.data;
  if (!table.is_in_range())
    fail(DLM_BAD_BUNDLE, "a token id is outside the %" PRId64 " rows of the table", table.rows);
  auto shape = ids.dims;
  shape[ids.rank] = table.hidden;
  table.y = call.output<float>(0, shape.data(), ids.rank + 1);
  kernels.embedding(table, call);
}

void compute_nvfp4_linear(const Kernels& kernels, const Node& node, Call& call) {
  const Rows rows(call);
  const auto codes = call.input<uint8_t>(1), scales = call.input<uint8_t>(2);
  const auto global_scale = call.input<float>(3);
  const int64_t inputs = rows.inputs, columns = node.columns[0];
  if (inputs < kGroup || inputs % kGroup != 0 || columns < 1 || columns > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "the weight %" PRId64 " by %" PRId64 " is invalid", inputs, columns);
  const int64_t panels = padded_columns(columns) / kPanel;
  if (!codes.is({panels, inputs, kPanel / 2}) || !scales.is({panels, inputs / kGroup, kPanel}) ||
      !global_scale.is({}))
    fail(DLM_BAD_BUNDLE, "the weight is not %" PRId64 " by %" PRId64 " in panels", inputs, columns);
  kernels.nvfp4_linear({rows.x.data, rows.count, inputs, columns, codes.data, scales.data,
                        *global_scale.data, rows.output(0, columns)},
                       call);
}

template <TableType kType>
void compute_tied_head(const Kernels& kernels, const Node& node, Call& call) {
  const Rows rows(call);
  const auto table = call.input<uint8_t>(1);  // as bytes, because the kernel does not use the
                                              // element type
  const int64_t columns = table.dims[0];
  if (rows.inputs < 1 || columns < 1 || columns > INT32_MAX || !table.is({columns, rows.inputs}))
    fail(DLM_BAD_BUNDLE, "the table does not have rows of %" PRId64, rows.inputs);
  const float* scale = nullptr;
  if (node.op.is.inputs.size() > 2) {
    const auto scales = call.input<float>(2);
    if (!scales.is({columns, 1}))
      fail(DLM_BAD_BUNDLE, "the table does not have %" PRId64 " scales", columns);
    scale = scales.data;
  }
  kernels.tied_head({rows.x.data, rows.count, rows.inputs, columns, kType, table.data, scale,
                     rows.output(0, columns)},
                    call);
}

// Runs LowRankUpdate, LowRankUpdate2, LowRankUpdate3 and GatedLowRankUpdate. The inputs are x, one
// y for each matrix, is_updated, and then a and b of each matrix.
void compute_low_rank(const Kernels& kernels, const Node& node, Call& call) {
  const Rows rows(call);
  LowRankUpdates updates{};
  updates.x = rows.x.data, updates.rows = rows.count, updates.inputs = rows.inputs;
  updates.count = (node.op.is.inputs.size() - 2) / 3;
  const bool is_gated = node.op.is.outputs.size() < updates.count;
  const auto is_updated = call.input<uint8_t>(1 + updates.count);
  if (is_updated.count() != rows.count)
    fail(DLM_BAD_BUNDLE, "is_updated does not have %" PRId64 " rows", rows.count);
  updates.is_updated = is_updated.data;
  std::array<LowRankMatrix, kMostWeights> matrices{};
  std::array<Tensor<const float>, kMostWeights> outputs{};
  int64_t columns = 0;
  for (size_t i = 0; i < updates.count; ++i) {
    outputs[i] = call.input<float>(1 + i);
    const auto a = call.input<float>(2 + updates.count + 2 * i),
               b = call.input<float>(3 + updates.count + 2 * i);
    auto shape = rows.x.dims;
    shape[rows.x.rank - 1] = b.dims[1];
    const bool is_like_x =
        outputs[i].rank == rows.x.rank &&
        std::equal(shape.begin(), shape.begin() + rows.x.rank, outputs[i].dims.begin());
    if (a.rank != 2 || b.rank != 2 || a.dims[0] != rows.inputs || a.dims[1] != b.dims[0] ||
        a.dims[1] < 1 || b.dims[1] < 1 || !is_like_x || (is_gated && i > 0 && b.dims[1] != columns))
      fail(DLM_BAD_BUNDLE, "the shapes of update %zu do not match", i);
    columns = b.dims[1];
    matrices[i] = {a.data, b.data, a.dims[1], columns, outputs[i].data, nullptr};
  }
  updates.matrices = matrices.data();
  if (!is_gated) {
    for (size_t i = 0; i < updates.count; ++i)
      matrices[i].out = rows.output(i, matrices[i].columns);
    return kernels.low_rank_updates(updates, call);
  }
  updates.gated = rows.output(0, columns);
  const int64_t numbers = rows.count * columns;
  const Scratch scratch(call, node.op.memory, 2 * static_cast<size_t>(numbers) * sizeof(float));
  matrices[0].out = static_cast<float*>(scratch.get()), matrices[1].out = matrices[0].out + numbers;
  kernels.low_rank_updates(updates, call);
}

using namespace short_types;

}  // namespace

void read_group_size(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  ask<ort::KernelInfoGetAttributeInt64>(api, info, "group_size", &node.group_size);
  if (node.group_size < kPairs || node.group_size > kMostInputs || node.group_size % kPairs != 0)
    fail(DLM_BAD_BUNDLE, "the group size %" PRId64 " is invalid", node.group_size);
}

std::vector<Definition> linear_operators() {
  return {
      {"Int8Linear", {F, C, F}, {F}, read_columns, compute_linear},
      {"Int8Linear2", {F, C, F, C, F}, {F, F}, read_columns, compute_linear},
      {"Int8Linear3", {F, C, F, C, F, C, F}, {F, F, F}, read_columns, compute_linear},
      {"Int8GatedLinear", {F, C, F, C, F}, {F}, read_columns, compute_linear},
      {"Int4Linear", {F, C, H}, {F}, read_int4, compute_linear},
      {"Int4Linear2", {F, C, H, C, H}, {F, F}, read_int4, compute_linear},
      {"Int4Linear3", {F, C, H, C, H, C, H}, {F, F, F}, read_int4, compute_linear},
      {"Int4GatedLinear", {F, C, H, C, H}, {F}, read_int4, compute_linear},
      {"NVFP4Linear", {F, C, S, F}, {F}, read_columns, compute_nvfp4_linear},
      {"Int8Embedding", {L, C, F}, {F}, nullptr, compute_embedding},
      {"Int4Embedding", {L, C, H}, {F}, read_group_size, compute_embedding},
      {"Fp32TiedHead", {F, F}, {F}, nullptr, compute_tied_head<TableType::fp32>},
      {"Bf16TiedHead", {F, B}, {F}, nullptr, compute_tied_head<TableType::bf16>},
      {"Fp16TiedHead", {F, H}, {F}, nullptr, compute_tied_head<TableType::fp16>},
      {"Fp8TiedHead", {F, C, F}, {F}, nullptr, compute_tied_head<TableType::fp8>},
      {"LowRankUpdate", {F, F, kBool, F, F}, {F}, nullptr, compute_low_rank},
      {"LowRankUpdate2", {F, F, F, kBool, F, F, F, F}, {F, F}, nullptr, compute_low_rank},
      {"LowRankUpdate3",
       {F, F, F, F, kBool, F, F, F, F, F, F},
       {F, F, F},
       nullptr,
       compute_low_rank},
      {"GatedLowRankUpdate", {F, F, F, kBool, F, F, F, F}, {F}, nullptr, compute_low_rank},
  };
}

}  // namespace dlm::ops
