// INT8 linear layers.
#pragma once

#include "kernels_common.h"

namespace {

using simd::Code;

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

}  // namespace
