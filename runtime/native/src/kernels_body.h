// The kernels of kernels.h, written once over `simd`; each instruction set's file includes this after its own vectors.
//
// Everything here has internal linkage and calls nothing of the standard library that could be shared with files compiled
// for lesser processors.
#pragma once

#include <utility>

#include "kernels.h"

namespace {

using dlm::kDot;
using dlm::kPanel;
using simd::Code;
using simd::F;
using simd::I;
using simd::kLanes;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// 2 ^ x for x <= 0 or a little above, NaN for NaN; below -126 it is 2 ^ -126, which is nothing beside the 1 of a softmax.
// A polynomial of degree 6 for the fraction in [-0.5, 0.5]: relative error 1e-7.
inline F exp2(F x) {
  x = simd::max(simd::set(-126.0f), x);
  const F whole = simd::round(x);
  const F f = simd::sub(x, whole);
  F y = simd::set(1.535336188319500e-4f);
  y = simd::fma(y, f, simd::set(1.339887440266574e-3f));
  y = simd::fma(y, f, simd::set(9.618437357674640e-3f));
  y = simd::fma(y, f, simd::set(5.550332471162809e-2f));
  y = simd::fma(y, f, simd::set(2.402264791363012e-1f));
  y = simd::fma(y, f, simd::set(6.931472028550421e-1f));
  y = simd::fma(y, f, simd::set(1.0f));
  return simd::mul(y, simd::power_of_two(simd::to_int(whole)));
}

constexpr float kLog2e = 1.44269504088896340736f;

// ---- INT8 linear layers ----

// How rows are cut into tiles of at most `most` that differ by one row at most.
struct Tiles {
  int64_t count, small, larger;  // the first `larger` tiles have small + 1 rows

