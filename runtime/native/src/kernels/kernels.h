// Kernels for some parts of a pass: INT8, INT4 and NVFP4 linear layers, tied heads, mixtures of
// experts, attention with a cache, and candidates (the most likely tokens of each position). ONNX
// Runtime's own kernels for these parts are slower, or need much more memory than the weights.
//
// The kernels are written once (kernels/body.h), and compiled for the vector instructions of each
// processor. Linear layers also have a version for matrix registers (kernels/linear_by_matrices.h).
//
// Every kernel computes the same result as the ONNX function with the same name in the exporter's
// operators.py. Quantised numbers are bit-identical. Sums of floats may differ, because the kernels
// add floats in a different order. Exponentials have a relative error of 2e-7.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/segment.h"

namespace dlm {

// Runs task(user, i) for every i from 0 to count - 1, on one or more threads. Returns when all
// tasks are done.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual void run(size_t count, void (*task)(void* user, size_t i), void* user) = 0;

  template <class Task>
  void each(int64_t count, Task task) {
    run(count, [](void* user, size_t i) { (*static_cast<Task*>(user))(i); }, &task);
  }
};

// The number of columns in a panel. A panel is a group of neighbouring columns of a weight matrix.
// Linear layers store their matrices panel by panel.
constexpr int64_t kPanel = 32;
constexpr int64_t kDot = 4;  // number of byte products that one instruction adds up
// INT4 codes are packed in groups of this many inputs. The codes of two inputs of the same group
// share a byte. The group size of a layer is a multiple of this number.
constexpr int64_t kPairs = 2 * kDot;
constexpr int64_t kGroup = 16;  // NVFP4: in each column, this many inputs share a scale
// The largest number of inputs of a linear layer. With more inputs, sums of products would overflow
// 32 bits.
constexpr int64_t kMostInputs = 1 << 16;
constexpr int64_t kLargestHeadSize = 512;  // largest head size for attention
// Size in bytes of the scale at the end of each row of an INT8 cache.
constexpr int64_t kRowScaleBytes = 2;

// Returns the number of columns that a weight matrix of `columns` columns has in memory, where
// columns of zeros fill the last panel.
constexpr int64_t padded_columns(int64_t columns) {
  return (columns + kPanel - 1) / kPanel * kPanel;
}

// Returns the number of groups into which `inputs` inputs are divided. The last group may be
// smaller than group_size.
constexpr int64_t groups_of(int64_t inputs, int64_t group_size) {
  return (inputs + group_size - 1) / group_size;
}

// The weight matrix [K, N] of one linear layer, stored in panels, and its scales. K is the number
// of inputs. N is the number of columns, padded to whole panels. The layout depends on the format:
//   - INT8: codes + 128 as bytes [N / 32, K / 4, 32, 4]; scales [N]
//   - INT4: codes + 8 as bytes [N / 32, K / 8, 32, 4]; scales [N / 32, groups, 32] in fp16. Each
//     byte contains two codes. If the low four bits are the code of input i, the high four bits are
//     the code of input i + 4.
struct LinearWeight {
  const uint8_t* panels;
  const void* scales;  // INT8: fp32; INT4: fp16
  int64_t columns;     // number of columns before padding
};

// gelu is GELU in the form with tanh.
enum class Activation { none, silu, gelu };

// A linear layer with one or more weight matrices. It computes y_i [rows, columns_i] = x [rows,
// inputs] @ weight_i. The kernel quantises the rows of x to -127..127. `inputs` must be a multiple
// of 4, or of 8 for INT4.
//
// A gated layer has two weight matrices with the same number of columns, and one output:
// activation(x @ weight_0) * (x @ weight_1). With Activation::none, the layer is not gated.
//
// INT4 layers have groups of inputs. Within a group, the products are summed as integers. Then the
// sum is multiplied by the group's scale and added to the result, with one fused multiply-add in
// fp32 per group.
struct Linear {
  const float* x;
  int64_t rows, inputs;
  const LinearWeight* weights;
  float* const* outputs;
  size_t count;  // number of weight matrices
  Activation activation;
  // INT4: in each column, this many inputs share a scale. This is a multiple of 8. INT8: 0.
  int64_t group_size;

