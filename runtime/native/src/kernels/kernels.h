// The parts of a pass for which ONNX Runtime's kernels are slow, or use far more memory than the
// weights: INT8, INT4 and NVFP4 linear layers, tied heads, mixtures of experts, attention over a
// cache, and the candidates of a row. One implementation (kernels/body.h) runs on each processor's
// vector instructions; linear layers also have one for matrix registers
// (kernels/linear_by_matrices.h).
//
// Every kernel computes the function of the same name in the exporter's functions.py, which is
// written in ONNX operators. Quantised values are bit-identical. Sums of floats are in another
// order, and exponentials are accurate to 2e-7.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/segment.h"

namespace dlm {

// Runs task(user, i) for every i below count, on one or more threads, and waits for all of them.
class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual void run(size_t count, void (*task)(void* user, size_t i), void* user) = 0;

  template <class Task>
  void each(int64_t count, Task task) {
    run(count, [](void* user, size_t i) { (*static_cast<Task*>(user))(i); }, &task);
  }
};

constexpr int64_t kPanel = 32;  // columns of a weight stored together
constexpr int64_t kDot = 4;     // products that one instruction adds
// Inputs whose INT4 codes share bytes. Group sizes are multiples of it.
constexpr int64_t kPairs = 2 * kDot;
constexpr int64_t kGroup = 16;             // inputs of a column that share a scale in NVFP4
constexpr int64_t kMostInputs = 1 << 16;   // inputs of a linear layer; sums of products fit 32 bits
constexpr int64_t kLargestHeadSize = 512;  // largest head size for attention
constexpr int64_t kRowScaleBytes = 2;      // after the codes of a row of an INT8 cache

// Columns of a stored weight: the last panel is padded with zeros.
constexpr int64_t padded_columns(int64_t columns) {
  return (columns + kPanel - 1) / kPanel * kPanel;
}

// The number of groups of this size; the last one may be shorter.
constexpr int64_t groups_of(int64_t inputs, int64_t group_size) {
  return (inputs + group_size - 1) / group_size;
}

// One linear layer's weight in panels, and its scales; N is padded to whole panels.
//   INT8: codes + 128 [N / 32, K / 4, 32, 4], scales [N]
//   INT4: codes + 8 [N / 32, K / 8, 32, 4]; low nibbles are an input's codes, high nibbles those of
//         the fourth input after it; scales [N / 32, groups, 32] in fp16
struct LinearWeight {
  const uint8_t* panels;
  const void* scales;  // fp32; fp16 for INT4
  int64_t columns;     // N without padding
};

// y_i [rows, columns_i] = x [rows, inputs] @ weight_i. Rows of x are quantised to -127..127. inputs
// is a multiple of 4, or of 8 for INT4. A gated layer has two weights with the same columns and one
// output, silu(x @ weight_0) * (x @ weight_1). INT4: sums of products within a group are integers;
// these, times the group's scale, are added in fp32, in order, by fused multiply-adds.
struct Linear {
  const float* x;
  int64_t rows, inputs;
  const LinearWeight* weights;
  float* const* outputs;
  size_t count;  // number of weights
  bool is_gated;
  int64_t group_size;  // inputs of a column that share a scale, a multiple of 8; 0: INT8

  // The most scratch bytes that any kernel needs, aligned to 64. Some use two bytes per code, or
  // pad to 32 rows and 64 inputs.
  size_t scratch_bytes() const {
    const int64_t by_rows = rows * (2 * inputs + 8),
                  filled_up = (rows + 31) / 32 * 32 * (inputs + inputs / 8 + 72);
    return static_cast<size_t>(by_rows > filled_up ? by_rows : filled_up) + 64;
  }
};

// The format of experts' weights: as in Linear, or fp32 panels [N / 32, K, 32] without scales.
enum class ExpertFormat { fp32, int8, int4 };

// All experts' weights of one layer, one after the other.
struct ExpertWeights {
  const uint8_t* panels;
  const void* scales;
};

// An expert's rows; they follow those of the preceding experts.
struct ExpertGroup {
  int64_t expert, start, rows;
};

// y [rows, inputs]: for each row, the sum over its chosen experts of weight * down(silu(gate(x)) *
// up(x)), with layers like Linear's in this format. Reads only experts that a row has chosen.
struct Experts {
  const float* x;
  const int64_t* chosen;  // [rows, active], below count
  const float* weights;   // [rows, active]
  int64_t rows, active, count, inputs, hidden;
  ExpertWeights gate, up, down;  // [count] of [inputs, hidden] twice, of [hidden, inputs]
  ExpertFormat format;
  int64_t group_size;  // for INT4
  float* y;

  // The most rows at once. Further rows reuse the scratch memory.
  static constexpr int64_t kRowsTogether = 512;

  bool is_in_range() const;  // whether every choice is a valid expert; the kernel needs that

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
  // Bytes of one row's codes, offsets and scale, for any kernel; see Linear::scratch_bytes.
  static int64_t code_bytes(int64_t K) { return 2 * K + 8; }

  // The most scratch bytes that any kernel needs, aligned to 64.
  size_t scratch_bytes() const {
    const int64_t slots = (rows < kRowsTogether ? rows : kRowsTogether) * active;
    const int64_t codes = code_bytes(inputs > hidden ? inputs : hidden),
                  floats = 2 * inputs + hidden;
    return static_cast<size_t>(slots * (8 + 4 * floats + codes)) +
           static_cast<size_t>(count) * sizeof(ExpertGroup);
  }
};

