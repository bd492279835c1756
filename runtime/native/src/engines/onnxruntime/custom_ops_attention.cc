// Custom operators for attention with a cache, for RMSNorm of the sum of two inputs, and for
// candidates (the most likely tokens of each position).
#include <cinttypes>
#include <cmath>

#include "engines/onnxruntime/custom_op.h"

namespace dlm::ops {
namespace {

constexpr int64_t kSegmentNumbers = 4;  // numbers per segment in the input `segments`

void read_heads(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  ask<ort::KernelInfoGetAttributeInt64>(api, info, "heads", &node.heads);
  ask<ort::KernelInfoGetAttributeInt64>(api, info, "kv_heads", &node.kv_heads);
  if (node.kv_heads < 1 || node.heads < node.kv_heads || node.heads % node.kv_heads != 0 ||
      node.heads > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "%" PRId64 " heads over %" PRId64 " are invalid", node.heads,
         node.kv_heads);
}

void read_block(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_heads(api, info, node);
  ask<ort::KernelInfoGetAttributeInt64>(api, info, "visible_block", &node.visible_block);
  if (node.visible_block < 1 || node.visible_block > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "blocks of %" PRId64 " tokens are invalid", node.visible_block);
}

void read_window(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_heads(api, info, node);
  ask<ort::KernelInfoGetAttributeInt64>(api, info, "window", &node.window);
  if (node.window < 1 || node.window > INT32_MAX)
    fail(DLM_BAD_BUNDLE, "a window of %" PRId64 " tokens is invalid", node.window);
}

void read_draft(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_heads(api, info, node);
  node.visible_block = 1;
  node.has_drafts = true;
}

void read_draft_window(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_window(api, info, node);
  read_draft(api, info, node);
}

void read_epsilon(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  ask<ort::KernelInfoGetAttributeFloat>(api, info, "epsilon", &node.epsilon);
  if (!(node.epsilon >= 0)) fail(DLM_BAD_BUNDLE, "the epsilon %g is invalid", double{node.epsilon});
}

template <auto kRead>
void read_normed(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  kRead(api, info, node);
  read_epsilon(api, info, node);
}

template <auto kRead>
void read_scaled(const ort::Api& api, const OrtKernelInfo* info, Node& node) {
  read_normed<kRead>(api, info, node);
  ask<ort::KernelInfoGetAttributeFloat>(api, info, "scale", &node.scale);
  if (!std::isfinite(node.scale))
    fail(DLM_BAD_BUNDLE, "the scale %g is invalid", double{node.scale});
}

template <CacheType kCache>
void attend(const Kernels& kernels, const Node& node, Call& call) {
  const auto q = call.input<float>(0), k = call.input<float>(1), v = call.input<float>(2);
  const auto past_keys = call.input<uint8_t>(3),
             past_values = call.input<uint8_t>(4);  // as bytes, because the kernel does not use the
                                                    // element type
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
  pass.window = node.window;
  pass.has_drafts = node.has_drafts;
  pass.scale = node.scale != 0 ? node.scale : 1 / std::sqrt(static_cast<float>(pass.head_size));
  const int64_t B = pass.batch, T = pass.tokens, S = pass.cached, H = pass.heads, G = pass.kv_heads,
                D = pass.head_size;
  const int64_t width = kCache == CacheType::int8 ? D + kRowScaleBytes : D;
  if (cos.rank != 2 || !sin.is({pass.table_rows, cos.dims[1]}) || pass.table_rows > INT32_MAX / 3 ||
      pass.rotary_size < 2 || pass.rotary_size > D || D > kLargestHeadSize ||
      !q.is({B, T, H * D}) || !k.is({B, T, G * D}) || !v.is({B, T, G * D}) ||
      !past_keys.is({B, G, S, width}) || !past_values.is({B, G, S, width}) ||
      !positions.is({B, T}) || !segments.is({segments.dims[0], kSegmentNumbers}))
    fail(DLM_BAD_BUNDLE,
         "the shapes of %" PRId64 " query heads and %" PRId64 " key heads do not match", H, G);
  // Without causal attention, the operator does not know the positions of cached rows, so it cannot
  // tell which cached rows are in the window.
  if (node.window != 0 && !node.has_drafts && S > 0)
    fail(DLM_UNSUPPORTED,
         "this denoiser has attention in a window, which cannot use a cache: choose a policy with "
         "cache = none");
  pass.q = q.data, pass.k = k.data, pass.v = v.data;
  pass.past_keys = past_keys.data, pass.past_values = past_values.data;
  pass.positions = positions.data;
  pass.cos = cos.data, pass.sin = sin.data;
  if (node.op.is.inputs.size() > kSegments + 1) {
    const auto q_norm = call.input<float>(kSegments + 1), k_norm = call.input<float>(kSegments + 2);
    if (!q_norm.is({D}) || !k_norm.is({D}))
      fail(DLM_BAD_BUNDLE, "the weights of the heads' norms do not have length %" PRId64, D);
    pass.q_norm = q_norm.data, pass.k_norm = k_norm.data, pass.epsilon = node.epsilon;
  }
  static_assert(sizeof(Segment) == kSegmentNumbers * sizeof(int64_t));
  pass.segments = reinterpret_cast<const Segment*>(segments.data);
  pass.segment_count = segments.dims[0];
  const std::vector<int64_t> firsts = first_segments(pass.segments, pass.segment_count);
  pass.first_segments = firsts.data();
  pass.part_count = static_cast<int64_t>(firsts.size()) - 1;
  if (!pass.has_good_segments())
    fail(DLM_BAD_BUNDLE,
         "%" PRId64 " segments do not match %" PRId64 " tokens over %" PRId64 " cached rows",
         segments.dims[0], T, S);
  if (!pass.is_in_table())
    fail(DLM_BAD_BUNDLE, "a position is outside the %" PRId64 " rows of the tables",
         pass.table_rows);
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

void compute_add_norm(const Kernels& kernels, const Node& node, Call& call) {
  const auto x = call.input<float>(0), y = call.input<float>(1), weight = call.input<float>(2);
  if (x.rank < 1 || x.rank != y.rank || !std::equal(x.dims.begin(), x.dims.end(), y.dims.begin()) ||
      !weight.is({x.dims[x.rank - 1]}) || weight.count() < 1)
    fail(DLM_BAD_BUNDLE, "the shapes of the sum and its norm's weight do not match");
  AddNorm rows{};
  rows.x = x.data, rows.y = y.data, rows.weight = weight.data;
  rows.width = weight.count(), rows.rows = x.count() / rows.width;
  rows.epsilon = node.epsilon;
  rows.sum = call.output<float>(0, x.dims.data(), x.rank);
  rows.normed = call.output<float>(1, x.dims.data(), x.rank);
  kernels.add_norm(rows, call);
}

void compute_candidates(const Kernels& kernels, const Node&, Call& call) {
  const auto logits = call.input<float>(0), bias = call.input<float>(1);
  const int64_t B = logits.dims[0], R = logits.dims[1], V = logits.dims[2];
  if (logits.rank != 3 || V < 2 || V > INT32_MAX || !bias.is({V}))
    fail(DLM_BAD_BUNDLE, "the shapes of logits and bias do not match");
  Candidates rows{};
  rows.logits = logits.data;
  rows.bias = bias.data;
  rows.rows = B * R;
  rows.vocab_size = V;
  rows.tokens = call.output<int32_t>(0, {B, R, 2});
  rows.probs = call.output<float>(1, {B, R, 2});
  rows.log_odds = call.output<float>(2, {B, R, 2});
  rows.entropy = call.output<float>(3, {B, R});
  kernels.candidates(rows, call);
}

using namespace short_types;

using Read = decltype(Definition::read);
using Compute = decltype(Definition::compute);

// Defines an attention operator. `row` is the element type of the rows in the cache.
Definition attention(const char* name, int row, Read read, Compute compute) {
  return {name, {F, F, F, row, row, L, F, F, L}, {F, row, row}, read, compute, true};
}

Definition normed_attention(const char* name, int row, Read read, Compute compute) {
  return {name, {F, F, F, row, row, L, F, F, L, F, F}, {F, row, row}, read, compute, true};
}

}  // namespace

std::vector<Definition> attention_operators() {
  constexpr Compute kFp32 = attend<CacheType::fp32>, kFp16 = attend<CacheType::fp16>,
                    kInt8 = attend<CacheType::int8>;
  constexpr Read kNormed = read_normed<read_heads>, kNormedBlock = read_normed<read_block>,
                 kDraft = read_scaled<read_draft>, kDraftWindow = read_scaled<read_draft_window>;
  return {
      attention("CachedAttention", F, read_heads, kFp32),
      attention("Fp16CachedAttention", H, read_heads, kFp16),
      attention("Int8CachedAttention", I, read_heads, kInt8),
      attention("BlockCachedAttention", F, read_block, kFp32),
      attention("Fp16BlockCachedAttention", H, read_block, kFp16),
      attention("Int8BlockCachedAttention", I, read_block, kInt8),
      attention("DraftCachedAttention", F, read_draft, kFp32),
      attention("Fp16DraftCachedAttention", H, read_draft, kFp16),
      attention("Int8DraftCachedAttention", I, read_draft, kInt8),
      attention("WindowCachedAttention", F, read_window, kFp32),
      attention("Fp16WindowCachedAttention", H, read_window, kFp16),
      attention("Int8WindowCachedAttention", I, read_window, kInt8),
      normed_attention("NormedCachedAttention", F, kNormed, kFp32),
      normed_attention("Fp16NormedCachedAttention", H, kNormed, kFp16),
      normed_attention("Int8NormedCachedAttention", I, kNormed, kInt8),
      normed_attention("BlockNormedCachedAttention", F, kNormedBlock, kFp32),
      normed_attention("Fp16BlockNormedCachedAttention", H, kNormedBlock, kFp16),
      normed_attention("Int8BlockNormedCachedAttention", I, kNormedBlock, kInt8),
      normed_attention("DraftNormedCachedAttention", F, kDraft, kFp32),
      normed_attention("Fp16DraftNormedCachedAttention", H, kDraft, kFp16),
      normed_attention("Int8DraftNormedCachedAttention", I, kDraft, kInt8),
      normed_attention("DraftWindowNormedCachedAttention", F, kDraftWindow, kFp32),
      normed_attention("Fp16DraftWindowNormedCachedAttention", H, kDraftWindow, kFp16),
      normed_attention("Int8DraftWindowNormedCachedAttention", I, kDraftWindow, kInt8),
      {"AddNorm", {F, F, F}, {F, F}, read_epsilon, compute_add_norm},
      {"Candidates", {F, F}, {kInt32, F, F, F}, nullptr, compute_candidates},
  };
}

}  // namespace dlm::ops