  bool is_gated() const { return activation != Activation::none; }

  // Returns how many bytes of scratch memory the layer needs. The result is enough for every kernel
  // set, because some kernels use two bytes per code, and some pad to 32 rows and 64 inputs. The
  // memory must be aligned to 64 bytes.
  size_t scratch_bytes() const {
    const int64_t by_rows = rows * (2 * inputs + 8),
                  filled_up = (rows + 31) / 32 * 32 * (inputs + inputs / 8 + 72);
    return static_cast<size_t>(by_rows > filled_up ? by_rows : filled_up) + 64;
  }
};

// The format of the experts' weight matrices. int8 and int4 matrices are stored as in LinearWeight.
// fp32 matrices are stored in panels [N / 32, K, 32] without scales.
enum class ExpertFormat { fp32, int8, int4 };

// The weight matrices of one of the three linear layers (gate, up or down), for all experts. The
// matrices are stored one after another.
struct ExpertWeights {
  const uint8_t* panels;
  const void* scales;
};

// The rows that one expert processes. The kernel sorts the rows by expert, so the rows of an expert
// are contiguous. `start` is the index of the expert's first row.
struct ExpertGroup {
  int64_t expert, start, rows;
};

// A mixture of experts. For each row, y [rows, inputs] is the sum of weight *
// down(activation(gate(x)) * up(x)) over the experts that were chosen for this row. gate, up and
// down are linear layers in the given format. The kernel reads only the matrices of experts that
// were chosen for at least one row.
struct Experts {
  const float* x;
  const int64_t* chosen;  // [rows, active]: the experts of each row, as indices below `count`
  // [rows, active]: the factors by which the outputs of these experts are multiplied.
  const float* weights;
  int64_t rows, active, count, inputs, hidden;
  // gate, up and down each contain `count` matrices. The matrices of gate and up are [inputs,
  // hidden]. The matrices of down are [hidden, inputs].
  ExpertWeights gate, up, down;
  ExpertFormat format;
  Activation activation;
  int64_t group_size;  // for INT4 matrices, as in Linear
  float* y;

  // The kernel processes at most this many rows at a time, so that the scratch memory is limited.
  static constexpr int64_t kRowsTogether = 512;

  // Returns true if all chosen experts exist. The kernel must not run otherwise.
  bool is_in_range() const;

  int64_t inputs_of(bool is_gated) const { return is_gated ? inputs : hidden; }
  int64_t panel_bytes(int64_t K, int64_t N) const {
    const int64_t elements = K * padded_columns(N);
    return format == ExpertFormat::fp32   ? 4 * elements
           : format == ExpertFormat::int8 ? elements
                                          : elements / 2;
  }
  int64_t scale_bytes(int64_t K, int64_t N) const {
    const int64_t width = padded_columns(N);
    return format == ExpertFormat::fp32   ? 0
           : format == ExpertFormat::int8 ? 4 * width
                                          : 2 * width * groups_of(K, group_size);
  }
  // Returns how many bytes the codes, the offsets and the scale of one row need. The result is
  // enough for every kernel set (see Linear::scratch_bytes).
  static int64_t code_bytes(int64_t K) { return 2 * K + 8; }

  // Returns how many bytes of scratch memory the kernel needs. The result is enough for every
  // kernel set. The memory must be aligned to 64 bytes.
  size_t scratch_bytes() const {
    const int64_t slots = (rows < kRowsTogether ? rows : kRowsTogether) * active;
    const int64_t codes = code_bytes(inputs > hidden ? inputs : hidden),
                  floats = 2 * inputs + hidden;
    return static_cast<size_t>(slots * (8 + 4 * floats + codes)) +
           static_cast<size_t>(count) * sizeof(ExpertGroup);
  }
};

