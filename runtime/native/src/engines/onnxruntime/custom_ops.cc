// Between ONNX Runtime's custom operators and the kernels: shapes of a graph that somebody sent are
// checked here, in every pass, before a kernel sees a pointer.
#include "engines/onnxruntime/custom_ops.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <string>

#include "base/error.h"
#include "engines/graph_contract.h"
#include "engines/onnxruntime/ort_handles.h"
#include "kernels/kernels.h"

namespace dlm {
namespace {

constexpr int kUint8 = 2,
              kFloat8 = 17;  // ElementType of engines/graph_contract.h has those of ports
constexpr size_t kMostWeights = 3;
constexpr size_t kMostPorts = 9, kMostDims = 5;
constexpr size_t kSegments = 8;  // which input of attention they are; a graph may leave it out
constexpr int64_t kSegmentNumbers = 4;     // of each
constexpr char kWhere[] = "ONNX Runtime";  // what its own errors start with

// A tensor of a pass.
template <class Element>
struct Tensor {
  Element* data;
  std::array<int64_t, kMostDims> dims;
  size_t rank;

  bool is(std::initializer_list<int64_t> wanted) const {
    return wanted.size() == rank && std::equal(wanted.begin(), wanted.end(), dims.begin());
  }
  int64_t count() const {
    int64_t product = 1;
    for (size_t i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
};

// One call of a kernel.
class Call final : public Parallel {
 public:
  Call(const ort::Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  template <class Element>
  Tensor<const Element> input(size_t index) const {
    const OrtValue* value = nullptr;
    check(api_, api_.call<ort::KernelContextGetInput>(context_, index, &value), kWhere);
    if (value == nullptr) fail(DLM_BAD_BUNDLE, "input %zu is missing", index);
    Tensor<const Element> tensor{};
    Owned<OrtTensorTypeAndShapeInfo, ort::ReleaseTensorTypeAndShapeInfo> info(api_);
    check(api_, api_.call<ort::GetTensorTypeAndShape>(value, info.out()), kWhere);
    check(api_, api_.call<ort::GetDimensionsCount>(info.get(), &tensor.rank), kWhere);
    if (tensor.rank > tensor.dims.size())
      fail(DLM_BAD_BUNDLE, "input %zu has %zu dimensions", index, tensor.rank);
    check(api_, api_.call<ort::GetDimensions>(info.get(), tensor.dims.data(), tensor.rank), kWhere);
    void* data = nullptr;
    check(api_, api_.call<ort::GetTensorMutableData>(const_cast<OrtValue*>(value), &data), kWhere);
    tensor.data = static_cast<const Element*>(data);
    return tensor;
  }

  bool has_input(size_t index) const {
    size_t count = 0;
    check(api_, api_.call<ort::KernelContextGetInputCount>(context_, &count), kWhere);
    const OrtValue* value = nullptr;
    if (index < count)
      check(api_, api_.call<ort::KernelContextGetInput>(context_, index, &value), kWhere);
    return value != nullptr;
  }

  template <class Element>
  Element* output(size_t index, std::initializer_list<int64_t> shape) {
    return output<Element>(index, shape.begin(), shape.size());
  }
  template <class Element>
  Element* output(size_t index, const int64_t* shape, size_t rank) {
    OrtValue* value = nullptr;
    void* data = nullptr;
    check(api_, api_.call<ort::KernelContextGetOutput>(context_, index, shape, rank, &value),
          kWhere);
    check(api_, api_.call<ort::GetTensorMutableData>(value, &data), kWhere);
    return static_cast<Element*>(data);
  }

  void run(size_t count, void (*task)(void* user, size_t i), void* user) override {
    if (count == 1) return task(user, 0);
    // As many batches as tasks: a thread that is late takes fewer.
    check(api_, api_.call<ort::KernelContextParallelFor>(context_, task, count, count, user),
          kWhere);
  }

  const ort::Api& api() const { return api_; }
  OrtKernelContext* context() const { return context_; }

 private:
  const ort::Api& api_;
  OrtKernelContext* const context_;
};

// Memory of the session's own allocator for the length of a call, aligned to 64.
class Scratch {
 public:
  Scratch(const Call& call, const OrtMemoryInfo* memory, size_t bytes) : api_(call.api()) {
    check(api_, api_.call<ort::KernelContextGetAllocator>(call.context(), memory, &allocator_),
          kWhere);
    OrtStatus* const failed =
        api_.call<ort::AllocatorAlloc>(allocator_, bytes + kAlignment, &data_);
    if (failed != nullptr) api_.call<ort::ReleaseAllocator>(allocator_);
    check(api_, failed, kWhere);
  }
  ~Scratch() {
    OrtStatus* const reported = api_.call<ort::AllocatorFree>(allocator_, data_);
    if (reported != nullptr) api_.call<ort::ReleaseStatus>(reported);
    api_.call<ort::ReleaseAllocator>(allocator_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get() const {
    const auto at = reinterpret_cast<uintptr_t>(data_);
    return reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  static constexpr size_t kAlignment = 64;
  const ort::Api& api_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// ---- The operators ----

struct Op;

// What a node of the graph says of itself.
struct Node {
  const Op& op;
  std::array<int64_t, kMostWeights> columns{};  // of a linear layer
  int64_t group_size = 0;                       // of Int4Linear and Int4Embedding
  int64_t heads = 0, kv_heads = 0;              // of CachedAttention
  int64_t visible_block = 0;                    // of BlockCachedAttention
};

struct Definition {
  const char* name;
  std::array<int, kMostPorts> inputs;  // element types
  size_t input_count;
  std::array<int, 3> outputs;
  size_t output_count;
  size_t weights;  // of a linear layer
  bool is_gated;
  void (*read)(const ort::Api& api, const OrtKernelInfo* info, Node& node);
  void (*compute)(const Kernels& kernels, const Node& node, Call& call);
  bool has_segments = false;
};

// The library's entry, first, and what it leads to.
struct Op {
  ort::CustomOp entry;
  Definition is;
  ort::Api api;
  const Kernels* kernels;
  const OrtMemoryInfo* memory;  // what scratch memory is asked for by
};

void read_columns(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  size_t count = node.op.is.weights;
  check(
      api,
      api.call<ort::KernelInfoGetAttributeArrayInt64>(info, "columns", node.columns.data(), &count),
      kWhere);
  if (count != node.op.is.weights)
    fail(DLM_BAD_BUNDLE, "columns has %zu numbers, not %zu", count, node.op.is.weights);
}

void read_group_size(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  check(api, api.call<ort::KernelInfoGetAttributeInt64>(info, "group_size", &node.group_size),
        kWhere);
  if (node.group_size < kPairs || node.group_size > kMostInputs || node.group_size % kPairs != 0)
    fail(DLM_BAD_BUNDLE, "groups of %lld inputs", static_cast<long long>(node.group_size));
}

void read_int4(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_columns(api, info, node);
  read_group_size(api, info, node);
}

// Whether codes and scales are those of a weight of so many inputs and columns in panels, INT4
// where there are groups.
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
  if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a single number");
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
      fail(DLM_BAD_BUNDLE, "weight %zu is not one of %lld by %lld in panels", i,
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
    fail(DLM_BAD_BUNDLE, "the table is not one of %lld rows of %lld in panels",
         static_cast<long long>(table.rows), static_cast<long long>(table.hidden));
  table.ids = ids.data, table.tokens = ids.count();
  table.panels = panels.data, table.scales = scales.data;
  if (!table.is_in_range())
    fail(DLM_BAD_BUNDLE, "a token id has no row among the table's %lld",
         static_cast<long long>(table.rows));
  auto shape = ids.dims;
  shape[ids.rank] = table.hidden;
  table.y = call.output<float>(0, shape.data(), ids.rank + 1);
  kernels.embedding(table, call);
}

void compute_nvfp4_linear(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0), global_scale = call.input<float>(3);
  const auto codes = call.input<uint8_t>(1), scales = call.input<uint8_t>(2);
  if (x.rank < 1) fail(DLM_BAD_BUNDLE, "the input is a single number");
  const int64_t inputs = x.dims[x.rank - 1], columns = node.columns[0];
  if (inputs < kGroup || inputs % kGroup != 0 || columns < 1 || columns > INT32_MAX) {
    fail(DLM_BAD_BUNDLE, "a weight of %lld by %lld", static_cast<long long>(inputs),
         static_cast<long long>(columns));
  }
  const int64_t panels = padded_columns(columns) / kPanel;
  if (!codes.is({panels, inputs, kPanel / 2}) || !scales.is({panels, inputs / kGroup, kPanel}) ||
      !global_scale.is({}))
    fail(DLM_BAD_BUNDLE, "the weight is not one of %lld by %lld in panels",
         static_cast<long long>(inputs), static_cast<long long>(columns));
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

void read_experts(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  size_t count = 2;
  check(
      api,
      api.call<ort::KernelInfoGetAttributeArrayInt64>(info, "columns", node.columns.data(), &count),
      kWhere);
  size_t one = 1;
  check(
      api,
      api.call<ort::KernelInfoGetAttributeArrayInt64>(info, "out_columns", &node.columns[2], &one),
      kWhere);
  if (count != 2 || one != 1 || node.columns[0] != node.columns[1])
    fail(DLM_BAD_BUNDLE, "columns of gate, up and down");
}

void read_int4_experts(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_experts(api, info, node);
  read_group_size(api, info, node);
}

// Whether the stacks are those of so many experts of inputs and columns, in panels of a format.
template <ExpertFormat kFormat>
ExpertWeights take_stack(const Call& call, const Experts& mixture, size_t index, int64_t inputs,
                         int64_t columns) {
  const int64_t width = padded_columns(columns), E = mixture.count, panels = width / kPanel;
  const auto refuse = [&] {
    fail(DLM_BAD_BUNDLE, "input %zu does not hold %lld experts of %lld by %lld in panels", index,
         static_cast<long long>(E), static_cast<long long>(inputs),
         static_cast<long long>(columns));
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

template <ExpertFormat kFormat>
void compute_experts(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0), weights = call.input<float>(2);
  const auto chosen = call.input<int64_t>(1);
  constexpr size_t kStep = kFormat == ExpertFormat::fp32 ? 1 : 2;
  Experts mixture{};
  mixture.format = kFormat;
  mixture.group_size = node.group_size;
  mixture.inputs = node.columns[2], mixture.hidden = node.columns[0];
  mixture.count = call.input<uint8_t>(3).dims[0];
  mixture.active = chosen.dims[2];
  const int64_t B = x.dims[0], T = x.dims[1], K = mixture.inputs, M = mixture.hidden;
  const auto is_size = [](int64_t size) { return size >= 1 && size <= kMostInputs; };
  if (!is_size(K) || !is_size(M) || !is_size(mixture.active) || !is_size(mixture.count) ||
      !x.is({B, T, K}) || !chosen.is({B, T, mixture.active}) || !weights.is({B, T, mixture.active}))
    fail(DLM_BAD_BUNDLE, "the shapes of tokens and their experts do not fit each other");
  mixture.gate = take_stack<kFormat>(call, mixture, 3, K, M);
  mixture.up = take_stack<kFormat>(call, mixture, 3 + kStep, K, M);
  mixture.down = take_stack<kFormat>(call, mixture, 3 + 2 * kStep, M, K);
  mixture.rows = B * T;
  mixture.x = x.data, mixture.chosen = chosen.data, mixture.weights = weights.data;
  if (!mixture.is_in_range())
    fail(DLM_BAD_BUNDLE, "a token's expert is none of %lld", static_cast<long long>(mixture.count));
  mixture.y = call.output<float>(0, {B, T, K});
  const Scratch scratch(call, node.op.memory, mixture.scratch_bytes());
  kernels.experts(mixture, scratch.get(), call);
}

void read_heads(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  check(api, api.call<ort::KernelInfoGetAttributeInt64>(info, "heads", &node.heads), kWhere);
  check(api, api.call<ort::KernelInfoGetAttributeInt64>(info, "kv_heads", &node.kv_heads), kWhere);
  if (node.kv_heads < 1 || node.heads < node.kv_heads || node.heads % node.kv_heads != 0 ||
      node.heads > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "%lld heads on %lld", static_cast<long long>(node.heads),
         static_cast<long long>(node.kv_heads));
}

void read_block(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_heads(api, info, node);
  check(api, api.call<ort::KernelInfoGetAttributeInt64>(info, "visible_block", &node.visible_block),
        kWhere);
  if (node.visible_block < 1 || node.visible_block > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "blocks of %lld tokens", static_cast<long long>(node.visible_block));
}

template <CacheType kCache>
void attend(const Kernels& kernels, const Node& node, Call& call) {
  const auto q = call.input<float>(0), k = call.input<float>(1), v = call.input<float>(2);
  const auto past_keys = call.input<uint8_t>(3),
             past_values = call.input<uint8_t>(4);  // whatever they are
  const auto positions = call.input<int64_t>(5);
  const auto cos = call.input<float>(6), sin = call.input<float>(7);
  Tensor<const int64_t> segments{nullptr, {0, kSegmentNumbers}, 2};
  if (call.has_input(kSegments)) segments = call.input<int64_t>(kSegments);
  CachedAttention pass{};
  pass.cache = kCache;
  pass.heads = node.heads;
  pass.kv_heads = node.kv_heads;
  pass.batch = q.dims[0];
  pass.tokens = q.dims[1];
  pass.cached = past_keys.dims[2];
  pass.head_size = q.dims[2] / node.heads;
  pass.rotary_size = 2 * cos.dims[1];
  pass.table_rows = cos.dims[0];
  pass.visible_block = node.visible_block;
  const int64_t B = pass.batch, T = pass.tokens, S = pass.cached, H = pass.heads, G = pass.kv_heads,
                D = pass.head_size;
  const int64_t width = kCache == CacheType::int8 ? D + kRowScaleBytes : D;
  if (cos.rank != 2 || !sin.is({pass.table_rows, cos.dims[1]}) || pass.table_rows > INT32_MAX ||
      pass.rotary_size < 2 || pass.rotary_size > D || D > kLargestHeadSize ||
      !q.is({B, T, H * D}) || !k.is({B, T, G * D}) || !v.is({B, T, G * D}) ||
      !past_keys.is({B, G, S, width}) || !past_values.is({B, G, S, width}) ||
      !positions.is({B, T}) || !segments.is({segments.dims[0], kSegmentNumbers}))
    fail(DLM_BAD_BUNDLE, "the shapes of %lld heads on %lld do not fit each other",
         static_cast<long long>(H), static_cast<long long>(G));
  pass.q = q.data, pass.k = k.data, pass.v = v.data;
  pass.past_keys = past_keys.data, pass.past_values = past_values.data;
  pass.positions = positions.data;
  pass.cos = cos.data, pass.sin = sin.data;
  static_assert(sizeof(Segment) == kSegmentNumbers * sizeof(int64_t));
  pass.segments = reinterpret_cast<const Segment*>(segments.data);
  pass.segment_count = segments.dims[0];
  if (!pass.has_good_segments())
    fail(DLM_BAD_BUNDLE, "%lld segments that are not %lld tokens over %lld cached rows",
         static_cast<long long>(segments.dims[0]), static_cast<long long>(T),
         static_cast<long long>(S));
  if (!pass.is_in_table())
    fail(DLM_BAD_BUNDLE, "a position has no row among the tables' %lld",
         static_cast<long long>(pass.table_rows));
  pass.y = call.output<float>(0, {B, T, H * D});
  pass.present_keys = call.output<uint8_t>(1, {B, G, T, width});
  pass.present_values = call.output<uint8_t>(2, {B, G, T, width});
  if (kCache == CacheType::fp32) {
    pass.new_keys = static_cast<float*>(pass.present_keys),
    pass.new_values = static_cast<float*>(pass.present_values);
    return kernels.attention(pass, call);
  }
  const int64_t numbers = B * G * T * D;
  const Scratch scratch(call, node.op.memory, 2 * static_cast<size_t>(numbers) * sizeof(float));
  pass.new_keys = static_cast<float*>(scratch.get()), pass.new_values = pass.new_keys + numbers;
  kernels.attention(pass, call);
}

void compute_candidates(const Kernels& kernels, const Node&, Call& call) {
  const auto logits = call.input<float>(0), bias = call.input<float>(1);
  const int64_t B = logits.dims[0], R = logits.dims[1], V = logits.dims[2];
  if (logits.rank != 3 || V < 2 || V > INT32_MAX || !bias.is({V}))
    fail(DLM_BAD_BUNDLE, "logits and bias do not fit");
  Candidates rows{};
  rows.logits = logits.data;
  rows.bias = bias.data;
  rows.rows = B * R;
  rows.vocab_size = V;
  rows.tokens = call.output<int32_t>(0, {B, R, 2});
  rows.probs = call.output<float>(1, {B, R, 2});
  rows.entropy = call.output<float>(2, {B, R});
  kernels.candidates(rows, call);
}

// ---- What the library calls ----

const Op& op_of(const ort::CustomOp* entry) { return *reinterpret_cast<const Op*>(entry); }

template <class Body>
OrtStatus* reported(const Op& op, Body body) noexcept {
  const auto report = [&](const char* what) {
    std::array<char, 512> text{};
    std::snprintf(text.data(), text.size(), "%s: %s", op.is.name, what);
    return op.api.call<ort::CreateStatus>(ort::kInvalidArgument,
                                          static_cast<const char*>(text.data()));
  };
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return report(error.what());
  } catch (...) {
    return report("failed");
  }
}

OrtStatus* create_node(const ort::CustomOp* entry, const void*, const OrtKernelInfo* info,
                       void** kernel) {
  const Op& op = op_of(entry);
  return reported(op, [&] {
    auto node = std::make_unique<Node>(Node{op});
    if (op.is.read != nullptr) op.is.read(op.api, info, *node);
    *kernel = node.release();
  });
}

OrtStatus* compute_node(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  return reported(node.op, [&] {
    Call call(node.op.api, context);
    node.op.is.compute(*node.op.kernels, node, call);
  });
}

ort::CustomOp make_entry() {
  ort::CustomOp entry{};
  entry.version = ort::kApiVersion;
  entry.get_name = [](const ort::CustomOp* op) { return op_of(op).is.name; };
  entry.get_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  entry.get_input_type = [](const ort::CustomOp* op, size_t i) { return op_of(op).is.inputs[i]; };
  entry.get_input_count = [](const ort::CustomOp* op) { return op_of(op).is.input_count; };
  entry.get_output_type = [](const ort::CustomOp* op, size_t i) { return op_of(op).is.outputs[i]; };
  entry.get_output_count = [](const ort::CustomOp* op) { return op_of(op).is.output_count; };
  entry.destroy_kernel = [](void* kernel) { delete static_cast<Node*>(kernel); };
  entry.get_input_kind = [](const ort::CustomOp* op, size_t i) {
    return op_of(op).is.has_segments && i == kSegments ? ort::kOptionalInput : 0;
  };
  entry.get_output_kind = [](const ort::CustomOp*, size_t) { return 0; };
  entry.get_input_memory = [](const ort::CustomOp*, size_t) { return ort::kMemTypeDefault; };
  entry.get_variadic_input_minimum = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_input_homogeneity = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_output_minimum = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
  entry.create_kernel_v2 = create_node;
  entry.compute_v2 = compute_node;
  entry.get_start_version = [](const ort::CustomOp*) { return 1; };
  entry.get_end_version = [](const ort::CustomOp*) { return 1; };
  return entry;
}

constexpr int F = kFloat, L = kInt64, H = kFloat16, I = kInt8, C = kUint8, S = kFloat8;

constexpr Definition attention(const char* name, int row, decltype(Definition::read) read,
                               decltype(Definition::compute) compute) {
  return {name, {F, F, F, row, row, L, F, F, L}, 9, {F, row, row}, 3, 0, false, read, compute,
          true};
}

constexpr Definition kDefinitions[] = {
    {"Int8Linear", {F, C, F}, 3, {F}, 1, 1, false, read_columns, compute_linear},
    {"Int8Linear2", {F, C, F, C, F}, 5, {F, F}, 2, 2, false, read_columns, compute_linear},
    {"Int8Linear3", {F, C, F, C, F, C, F}, 7, {F, F, F}, 3, 3, false, read_columns, compute_linear},
    {"Int8GatedLinear", {F, C, F, C, F}, 5, {F}, 1, 2, true, read_columns, compute_linear},
    {"Int4Linear", {F, C, H}, 3, {F}, 1, 1, false, read_int4, compute_linear},
    {"Int4Linear2", {F, C, H, C, H}, 5, {F, F}, 2, 2, false, read_int4, compute_linear},
    {"Int4Linear3", {F, C, H, C, H, C, H}, 7, {F, F, F}, 3, 3, false, read_int4, compute_linear},
    {"Int4GatedLinear", {F, C, H, C, H}, 5, {F}, 1, 2, true, read_int4, compute_linear},
    {"Fp32Experts",
     {F, L, F, F, F, F},
     6,
     {F},
     1,
     3,
     false,
     read_experts,
     compute_experts<ExpertFormat::fp32>},
    {"Int8Experts",
     {F, L, F, C, F, C, F, C, F},
     9,
     {F},
     1,
     3,
     false,
     read_experts,
     compute_experts<ExpertFormat::int8>},
    {"Int4Experts",
     {F, L, F, C, H, C, H, C, H},
     9,
     {F},
     1,
     3,
     false,
     read_int4_experts,
     compute_experts<ExpertFormat::int4>},
    {"Int8Embedding", {L, C, F}, 3, {F}, 1, 0, false, nullptr, compute_embedding},
    {"Int4Embedding", {L, C, H}, 3, {F}, 1, 0, false, read_group_size, compute_embedding},
    {"NVFP4Linear", {F, C, S, F}, 4, {F}, 1, 1, false, read_columns, compute_nvfp4_linear},
    attention("CachedAttention", F, read_heads, attend<CacheType::fp32>),
    attention("Fp16CachedAttention", H, read_heads, attend<CacheType::fp16>),
    attention("Int8CachedAttention", I, read_heads, attend<CacheType::int8>),
    attention("BlockCachedAttention", F, read_block, attend<CacheType::fp32>),
    attention("Fp16BlockCachedAttention", H, read_block, attend<CacheType::fp16>),
    attention("Int8BlockCachedAttention", I, read_block, attend<CacheType::int8>),
    {"Candidates", {F, F}, 2, {kInt32, F, F}, 3, 0, false, nullptr, compute_candidates},
};

}  // namespace

struct CustomOps::Domain {
  explicit Domain(const ort::Api& given) : api(given), memory(given), handle(given) {}

  const ort::Api api;
  std::array<Op, std::size(kDefinitions)> ops{};
  Owned<OrtMemoryInfo, ort::ReleaseMemoryInfo> memory;
  Owned<OrtCustomOpDomain, ort::ReleaseCustomOpDomain> handle;
};

CustomOps::CustomOps(const ort::Api& api, const Kernels& kernels)
    : domain_(std::make_unique<Domain>(api)) {
  check(api, api.call<ort::CreateCustomOpDomain>("dlm_export", domain_->handle.out()), kWhere);
  check(api,
        api.call<ort::CreateCpuMemoryInfo>(ort::kDeviceAllocator, ort::kMemTypeDefault,
                                           domain_->memory.out()),
        kWhere);
  for (size_t i = 0; i < domain_->ops.size(); ++i) {
    domain_->ops[i] = {make_entry(), kDefinitions[i], api, &kernels, domain_->memory.get()};
    const ort::CustomOp* const entry = &domain_->ops[i].entry;
    check(api, api.call<ort::CustomOpDomainAdd>(domain_->handle.get(), entry), kWhere);
  }
}

CustomOps::~CustomOps() = default;

void CustomOps::add_to(OrtSessionOptions* options) const {
  check(domain_->api, domain_->api.call<ort::AddCustomOpDomain>(options, domain_->handle.get()),
        kWhere);
}

}  // namespace dlm