  Tiles(int64_t rows, int64_t most) : count((rows + most - 1) / most), small(rows / count), larger(rows % count) {}
  int64_t start(int64_t tile) const { return tile * small + least(tile, larger); }
  int64_t rows(int64_t tile) const { return small + (tile < larger ? 1 : 0); }
};

// What is known of a row besides its codes.
struct RowScale {
  float scale;
  int32_t offset;  // what its sums are too large by: simd::dot sees weights that are simd::kWeightOffset too large
};

// Codes of one tile's rows, laid out [K / 4, rows, 4], four of them in simd::kCodeOrder: as simd::dot wants them.
inline void quantise_tile(const float* x, int64_t rows, int64_t inputs, Code* codes, RowScale* scales) {
  const int64_t whole = inputs / kLanes * kLanes;
  for (int64_t row = 0; row < rows; ++row, x += inputs) {
    I largest = simd::izero();
    const I sign = simd::iset(0x7fffffff);
    for (int64_t k = 0; k < whole; k += kLanes) largest = simd::imax(largest, simd::iand(simd::bits(simd::load(x + k)), sign));
    int32_t lanes[kLanes];
    simd::istore(lanes, largest);
    int32_t bits = 0;  // of the largest magnitude; NaN and infinity are the largest of all
    for (const int32_t lane : lanes) bits = lane > bits ? lane : bits;
    for (int64_t k = whole; k < inputs; ++k) {
      int32_t one;
      __builtin_memcpy(&one, x + k, sizeof one);
      one &= 0x7fffffff;
      bits = one > bits ? one : bits;
    }
    float amax;
    __builtin_memcpy(&amax, &bits, sizeof amax);
    if (bits >= 0x7f800000) {  // every output of the row is NaN: nothing is hidden
      scales[row] = {__builtin_nanf(""), 0};
      for (int64_t k = 0; k < inputs; k += kDot) __builtin_memset(codes + (k * rows + row * kDot), 0, kDot * sizeof(Code));
      continue;
    }
    if (amax < 1e-30f) amax = 1e-30f;
    const float inverse = 127.0f / amax;
    int32_t sum = 0;
    I sums = simd::izero();
    for (int64_t k = 0; k < whole; k += kLanes) {
      const I rounded = simd::to_int(simd::mul(simd::load(x + k), simd::set(inverse)));
      sums = simd::iadd(sums, rounded);
      Code stored[kLanes];
      simd::store_codes(stored, rounded);
      for (int i = 0; i < kLanes / kDot; ++i)
        __builtin_memcpy(codes + ((k + i * kDot) * rows + row * kDot), stored + i * kDot, kDot * sizeof(Code));
    }
    simd::istore(lanes, sums);
    for (const int32_t lane : lanes) sum += lane;
    for (int64_t k = whole; k < inputs; ++k) {
      const auto code = static_cast<Code>(__builtin_lrintf(x[k] * inverse));
      codes[k / kDot * kDot * rows + row * kDot + simd::kCodeOrder[k % kDot]] = code;
      sum += code;
    }
    scales[row] = {amax / 127.0f, simd::kWeightOffset * sum};
  }
}

// Calls body(0) to body(kCount - 1), each with a constant: arrays that it indexes stay in registers.
template <int... kNumbers, class Body>
[[gnu::always_inline]] inline void unroll(std::integer_sequence<int, kNumbers...>, Body body) {
  (body(std::integral_constant<int, kNumbers>{}), ...);
}
template <int kCount, class Body>
[[gnu::always_inline]] inline void unroll(Body body) {
  unroll(std::make_integer_sequence<int, kCount>{}, body);
}

// Products of kRows rows and one panel, scaled, to out [kRows, 32]. While at it, fetches part of what is read next.
template <int kRows>
void multiply_tile(const Code* codes, const uint8_t* panel, int64_t steps, const RowScale* rows, const float* scales,
                   float* out, int64_t stride, const uint8_t* next, int64_t next_stride) {
  constexpr int kVectors = simd::kProductVectors, kSums = kRows * kVectors;
  for (int64_t from = 0; from < kPanel; from += kVectors * kLanes) {
    I sums[kSums];
    unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = simd::izero(); });
    const uint8_t* weight = panel + from * kDot;
    const Code* code = codes;
    for (int64_t step = 0; step < steps; ++step) {
      simd::Weights weights[kVectors];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        weights[v] = simd::load_weights(weight + v * kLanes * kDot);
      });
      simd::prefetch(next);
      next += next_stride;
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const simd::Activations activations = simd::spread(code + r * kDot);
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          sums[r * kVectors + v] = simd::dot(sums[r * kVectors + v], weights[v], activations);
        });
      });
      weight += kPanel * kDot;
      code += kRows * kDot;
    }
    next_stride = 0;
    unroll<kSums>([&](auto i) __attribute__((always_inline)) {
      constexpr int r = i / kVectors, v = i % kVectors;
      const F sum = simd::to_float(simd::isub(sums[i], simd::iset(rows[r].offset)));
      const F scaled = simd::mul(sum, simd::set(rows[r].scale));
      simd::store(out + r * stride + from + v * kLanes, simd::mul(scaled, simd::load(scales + from + v * kLanes)));
    });
  }
}

using MultiplyTile = void (*)(const Code*, const uint8_t*, int64_t, const RowScale*, const float*, float*, int64_t,
                              const uint8_t*, int64_t);

template <int kRows>
MultiplyTile find_multiply_tile(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return find_multiply_tile<kRows - 1>(rows);
  }
  return multiply_tile<kRows>;
}

inline F silu(F x) {
  const F scaled = simd::mul(x, simd::set(-kLog2e));
  // Above 2 ^ 126 the quotient is 0 for every float that x can be.
  return simd::div(x, simd::add(simd::set(1.0f), exp2(simd::min(simd::set(126.0f), scaled))));
}

struct Product {
  const dlm::Int8Linear& layer;
  const Code* codes;
  const RowScale* scales;
  Tiles tiles;