// An NVFP4 linear layer. It computes y [rows, columns] = x [rows, inputs] @ weight. `inputs` must
// be a multiple of 16. Each element of `weight` is the product of its E2M1 code (a float of 4
// bits), the scale of its group, and the scale of the whole tensor. The two scales are multiplied
// first, in fp32. x is not quantised.
struct Nvfp4Linear {
  const float* x;
  int64_t rows, inputs, columns;
  // [N / 32, K, 16]: the low four bits are columns 0 to 15, the high four bits are columns 16 to
  // 31.
  const uint8_t* panels;
  const uint8_t* scales;  // E4M3 [N / 32, K / 16, 32]
  float global_scale;
  float* y;
};

// The format of a cached row. A row contains the D keys or the D values of one position and one
// head. It is stored as floats, as fp16, or as INT8 codes followed by a scale
// (kernels/cache_dtypes.h).
enum class CacheType { fp32, fp16, int8 };

// The attention of new tokens to cached and new rows. q, k and v are [B, T, heads, D]: B requests,
// T new tokens, and head size D. If there are norm weights, the kernel first normalises each head
// of q and k. Then the kernel rotates the first rotary_size numbers of each head by the angles of
// the token's position.
//
// Every query sees all cached rows. If visible_block is 0, every query also sees all new rows.
// Otherwise the positions are divided into blocks of visible_block positions, and a query sees the
// new rows of its own block and of earlier blocks. If visible_block is table_rows, n * table_rows
// is added to the positions of block n, which may have any length up to table_rows. If has_drafts
// is true, visible_block must be 1. Then table_rows or 2 * table_rows is added to the positions of
// draft passes, and a query of a draft pass sees all new rows. If window is not 0, a query sees
// only the new rows that are at most `window` positions away. In this case, visible_block must be
// 0, and there must be no cached rows. If there are segments, B is 1, and a query sees only the
// rows of its own request.
//
// The kernel uses cached rows as they are stored. Storing may round numbers. If visible_block is
// not 0, the kernel rounds new rows in the same way before it uses them. So the result does not
// depend on which rows are cached. Otherwise the kernel uses new rows as they were computed.
struct CachedAttention {
  CacheType cache;
  // q: [B, T, H, D]; k and v: [B, T, Hkv, D]. H is the number of query heads, and Hkv is the number
  // of key/value heads.
  const float *q, *k, *v;
  const void *past_keys, *past_values;  // [B, Hkv, S] rows, where S is the number of cached tokens
  const int64_t* positions;             // [B, T]: the position of each token
  const float *cos, *sin;               // [table_rows, rotary_size / 2]
  int64_t batch, tokens, cached, heads, kv_heads, head_size, rotary_size, table_rows, visible_block,
      window;
  bool has_drafts;
  // segments: [segment_count]. Together, the segments cover the T tokens in order. If segment_count
  // is 0, each of the B requests is one segment. first_segments: [part_count + 1], returned by
  // first_segments().
  const Segment* segments;
  int64_t segment_count;
  const int64_t* first_segments;
  int64_t part_count;
  float* y;                      // [B, T, H, D]
  float *new_keys, *new_values;  // [B, Hkv, T, D], the new rows as the kernel uses them
  // [B, Hkv, T] new rows in the cache's format. If the format is fp32, these rows are the arrays
  // new_keys and new_values.
  void *present_keys, *present_values;
  const float *q_norm, *k_norm;  // [D], RMSNorm weights that all heads share; nullptr: no norms
  float epsilon;                 // epsilon of both norms
  float scale;                   // dot products are multiplied by this number
  // The kernel computes only requests whose number of queries per key/value head is in this range.
  int64_t least_queries = 0, most_queries = INT64_MAX;

  int64_t row_bytes() const {
    return cache == CacheType::fp32   ? 4 * head_size
           : cache == CacheType::fp16 ? 2 * head_size
                                      : head_size + kRowScaleBytes;
  }