// y [rows, columns] = x [rows, inputs] @ weight, inputs a multiple of 16. A weight is its E2M1
// value times (its group's scale times the tensor's) in fp32; x is not quantised.
struct Nvfp4Linear {
  const float* x;
  int64_t rows, inputs, columns;
  const uint8_t* panels;  // [N / 32, K, 16]: low nibbles are columns 0 to 15, high ones 16 to 31
  const uint8_t* scales;  // E4M3 [N / 32, K / 16, 32]
  float global_scale;
  float* y;
};

// The format of a cached row (the D keys or values of one position and head): floats, fp16, or
// codes followed by a scale (kernels/cache_rows.h).
enum class CacheType { fp32, fp16, int8 };

// Attention of the new tokens over cached and new rows; q, k and v are [B, T, heads, D]. The kernel
// normalises each head of q and k, if there are norm weights, and then rotates the first
// rotary_size numbers by position. Every query sees all cached rows. It sees all new rows if
// visible_block is 0, otherwise those of blocks (of visible_block positions) up to its block.
// Cached rows are read as stored, new ones as computed. With segments, B is 1, and a query sees
// only its segment's rows.
struct CachedAttention {
  CacheType cache;
  const float *q, *k, *v;               // [B, T, H, D], [B, T, Hkv, D] twice
  const void *past_keys, *past_values;  // [B, Hkv, S] rows
  const int64_t* positions;             // [B, T]
  const float *cos, *sin;               // [table_rows, rotary_size / 2]
  int64_t batch, tokens, cached, heads, kv_heads, head_size, rotary_size, table_rows, visible_block;
  const Segment* segments;  // [segment_count], covering T in order; none: one per entry of B
  int64_t segment_count;
  float* y;                             // [B, T, H, D]
  float *new_keys, *new_values;         // [B, Hkv, T, D]
  void *present_keys, *present_values;  // [B, Hkv, T] rows; fp32: the new keys and values
  const float *q_norm, *k_norm;         // [D], weights of each head's RMSNorm; nullptr: no norms
  float epsilon;                        // of both norms

  int64_t row_bytes() const {
    return cache == CacheType::fp32   ? 4 * head_size
           : cache == CacheType::fp16 ? 2 * head_size
                                      : head_size + kRowScaleBytes;
  }

  int64_t parts() const { return segment_count == 0 ? batch : segment_count; }
  Segment part(int64_t i) const {
    return segment_count == 0 ? Segment{0, cached, 0, tokens} : segments[i];
  }
  int64_t batch_of(int64_t part) const { return segment_count == 0 ? part : 0; }

  // True if the segments cover the tokens and are inside past. The kernel requires this.
  bool has_good_segments() const;

  // The last position that a query at `position` sees, if it has a row in the tables.
  int32_t last_seen(int64_t position) const {
    const int64_t end = (position / visible_block + 1) * visible_block;
    return static_cast<int32_t>((end < table_rows ? end : table_rows) - 1);
  }

  // True if every position has a row in the tables. The kernel needs that.
  bool is_in_table() const;
};

// sum = x + y, and its RMSNorm by rows, all [rows, width]:
// normed = sum / sqrt(mean(sum ^ 2) + epsilon) * weight.
struct AddNorm {
  const float *x, *y, *weight;  // weight [width]
  int64_t rows, width;
  float epsilon;
  float *sum, *normed;
};

// The two best tokens of each row and its entropy, from raw logits plus a bias before the softmax.
struct Candidates {
  const float *logits, *bias;  // [rows, V], [V]
  int64_t rows, vocab_size;
  int32_t* tokens;         // [rows, 2], the lower id first if probabilities are equal
  float *probs, *entropy;  // [rows, 2], [rows]: sum p ln p
};

// y [tokens, hidden]: rows of an embedding table that is a tied head's weight, in the panels of
// LinearWeight. Row `id` is column `id` of the head's weight [hidden, V]. Codes are multiplied by
// their scales in fp32.
struct Embedding {
  const int64_t* ids;  // [tokens], each in 0..rows - 1
  int64_t tokens, hidden, rows;
  const uint8_t* panels;
  const void* scales;  // fp32 for INT8, fp16 for INT4
  int64_t group_size;  // inputs of a column that share a scale; 0: INT8
  float* y;

  bool is_in_range() const;  // whether every id is a row; the kernel needs that
};

// The storage format of a tied head's table.
enum class TableType { fp32, bf16, fp16, fp8 };

// y [rows, columns] = x [rows, inputs] @ transposed table: the head of a denoiser that shares its
// embedding table, stored once, one row per token. Sums are fp32.
struct TiedHead {
  const float* x;
  int64_t rows, inputs, columns;
  TableType type;
  const void* table;    // [columns, inputs]; fp8: E4M3
  const float* scales;  // [columns], for fp8; nullptr otherwise
  float* y;
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
};

// Kernels for this architecture. `refusal` says why they do not run here; empty: they do.
struct KernelSet {
  const char* name;
  const Kernels* kernels;  // nullptr: not compiled
  std::string refusal;
};

// All kernel sets, fastest first. The first call detects them.
const std::vector<KernelSet>& list_kernel_sets();

// The sets that run here.
std::vector<const Kernels*> list_kernels();

// Returns the set that DLM_KERNELS names, by default the fastest one. Returns nullptr if no set
// runs here, or if DLM_KERNELS is "none". Throws Error for an unknown name.
const Kernels* find_kernels();

}  // namespace dlm