  // Panel `number` of the weights, rows of tiles [first, last).
  void panel(size_t weight, int64_t number, int64_t first, int64_t last) const {
    const int64_t steps = layer.inputs / kDot, bytes = steps * kPanel * kDot;
    const dlm::Int8Weight& w = layer.weights[weight];
    const int64_t column = number * kPanel, columns = least(kPanel, w.columns - column);
    const uint8_t* const here = w.panels + number * bytes;
    const bool is_last = (number + 1) * kPanel >= w.columns;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t start = tiles.start(tile), rows = tiles.rows(tile);
      float* const out = layer.outputs[layer.is_gated ? 0 : weight] + start * w.columns + column;
      // Each tile fetches its share of the next panel, a line (64 bytes) or two a step.
      const int64_t lines = bytes / 64, share = (lines + last - first - 1) / (last - first);
      const uint8_t* const next = is_last ? here : here + bytes + (tile - first) * share * 64;
      const int64_t next_stride = is_last ? 0 : most(1, share / most(1, steps)) * 64;
      float gate[simd::kTileRows * kPanel], whole[simd::kTileRows * kPanel];
      const MultiplyTile multiply = find_multiply_tile<simd::kTileRows>(rows);
      const Code* const a = codes + start * layer.inputs;
      const RowScale* const s = scales + start;
      if (layer.is_gated) {
        multiply(a, here, steps, s, w.scales + column, gate, kPanel, next, next_stride);
        const dlm::Int8Weight& up = layer.weights[1];
        multiply(a, up.panels + number * bytes, steps, s, up.scales + column, whole, kPanel,
                 is_last ? here : up.panels + (next - w.panels), next_stride);
        for (int64_t i = 0; i < rows * kPanel; i += kLanes)
          simd::store(whole + i, simd::mul(silu(simd::load(gate + i)), simd::load(whole + i)));
      } else if (columns == kPanel) {
        multiply(a, here, steps, s, w.scales + column, out, w.columns, next, next_stride);
        continue;
      } else {
        multiply(a, here, steps, s, w.scales + column, whole, kPanel, next, next_stride);
      }
      for (int64_t r = 0; r < rows; ++r)
        __builtin_memcpy(out + r * w.columns, whole + r * kPanel, static_cast<size_t>(columns) * sizeof(float));
    }
  }
};

constexpr int64_t kTilesTogether = 20;  // whose codes stay in the second-level cache while panels go by
constexpr int64_t kTasks = 16;          // a layer is cut into, where it is large enough

void linear(const dlm::Int8Linear& layer, void* scratch, dlm::Parallel& parallel) {
  if (layer.rows == 0) return;
  const Tiles tiles(layer.rows, simd::kTileRows);
  auto* const scales = static_cast<RowScale*>(scratch);
  auto* const codes = reinterpret_cast<Code*>(scales + layer.rows);
  const auto quantise = [&](size_t i) {
    const auto tile = static_cast<int64_t>(i);
    const int64_t start = tiles.start(tile);
    quantise_tile(layer.x + start * layer.inputs, tiles.rows(tile), layer.inputs, codes + start * layer.inputs, scales + start);
  };
  // A few rows are quantised faster than a second thread is woken.
  if (layer.rows * layer.inputs < 100'000)
    for (int64_t tile = 0; tile < tiles.count; ++tile) quantise(static_cast<size_t>(tile));
  else
    parallel.each(static_cast<size_t>(tiles.count), quantise);
  const Product product{layer, codes, scales, tiles};
  const size_t products = layer.is_gated ? 1 : layer.count;
  int64_t panels = 0;
  for (size_t i = 0; i < products; ++i) panels += dlm::padded_columns(layer.weights[i].columns) / kPanel;
  const int64_t groups = (tiles.count + kTilesTogether - 1) / kTilesTogether;
  const int64_t chunk = most(1, least(8, panels * groups / kTasks)), chunks = (panels + chunk - 1) / chunk;
  parallel.each(static_cast<size_t>(groups * chunks), [&](size_t i) {
    const int64_t group = static_cast<int64_t>(i) / chunks, from = static_cast<int64_t>(i) % chunks * chunk;
    const int64_t first = group * kTilesTogether, last = least(first + kTilesTogether, tiles.count);
    for (int64_t n = from; n < least(from + chunk, panels); ++n) {
      size_t weight = 0;
      int64_t number = n;
      while (number >= dlm::padded_columns(layer.weights[weight].columns) / kPanel)
        number -= dlm::padded_columns(layer.weights[weight++].columns) / kPanel;
      product.panel(weight, number, first, last);
    }
  });
}

// ---- NVFP4 linear layers ----

constexpr int64_t kStretch = 128;  // inputs whose weights are floats at a time: 16 KiB, which stay in the first-level cache

// A scale in E4M3; its exponent's bias is 7, a float's 127.
inline float e4m3(uint8_t byte) {
  if ((byte & 0x7f) == 0x7f) return __builtin_nanf("");
  const uint32_t bits = static_cast<uint32_t>(byte & 0x7f) << 20 | static_cast<uint32_t>(byte & 0x80) << 24;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale * 0x1p120f;
}

// One panel's weights of `inputs` inputs as floats [inputs, 32].
inline void decode(const uint8_t* codes, const uint8_t* scales, int64_t inputs, float global_scale, float* weights) {
  constexpr int kVectors = kPanel / kLanes, kHalf = kPanel / 2;
  constexpr int8_t kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // E2M1's values
  const simd::Table table = simd::load_table(kTwice);
  for (int64_t from = 0; from < inputs; from += dlm::kGroup, scales += kPanel) {
    float steps[kPanel];
    for (int64_t column = 0; column < kPanel; ++column) steps[column] = e4m3(scales[column]) * global_scale * 0.5f;
    for (int64_t k = 0; k < dlm::kGroup; ++k, codes += kHalf, weights += kPanel) {
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        constexpr int column = v * kLanes;
        const F value = simd::look_up<column / kHalf * 4>(table, codes + column % kHalf);
        simd::store(weights + column, simd::mul(value, simd::load(steps + column)));
      });
    }
  }
}