  // A part is one request of the pass. Without segments, there are B parts. With segments, all
  // segments that have the same tokens form a part.
  int64_t parts() const { return segment_count == 0 ? batch : part_count; }
  Segment part(int64_t i) const {
    return segment_count == 0 ? Segment{0, cached, 0, tokens} : segments[first_segments[i]];
  }
  int64_t segments_of(int64_t i) const {
    return segment_count == 0 ? 1 : first_segments[i + 1] - first_segments[i];
  }
  Segment segment(int64_t i, int64_t number) const {
    return segment_count == 0 ? part(i) : segments[first_segments[i] + number];
  }
  // Returns the number of cached rows of a part.
  int64_t cached_of(int64_t i) const {
    int64_t rows = 0;
    for (int64_t number = 0; number < segments_of(i); ++number) rows += segment(i, number).cached;
    return rows;
  }
  int64_t batch_of(int64_t part) const { return segment_count == 0 ? part : 0; }
  // Returns how many queries of a part use the same key/value head.
  int64_t queries(int64_t i) const { return part(i).tokens * (heads / kv_heads); }
  bool computes(int64_t i) const {
    return queries(i) >= least_queries && queries(i) <= most_queries;
  }

  // Calls `few` for the parts with at most `queries_of_few` queries per key/value head. Then calls
  // `many` for the other parts. Does not call a function if there are no parts for it.
  template <class Few, class Many>
  void split(int64_t queries_of_few, Few few, Many many) const {
    CachedAttention small = *this, large = *this;
    if (queries_of_few < most_queries) small.most_queries = queries_of_few;
    if (queries_of_few >= least_queries) large.least_queries = queries_of_few + 1;
    bool has_few = false, has_many = false;
    for (int64_t i = 0; i < parts(); ++i)
      if (computes(i)) (queries(i) <= queries_of_few ? has_few : has_many) = true;
    if (has_few) few(small);
    if (has_many) many(large);
  }

  // Returns true if the segments cover all tokens, and the cached rows of all segments exist. The
  // kernel must not run otherwise.
  bool has_good_segments() const;

  bool is_draft(int64_t position) const { return has_drafts && position >= table_rows; }
  // Returns the row of the cos and sin tables for a position.
  int64_t table_row(int64_t position) const {
    return position < table_rows ? position : position % table_rows;
  }

  // Returns the last position that a query at `position` sees.
  int32_t last_seen(int64_t position) const {
    if (is_draft(position)) return static_cast<int32_t>(3 * table_rows - 1);
    const int64_t end =
        visible_block == 0 ? position + window + 1 : (position / visible_block + 1) * visible_block;
    return static_cast<int32_t>((end < INT32_MAX ? end : INT32_MAX) - 1);
  }

  // Returns the first position that a query at `position` sees. Drafted tokens see all tokens of
  // their pass.
  int32_t first_seen(int64_t position) const {
    const bool sees_all = window == 0 || position <= window || is_draft(position);
    return static_cast<int32_t>(sees_all ? 0 : position - window);
  }
  bool is_limited() const { return visible_block != 0 || window != 0; }
  // Returns true if new rows are rounded before the kernel uses them.
  bool reads_rounded() const { return visible_block != 0; }

  // Returns true if the cos and sin tables contain a row for every position. The kernel must not
  // run otherwise.
  bool is_in_table() const;
};

// Adds x and y, and normalises each row of the sum with RMSNorm. x, y, sum and normed are [rows,
// width]. normed = sum / sqrt(mean(sum ^ 2) + epsilon) * weight.
struct AddNorm {
  const float *x, *y, *weight;  // weight: [width]
  int64_t rows, width;
  float epsilon;
  float *sum, *normed;
};

