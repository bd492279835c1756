// The kernel for NVFP4 linear layers. Other kernels also use the functions of this file that
// multiply matrices of floats.
#pragma once

#include "kernels/common.h"

namespace {

// The number of inputs whose weights are decoded at a time. The decoded weights use 16 KiB, which
// fits the first-level cache.
constexpr int64_t kStretch = 128;

// Decodes a scale in the format E4M3. The exponent bias is 7 in E4M3, and 127 in a float.
inline float e4m3(uint8_t byte) {
  if ((byte & 0x7f) == 0x7f) return __builtin_nanf("");
  const uint32_t bits =
      static_cast<uint32_t>(byte & 0x7f) << 20 | static_cast<uint32_t>(byte & 0x80) << 24;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale * 0x1p120f;
}

// Decodes the weights of one panel to floats [inputs, 32].
inline void decode(const uint8_t* codes, const uint8_t* scales, int64_t inputs, float global_scale,
                   float* weights) {
  constexpr int kVectors = kPanel / kLanes, kHalf = kPanel / 2;
  constexpr int8_t kTwice[] = {0, 1, 2, 3, 4, 6, 8, 12,
                               // the numbers that E2M1 can represent, times two
                               0, -1, -2, -3, -4, -6, -8, -12};
  const simd::Table table = simd::load_table(kTwice);
  for (int64_t from = 0; from < inputs; from += dlm::kGroup, scales += kPanel) {
    float steps[kPanel];
    for (int64_t column = 0; column < kPanel; ++column)
      steps[column] = e4m3(scales[column]) * global_scale * 0.5f;
    for (int64_t k = 0; k < dlm::kGroup; ++k, codes += kHalf, weights += kPanel) {
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        constexpr int column = v * kLanes;
        const F value = simd::look_up<column / kHalf * 4>(table, codes + column % kHalf);
        simd::store(weights + column, value * simd::load(steps + column));
      });
    }
  }
}

// Multiplies kRows rows by a panel's weights [inputs, 32]. In memory, the rows are `stride` floats
// apart. Adds the products to sums [kRows, 32].
template <int kRows>
[[gnu::noinline]] void multiply_floats(const float* x, int64_t stride, const float* weights,
                                       int64_t inputs, float* sums) {
  constexpr int kVectors = simd::kFloatVectors;
  for (int64_t from = 0; from < kPanel; from += kVectors * kLanes) {
    F total[kRows * kVectors];
    unroll<kRows * kVectors>([&](auto i) __attribute__((always_inline)) {
      total[i] = simd::load(sums + i / kVectors * kPanel + from + i % kVectors * kLanes);
    });
    const float* weight = weights + from;
    for (int64_t k = 0; k < inputs; ++k, weight += kPanel) {
      F w[kVectors];
      unroll<kVectors>(
          [&](auto v) __attribute__((always_inline)) { w[v] = simd::load(weight + v * kLanes); });
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

// Multiplies tiles of rows of x [rows, K] by a panel. `first` is the first tile, and `last` - 1 is
// the last. Writes the results to sums [rows, 32]. weights_of(k, inputs) returns the panel's
// weights [inputs, 32] for the inputs from k on.
template <class WeightsOf>
void sum_floats(const float* x, int64_t K, const Tiles& tiles, int64_t first, int64_t last,
                float* sums, WeightsOf weights_of) {
  const int64_t top = tiles.start(first);
  for (int64_t i = 0; i < (tiles.start(last) - top) * kPanel; ++i) sums[i] = 0;
  for (int64_t k = 0; k < K; k += kStretch) {
    const int64_t inputs = least(kStretch, K - k);
    const float* const weights = weights_of(k, inputs);
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t start = tiles.start(tile);
      with_constant<simd::kFloatRows>(tiles.rows(tile), [&](auto rows) {
        multiply_floats<rows>(x + start * K + k, K, weights, inputs, sums + (start - top) * kPanel);
      });
    }
  }
}

void nvfp4_linear(const dlm::Nvfp4Linear& layer, dlm::Parallel& parallel) {
  if (layer.rows == 0) return;
  const Tiles tiles(layer.rows, simd::kFloatRows);
  const int64_t K = layer.inputs, panels = dlm::padded_columns(layer.columns) / kPanel;
  const int64_t groups = (tiles.count + kTilesTogether - 1) / kTilesTogether;
  parallel.each(groups * panels, [&](int64_t i) {
    const int64_t group = i / panels, panel = i % panels;
    const int64_t first = group * kTilesTogether, last = least(first + kTilesTogether, tiles.count);
    const int64_t top = tiles.start(first), rows = tiles.start(last) - top;
    float sums[kTilesTogether * simd::kFloatRows * kPanel], weights[kStretch * kPanel];
    sum_floats(layer.x, K, tiles, first, last, sums, [&](int64_t k, int64_t inputs) {
      decode(layer.panels + (panel * K + k) * (kPanel / 2),
             layer.scales + (panel * K + k) / dlm::kGroup * kPanel, inputs, layer.global_scale,
             weights);
      return weights;
    });
    copy_panel(sums, rows, panel, layer.columns, layer.y + top * layer.columns);
  });
}

}  // namespace