// Adds the products of kRows rows, `stride` apart, and a panel's weights [inputs, 32] to sums [kRows, 32].
template <int kRows>
void multiply_floats(const float* x, int64_t stride, const float* weights, int64_t inputs, float* sums) {
  constexpr int kVectors = simd::kProductVectors;
  for (int64_t from = 0; from < kPanel; from += kVectors * kLanes) {
    F total[kRows * kVectors];
    unroll<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      total[i] = simd::load(sums + i / kVectors * kPanel + from + i % kVectors * kLanes);
    });
    const float* weight = weights + from;
    for (int64_t k = 0; k < inputs; ++k, weight += kPanel) {
      F w[kVectors];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) { w[v] = simd::load(weight + v * kLanes); });
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const F one = simd::set(x[r * stride + k]);
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          total[r * kVectors + v] = simd::fma(one, w[v], total[r * kVectors + v]);
        });
      });
    }
    unroll<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      simd::store(sums + i / kVectors * kPanel + from + i % kVectors * kLanes, total[i]);
    });
  }
}

using MultiplyFloats = void (*)(const float*, int64_t, const float*, int64_t, float*);

template <int kRows>
MultiplyFloats find_multiply_floats(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return find_multiply_floats<kRows - 1>(rows);
  }
  return multiply_floats<kRows>;
}

void nvfp4_linear(const dlm::Nvfp4Linear& layer, dlm::Parallel& parallel) {
  if (layer.rows == 0) return;
  const Tiles tiles(layer.rows, simd::kFloatRows);
  const int64_t K = layer.inputs, panels = dlm::padded_columns(layer.columns) / kPanel;
  const int64_t groups = (tiles.count + kTilesTogether - 1) / kTilesTogether;
  parallel.each(static_cast<size_t>(groups * panels), [&](size_t i) {
    const int64_t group = static_cast<int64_t>(i) / panels, panel = static_cast<int64_t>(i) % panels;
    const int64_t first = group * kTilesTogether, last = least(first + kTilesTogether, tiles.count);
    const int64_t top = tiles.start(first), rows = tiles.start(last) - top;
    float sums[kTilesTogether * simd::kFloatRows * kPanel], weights[kStretch * kPanel];
    for (int64_t at = 0; at < rows * kPanel; ++at) sums[at] = 0;
    for (int64_t k = 0; k < K; k += kStretch) {
      const int64_t inputs = least(kStretch, K - k);
      const uint8_t* const scales = layer.scales + (panel * K + k) / dlm::kGroup * kPanel;
      decode(layer.panels + (panel * K + k) * (kPanel / 2), scales, inputs, layer.global_scale, weights);
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tiles.start(tile);
        const MultiplyFloats multiply = find_multiply_floats<simd::kFloatRows>(tiles.rows(tile));
        multiply(layer.x + start * K + k, K, weights, inputs, sums + (start - top) * kPanel);
      }
    }
    const int64_t column = panel * kPanel, columns = least(kPanel, layer.columns - column);
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(layer.y + (top + r) * layer.columns + column, sums + r * kPanel,
                       static_cast<size_t>(columns) * sizeof(float));
  });
}

// ---- Attention ----

constexpr int kKeys = 64;  // whose scores are held at a time