// Finds the two most likely tokens of each row, their probabilities p and log odds ln(p / (1 - p)),
// and the entropy of the row. `bias` is added to the logits before the softmax.
struct Candidates {
  const float *logits, *bias;  // logits: [rows, V], bias: [V]
  int64_t rows, vocab_size;
  int32_t* tokens;          // [rows, 2]; if the probabilities are equal, the lower id comes first
  float *probs, *log_odds;  // [rows, 2]
  float* entropy;           // [rows], the sum of p ln p over all tokens
};

// Looks up rows of an embedding table, and writes them to y [tokens, hidden]. The table is the
// weight matrix [hidden, V] of a tied head, stored in panels like a LinearWeight. Row `id` of the
// table is column `id` of this matrix. The kernel multiplies the codes by their scales in fp32.
struct Embedding {
  const int64_t* ids;  // [tokens]; each id must be from 0 to rows - 1
  int64_t tokens, hidden, rows;
  const uint8_t* panels;
  const void* scales;  // INT8: fp32; INT4: fp16
  int64_t group_size;  // INT4: in each column, this many inputs share a scale; INT8: 0
  float* y;

  bool is_in_range() const;  // true if every id is a row of the table
};

// The number format in which a tied head's table is stored.
enum class TableType { fp32, bf16, fp16, fp8 };

// A tied head uses the denoiser's embedding table as its weight matrix. It computes y [rows,
// columns] = x [rows, inputs] @ transposed table. The table is stored once, with one row per token.
// Sums are fp32.
struct TiedHead {
  const float* x;
  int64_t rows, inputs, columns;
  TableType type;
  const void* table;    // [columns, inputs]; fp8: E4M3
  const float* scales;  // fp8: [columns]; otherwise nullptr
  float* y;
};

// A low-rank update of one linear layer: out [rows, columns] = y + x @ a @ b, for updated rows.
struct LowRankMatrix {
  const float *a, *b;  // [inputs, rank], [rank, columns]
  int64_t rank, columns;
  const float* y;
  float* out;  // may be y
};

// Low-rank updates of the outputs of layers with the same input x [rows, inputs]. Rows that are not
// updated are copied. If `gated` is not nullptr, there are two updates, of a gate and of up, and
// gated [rows, columns] = silu(gate) * up.
struct LowRankUpdates {
  const float* x;
  int64_t rows, inputs;
  const uint8_t* is_updated;  // [rows], 0 or 1
  const LowRankMatrix* matrices;
  size_t count;
  float* gated;
};

struct Kernels {
  const char* name;
  void (*linear)(const Linear& layer, void* scratch, Parallel& parallel);
  void (*nvfp4_linear)(const Nvfp4Linear& layer, Parallel& parallel);
  void (*experts)(const Experts& mixture, void* scratch, Parallel& parallel);
  void (*attention)(const CachedAttention& pass, Parallel& parallel);
  void (*add_norm)(const AddNorm& rows, Parallel& parallel);
  void (*candidates)(const Candidates& rows, Parallel& parallel);
  void (*embedding)(const Embedding& table, Parallel& parallel);
  void (*tied_head)(const TiedHead& head, Parallel& parallel);
  void (*low_rank_updates)(const LowRankUpdates& updates, Parallel& parallel);
};

// One of the kernel sets for this architecture. `refusal` says why the processor cannot run the
// kernel set. It is empty if the processor can run the set.
struct KernelSet {
  const char* name;
  const Kernels* kernels;  // nullptr: the compiler did not support these instructions
  std::string refusal;
};

// Lists all kernel sets of this architecture, fastest first. The first call tests which sets can
// run.
const std::vector<KernelSet>& list_kernel_sets();

// Lists the kernel sets that can run on this processor, fastest first.
std::vector<const Kernels*> list_kernels();

// Returns the kernel set to use. If the environment variable DLM_KERNELS is set, returns the kernel
// set with this name. Otherwise returns the fastest set that can run on this processor. Returns
// nullptr if no set can run, or if DLM_KERNELS is "none". Throws Error if there is no kernel set
// with the name in DLM_KERNELS.
const Kernels* find_kernels();

}  // namespace dlm