// x [D] turned by a row of the tables [D / 2], rotate-half.
inline void turn(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const F c = simd::load(cos + d), s = simd::load(sin + d), first = simd::load(x + d), second = simd::load(x + half + d);
    simd::store(out + d, simd::sub(simd::mul(first, c), simd::mul(second, s)));
    simd::store(out + half + d, simd::add(simd::mul(second, c), simd::mul(first, s)));
  }
  for (; d < half; ++d) {
    const float first = x[d], second = x[half + d];
    out[d] = first * cos[d] - second * sin[d];
    out[half + d] = second * cos[d] + first * sin[d];
  }
}

// Attention of kQueries queries over the same keys, one a lane of kVectors vectors, with the softmax taken over keys as they
// come (Milakov and Gimelshein, arXiv:1805.02867): no row of scores is ever whole.
template <int kVectors>
class Softmax {
 public:
  static constexpr int kQueries = kVectors * kLanes;

  explicit Softmax(int64_t head_size) : head_size_(head_size) {
    for (int64_t i = 0; i < head_size * kQueries; i += kLanes) simd::store(sums_ + i, simd::zero());
    for (int v = 0; v < kVectors; ++v) largest_[v] = simd::set(-__builtin_inff()), total_[v] = simd::zero();
  }

  // One query's values [D], times `scale`, into its lane.
  void set_query(int64_t lane, const float* query, float scale) {
    for (int64_t d = 0; d < head_size_; ++d) queries_[d * kQueries + lane] = query[d] * scale;
  }

  // `rows` keys and values [rows, D].
  void add(const float* keys, const float* values, int64_t rows) {
    for (int64_t from = 0; from < rows; from += kKeys) {
      const int64_t count = least(kKeys, rows - from);
      score(keys + from * head_size_, count);
      weigh(values + from * head_size_, count);
    }
  }

  // One query's result [D].
  void get_result(int64_t lane, float* out) const {
    float total[kQueries];
    for (int v = 0; v < kVectors; ++v) simd::store(total + v * kLanes, total_[v]);
    for (int64_t d = 0; d < head_size_; ++d) out[d] = sums_[d * kQueries + lane] / total[lane];
  }

 private:
  void score(const float* keys, int64_t count) {
    F largest[kVectors];
    for (int v = 0; v < kVectors; ++v) largest[v] = largest_[v];
    for (int64_t from = 0; from < count; from += simd::kKeyBlock) {
      const int64_t there = least(simd::kKeyBlock, count - from);
      constexpr int kSums = simd::kKeyBlock * kVectors;
      F sums[kSums];
      const float* rows[simd::kKeyBlock];
      unroll<simd::kKeyBlock>([&](auto j) __attribute__((always_inline)) {
        rows[j] = keys + (from + least(j, there - 1)) * head_size_;  // the last one again where there are fewer
      });
      unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = simd::zero(); });
      for (int64_t d = 0; d < head_size_; ++d) {
        F queries[kVectors];
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          queries[v] = simd::load(queries_ + d * kQueries + v * kLanes);
        });
        unroll<simd::kKeyBlock>([&](auto j) __attribute__((always_inline)) {
          const F key = simd::set(rows[j][d]);
          unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
            sums[j * kVectors + v] = simd::fma(key, queries[v], sums[j * kVectors + v]);
          });
        });
      }
      float* const out = scores_ + from * kQueries;
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int v = i % kVectors;
        largest[v] = simd::max(sums[i], largest[v]);  // of a NaN nothing: it comes back through the exponential
        simd::store(out + i * kLanes, sums[i]);
      });
    }
    for (int v = 0; v < kVectors; ++v) {
      shrink_[v] = exp2(simd::sub(largest_[v], largest[v]));
      F total = simd::mul(total_[v], shrink_[v]);
      for (int64_t j = 0; j < count; ++j) {
        float* const at = scores_ + j * kQueries + v * kLanes;
        const F weight = exp2(simd::sub(simd::load(at), largest[v]));
        simd::store(at, weight);
        total = simd::add(total, weight);
      }
      total_[v] = total;
      largest_[v] = largest[v];
    }
  }

  void weigh(const float* values, int64_t count) {
    constexpr int kTogether = simd::kKeyBlock;
    int64_t d = 0;
    for (; d + kTogether <= head_size_; d += kTogether) weigh<kTogether>(values, count, d);
    for (; d < head_size_; ++d) weigh<1>(values, count, d);
  }

  template <int kTogether>
  void weigh(const float* values, int64_t count, int64_t d) {
    constexpr int kSums = kTogether * kVectors;
    F sums[kSums];
    float* const out = sums_ + d * kQueries;
    unroll<kSums>([&](auto i) __attribute__((always_inline)) {
      sums[i] = simd::mul(simd::load(out + i * kLanes), shrink_[i % kVectors]);
    });
    const float* value = values + d;
    const float* weight = scores_;
    for (int64_t j = 0; j < count; ++j, value += head_size_, weight += kQueries) {
      F weights[kVectors];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) { weights[v] = simd::load(weight + v * kLanes); });
      unroll<kTogether>([&](auto i) __attribute__((always_inline)) {
        const F one = simd::set(value[i]);
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          sums[i * kVectors + v] = simd::fma(one, weights[v], sums[i * kVectors + v]);
        });
      });
    }
    unroll<kSums>([&](auto i) __attribute__((always_inline)) { simd::store(out + i * kLanes, sums[i]); });
  }

  const int64_t head_size_;
  F largest_[kVectors], total_[kVectors], shrink_[kVectors];
  alignas(64) float scores_[kKeys * kQueries];
  alignas(64) float queries_[dlm::kLargestHeadSize * kQueries];
  alignas(64) float sums_[dlm::kLargestHeadSize * kQueries];
};

// The new keys and values of one head in the cache's layout.
inline void keep_new_rows(const dlm::CachedAttention& a, int64_t b, int64_t kv_head) {
  const int64_t D = a.head_size, half = D / 2, T = a.tokens;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t from = ((b * T + t) * a.kv_heads + kv_head) * D, to = ((b * a.kv_heads + kv_head) * T + t) * D;
    const int64_t position = a.positions[b * T + t];
    turn(a.k + from, a.cos + position * half, a.sin + position * half, half, a.present_keys + to);
    __builtin_memcpy(a.present_values + to, a.v + from, static_cast<size_t>(D) * sizeof(float));
  }
}

// The queries of all heads that share keys are taken together, in order of token and head.
template <int kVectors>
void attend(const dlm::CachedAttention& a, dlm::Parallel& parallel) {
  constexpr int64_t kQueries = Softmax<kVectors>::kQueries;
  const int64_t D = a.head_size, half = D / 2, T = a.tokens, S = a.cached, group = a.heads / a.kv_heads;
  const int64_t queries = T * group, tiles = (queries + kQueries - 1) / kQueries, caches = a.batch * a.kv_heads;
  if (tiles > 1) {  // whose tasks all read the new rows
    parallel.each(static_cast<size_t>(caches), [&](size_t i) {
      keep_new_rows(a, static_cast<int64_t>(i) / a.kv_heads, static_cast<int64_t>(i) % a.kv_heads);
    });
  }
  // Scores are powers of two: the scale of the exponential goes into the queries.
  const float scale = kLog2e / __builtin_sqrtf(static_cast<float>(D));
  parallel.each(static_cast<size_t>(caches * tiles), [&](size_t i) {
    const int64_t cache = static_cast<int64_t>(i) / tiles, b = cache / a.kv_heads, kv_head = cache % a.kv_heads;
    const int64_t first = static_cast<int64_t>(i) % tiles * kQueries, last = least(first + kQueries, queries);
    if (tiles == 1) keep_new_rows(a, b, kv_head);
    const auto offset = [&](int64_t query) {  // of its row in q and y
      return ((b * T + query / group) * a.heads + kv_head * group + query % group) * D;
    };
    Softmax<kVectors> softmax(D);
    alignas(64) float row[dlm::kLargestHeadSize];
    for (int64_t lane = 0; lane < kQueries; ++lane) {
      const int64_t query = least(first + lane, last - 1);  // lanes without one repeat the last
      const int64_t position = a.positions[b * T + query / group];
      turn(a.q + offset(query), a.cos + position * half, a.sin + position * half, half, row);
      softmax.set_query(lane, row, scale);
    }
    softmax.add(a.past_keys + cache * S * D, a.past_values + cache * S * D, S);
    softmax.add(a.present_keys + cache * T * D, a.present_values + cache * T * D, T);
    for (int64_t query = first; query < last; ++query) softmax.get_result(query - first, a.y + offset(query));
  });
}

void attention(const dlm::CachedAttention& a, dlm::Parallel& parallel) {
  // A few queries do not fill the lanes: then one vector of them is enough.
  if (a.tokens * (a.heads / a.kv_heads) <= kLanes)
    attend<1>(a, parallel);
  else
    attend<simd::kQueryVectors>(a, parallel);
}

// ---- Candidates ----

// The two largest of what was seen, the lower id first where two are equal.
struct Best {
  float logits[2] = {-__builtin_inff(), -__builtin_inff()};
  int32_t ids[2] = {0, 0};

  void see(float logit, int32_t id) {
    const auto is_before = [&](int i) { return logit > logits[i] || (logit == logits[i] && id < ids[i]); };
    if (is_before(0)) {
      logits[1] = logits[0], ids[1] = ids[0];
      logits[0] = logit, ids[0] = id;
    } else if (is_before(1)) {
      logits[1] = logit, ids[1] = id;
    }
  }
};

inline Best find_best(const float* logits, const float* bias, int64_t vocab_size) {
  F first = simd::set(-__builtin_inff()), second = first;
  alignas(64) int32_t numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  I ids = simd::iload(numbers), first_ids = simd::izero(), second_ids = first_ids;
  int64_t i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const F x = simd::add(simd::load(logits + i), simd::load(bias + i));
    second_ids = simd::select_greater(x, first, first_ids, simd::select_greater(x, second, ids, second_ids));
    second = simd::select_greater(x, first, first, simd::select_greater(x, second, x, second));
    first_ids = simd::select_greater(x, first, ids, first_ids);
    first = simd::select_greater(x, first, x, first);
    ids = simd::iadd(ids, simd::iset(kLanes));
  }
  Best best;
  float lanes[2][kLanes];
  int32_t lane_ids[2][kLanes];
  simd::store(lanes[0], first), simd::store(lanes[1], second);
  simd::istore(lane_ids[0], first_ids), simd::istore(lane_ids[1], second_ids);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int rank = 0; rank < 2; ++rank) best.see(lanes[rank][lane], lane_ids[rank][lane]);
  for (; i < vocab_size; ++i) best.see(logits[i] + bias[i], static_cast<int32_t>(i));
  return best;
}

inline float sum_lanes(F x) {
  float lanes[kLanes], sum = 0;
  simd::store(lanes, x);
  for (const float lane : lanes) sum += lane;
  return sum;
}

void candidates(const dlm::Candidates& c, dlm::Parallel& parallel) {
  parallel.each(static_cast<size_t>(c.rows), [&](size_t row) {
    const float* const logits = c.logits + static_cast<int64_t>(row) * c.vocab_size;
    const Best best = find_best(logits, c.bias, c.vocab_size);
    const F largest = simd::set(best.logits[0]), log2e = simd::set(kLog2e);
    F total = simd::zero(), weighed = simd::zero();
    int64_t i = 0;
    while (i + kLanes <= c.vocab_size) {
      // Sums of sums: what is added to one large number alone loses its last bits, 3e-5 of 150000 tokens.
      F part = simd::zero(), part_weighed = simd::zero();
      for (const int64_t end = least(i + 64 * kLanes, c.vocab_size - kLanes + 1); i < end; i += kLanes) {
        const F logit = simd::load(logits + i);
        const F weight = exp2(simd::mul(simd::sub(simd::add(logit, simd::load(c.bias + i)), largest), log2e));
        part = simd::add(part, weight);
        part_weighed = simd::fma(weight, simd::sub(logit, largest), part_weighed);
      }
      total = simd::add(total, part);
      weighed = simd::add(weighed, part_weighed);
    }
    float sum = sum_lanes(total), product = sum_lanes(weighed);
    for (; i < c.vocab_size; ++i) {
      const float behind = logits[i] - best.logits[0], weight = __builtin_expf(behind + c.bias[i]);
      sum += weight;
      product += weight * behind;
    }
    for (int rank = 0; rank < 2; ++rank) {
      c.tokens[2 * row + static_cast<size_t>(rank)] = best.ids[rank];
      c.probs[2 * row + static_cast<size_t>(rank)] = __builtin_expf(best.logits[rank] - best.logits[0]) / sum;
    }
    c.entropy[row] = product / sum - __builtin_logf(sum);
  });
}

}  // namespace
