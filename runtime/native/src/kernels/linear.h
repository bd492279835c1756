// The kernel for INT8 and INT4 linear layers. The kernel is a template with a class `Codes`
// (simd::Int8 or simd::Int4), which defines how weights and rows are read and multiplied. `Codes`
// has these members:
//
// - Code, kCodeOrder, store_codes: the type of a row's codes, the order in which every four codes
//   are stored, and the function that stores them.
// - Weights, load<kPart>: the weights of one step. Each byte of a panel contains kParts weights.
// - Activations, spread, dot: four codes of a row, and their products with weights.
// - kWeightOffset: the constant that the stored weights contain in addition to their values.
// - kMostInputs, widen: the largest number of inputs whose products `dot` can add before the sums
//   must be widened to 32 bits. 0 means that there is no limit.
// - kTileRows, kVectors: the sums of kTileRows rows and kVectors weight vectors fit the registers.
#pragma once

#include <type_traits>

#include "kernels/common.h"

namespace {

// The quantised rows of one tile, and the scales of the rows.
template <class Codes>
struct Tile {
  const typename Codes::Code* codes;  // [K / 4, rows, 4]; every four codes are in the order
                                      // kCodeOrder
  const int32_t* offsets;             // [groups, rows]: initial values of the sums of each group
  const float* scales;                // [rows]
};

// The type of the columns' scales. INT8 has one fp32 scale per column. INT4 has one fp16 scale per
// column and group.
template <class Codes>
using Scale = std::conditional_t<Codes::kParts == 1, float, uint16_t>;

inline F load_scales(const float* from) { return simd::load(from); }
inline F load_scales(const uint16_t* from) { return simd::load_half(from); }

// Weights are prefetched this many bytes ahead. This is useful because hardware prefetchers stop at
// the end of a 4 KiB page. On Zen 4, all distances from 2 to 8 KiB were equally fast. The target is
// the second-level cache. With the first-level cache, passes of 4 tokens took 2 to 5% longer.
constexpr uintptr_t kFetchedAhead = 4096;

template <class Codes>
struct Panel {
  const uint8_t* codes;
  const Scale<Codes>* scales;  // [groups, 32]
  uintptr_t ahead;  // bytes to prefetch ahead: kFetchedAhead for the first tile that uses the
                    // panel, then 0
};

// Quantises some rows of a tile. The codes of the tile are stored as [K / kTogether, stride,
// kTogether], where `stride` is the number of rows of the tile. kTogether must be a power of two.
template <class Codes, int64_t kTogether = kDot>
void quantise_tile(const float* x, int64_t rows, int64_t inputs, int64_t group_size, int64_t stride,
                   typename Codes::Code* codes, int32_t* offsets, float* scales) {
  using Code = typename Codes::Code;
  constexpr int kPiece = kTogether < kLanes ? kTogether : kLanes;
  const int64_t groups = dlm::groups_of(inputs, group_size);
  for (int64_t row = 0; row < rows; ++row, x += inputs) {
    // Offset of the codes of inputs k to k + 3; k is a multiple of 4.
    const auto at = [&](int64_t k) {
      const int64_t inside = k & (kTogether - kDot);
      return codes + (k - inside) * stride + row * kTogether + inside;
    };
    const int32_t bits = largest_bits(x, inputs);
    float amax;
    __builtin_memcpy(&amax, &bits, sizeof amax);
    // If the row contains NaN or infinity, make all outputs of the row NaN, so that the caller
    // notices the error.
    if (bits >= 0x7f800000) {
      scales[row] = __builtin_nanf("");
      for (int64_t k = 0; k < inputs; k += kDot) __builtin_memset(at(k), 0, kDot * sizeof(Code));
      for (int64_t group = 0; group < groups; ++group) offsets[group * stride + row] = 0;
      continue;
    }
    if (amax < kSmallestRow) amax = kSmallestRow;
    const float inverse = 127.0f / amax;
    int64_t k = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t end = least((group + 1) * group_size, inputs);
      int32_t sum = 0;
      I sums = simd::izero();
      for (; k + kLanes <= end; k += kLanes) {
        const I rounded = simd::to_int(simd::load(x + k) * simd::set(inverse));
        sums = simd::iadd(sums, rounded);
        Code stored[kLanes];
        Codes::store_codes(stored, rounded);
        for (int i = 0; i < kLanes; i += kPiece)
          __builtin_memcpy(at(k + i), stored + i, kPiece * sizeof(Code));
      }
      int32_t lanes[kLanes];
      simd::istore(lanes, sums);
      for (const int32_t lane : lanes) sum += lane;
      for (; k < end; ++k) {
        const auto code = static_cast<Code>(__builtin_lrintf(x[k] * inverse));
        at(k / kDot * kDot)[Codes::kCodeOrder[k % kDot]] = code;
        sum += code;
      }
      offsets[group * stride + row] = -Codes::kWeightOffset * sum;
    }
    scales[row] = amax / 127.0f;
  }
}

// Multiplies kRows rows by kVectors vectors of columns over `inputs` inputs, and adds the products
// to `sums`. Advances `code` and `weight` to the next inputs.
template <class Codes, int kRows>
[[gnu::always_inline]] inline void sum_products(const typename Codes::Code*& code,
                                                const uint8_t*& weight, int64_t inputs,
                                                uintptr_t ahead,
                                                I (&sums)[kRows * Codes::kVectors]) {
  constexpr int kVectors = Codes::kVectors;
  constexpr int64_t kRead = kPanel * kDot;
  for (int64_t k = 0; k < inputs; k += kDot * Codes::kParts) {
    unroll<kRead / 64>([&](auto line) __attribute__((always_inline)) {
      fetch_far_ahead(weight, ahead + line * 64);
    });
    unroll<Codes::kParts>([&](auto part) __attribute__((always_inline)) {
      typename Codes::Weights weights[kVectors];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        weights[v] = Codes::template load<part>(weight + v * kLanes * kDot);
      });
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const typename Codes::Activations activations = Codes::spread(code + r * kDot);
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          sums[r * kVectors + v] = Codes::dot(sums[r * kVectors + v], weights[v], activations);
        });
      });
      code += kRows * kDot;
    });
    weight += kRead;
  }
}

// Multiplies kRows rows by one panel. Writes the scaled results to out [kRows, 32].
template <class Codes, int kRows>
[[gnu::noinline]] void multiply_tile(const Tile<Codes>& tile, const Panel<Codes>& panel,
                                     int64_t inputs, int64_t group_size, float* out,
                                     int64_t stride) {
  constexpr int kVectors = Codes::kVectors, kSums = kRows * kVectors;
  for (int64_t from = 0; from < kPanel; from += kVectors * kLanes) {
    const typename Codes::Code* code = tile.codes;
    const uint8_t* weight = panel.codes + from * kDot;
    const Scale<Codes>* scale = panel.scales + from;
    const int32_t* offset = tile.offsets;
    const auto start = [&](I(&sums)[kSums]) __attribute__((always_inline)) {
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        sums[i] = simd::iset(offset[i / kVectors]);
      });
    };
    if constexpr (Codes::kParts == 1) {  // INT8 has only one group
      I sums[kSums];
      start(sums);
      sum_products<Codes, kRows>(code, weight, inputs, panel.ahead, sums);
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int r = i / kVectors, v = i % kVectors;
        const F scaled = simd::to_float(sums[i]) * simd::set(tile.scales[r]);
        simd::store(out + r * stride + from + v * kLanes, scaled * load_scales(scale + v * kLanes));
      });
    } else {
      F totals[kSums];
      unroll<kSums>([&](auto i) __attribute__((always_inline)) { totals[i] = simd::zero(); });
      for (int64_t left = inputs; left > 0; left -= group_size, offset += kRows, scale += kPanel) {
        I sums[kSums];
        start(sums);
        int64_t here = least(group_size, left);
        // With groups of 32 inputs, the codes take 8 times as many bytes as the scales.
        fetch_ahead(scale, panel.ahead / 8);
        if constexpr (Codes::kMostInputs == 0) {
          sum_products<Codes, kRows>(code, weight, here, panel.ahead, sums);
        } else {
          for (; here > 0; here -= Codes::kMostInputs) {
            I narrow[kSums];
            unroll<kSums>([&](auto i)
                              __attribute__((always_inline)) { narrow[i] = simd::izero(); });
            sum_products<Codes, kRows>(code, weight, least(here, Codes::kMostInputs), panel.ahead,
                                       narrow);
            unroll<kSums>([&](auto i) __attribute__((always_inline)) {
              sums[i] = simd::iadd(sums[i], Codes::widen(narrow[i]));
            });
          }
        }
        unroll<kSums>([&](auto i) __attribute__((always_inline)) {
          constexpr int v = i % kVectors;
          totals[i] =
              simd::fma(simd::to_float(sums[i]), load_scales(scale + v * kLanes), totals[i]);
        });
      }
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int r = i / kVectors, v = i % kVectors;
        const F scaled = totals[i] * simd::set(tile.scales[r]);
        simd::store(out + r * stride + from + v * kLanes, scaled);
      });
    }
  }
}

inline F silu(F x) {
  const F scaled = x * simd::set(-kLog2e);
  // The result of exp2 must not be too large for a float, so its argument is at most 126. At this
  // limit, the quotient is nearly 0 for all usual x.
  return x / (simd::set(1.0f) + exp2(simd::min(simd::set(126.0f), scaled)));
}

// Computes 0.5 * x * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 * x^3). The result equals
// x / (1 + exp(-2 * u)).
inline F gelu(F x) {
  constexpr float kScale = -2 * 0.7978845608f * kLog2e;
  const F scaled = x * simd::fma(x * x, simd::set(kScale * 0.044715f), simd::set(kScale));
  return x / (simd::set(1.0f) + exp2(simd::min(simd::set(126.0f), scaled)));
}

// Computes results = activation(results) * up. Processes whole vectors.
inline void gate(dlm::Activation activation, float* results, const float* up, int64_t count) {
  const auto multiply = [&](auto function) {
    for (int64_t i = 0; i < count; i += kLanes)
      simd::store(results + i, function(simd::load(results + i)) * simd::load(up + i));
  };
  if (activation == dlm::Activation::gelu)
    multiply([](F x) { return gelu(x); });
  else
    multiply([](F x) { return silu(x); });
}

template <class Codes>
struct Product {
  struct Task {
    explicit Task(const Product&) {}
  };
  static constexpr int64_t kTogether = kTilesTogether;

  const dlm::Linear& layer;
  int64_t group_size, groups;
  Tiles tiles;
  // The next arrays are in scratch memory. Each of them contains the data of all tiles.
  float* scales;
  int32_t* offsets;
  typename Codes::Code* codes;

  Product(const dlm::Linear& of, void* scratch)
      : layer(of),
        group_size(of.group_size == 0 ? of.inputs : of.group_size),
        groups(dlm::groups_of(of.inputs, group_size)),
        tiles(of.rows, Codes::kTileRows),
        scales(static_cast<float*>(scratch)),
        offsets(reinterpret_cast<int32_t*>(scales + of.rows)),
        codes(reinterpret_cast<typename Codes::Code*>(offsets + of.rows * groups)) {}

  int64_t slices() const { return tiles.count; }
  void quantise(int64_t tile) const {
    const int64_t start = tiles.start(tile), rows = tiles.rows(tile);
    quantise_tile<Codes>(layer.x + start * layer.inputs, rows, layer.inputs, group_size, rows,
                         codes + start * layer.inputs, offsets + start * groups, scales + start);
  }

  // Multiplies tiles of rows by panel `number` of a weight matrix. `first` is the first tile, and
  // `last` - 1 is the last.
  void multiply(size_t weight, int64_t number, int64_t first, int64_t last) const {
    const int64_t all = layer.weights[weight].columns, column = number * kPanel;
    for (int64_t tile = first; tile < last; ++tile) {
      const uintptr_t ahead = tile == first ? kFetchedAhead : 0;
      float* const out = layer.outputs[weight] + tiles.start(tile) * all;
      if (column + kPanel <= all && !layer.is_gated()) {
        multiply(weight, number, tile, ahead, out + column, all);
        continue;
      }
      float results[Codes::kTileRows * kPanel];
      multiply(weight, number, tile, ahead, results, kPanel);
      if (layer.is_gated()) {
        float up[Codes::kTileRows * kPanel];
        multiply(1, number, tile, ahead, up, kPanel);
        gate(layer.activation, results, up, tiles.rows(tile) * kPanel);
      }
      copy_panel(results, tiles.rows(tile), number, all, out);
    }
  }

 private:
  // Multiplies the rows of one tile by one panel. Writes the results to out [rows, 32].
  void multiply(size_t weight, int64_t number, int64_t tile, uintptr_t ahead, float* out,
                int64_t stride) const {
    const dlm::LinearWeight& w = layer.weights[weight];
    const auto* const column_scales = static_cast<const Scale<Codes>*>(w.scales);
    const int64_t start = tiles.start(tile);
    const Tile<Codes> from{codes + start * layer.inputs, offsets + start * groups, scales + start};
    const Panel<Codes> panel{w.panels + number * (layer.inputs / Codes::kParts * kPanel),
                             column_scales + number * groups * kPanel, ahead};
    with_constant<Codes::kTileRows>(tiles.rows(tile), [&](auto rows) {
      multiply_tile<Codes, rows>(from, panel, layer.inputs, group_size, out, stride);
    });
  }
};

constexpr int64_t kTasks = 16;  // number of tasks into which a large layer is divided

// Quantises the rows of a linear layer's input, and multiplies them by every panel of the weights.
// The template argument Product must define these members, like the struct Product above:
//
// - slices: the number of slices into which the rows are divided. quantise(i) quantises slice i.
// - tiles, kTogether: the number of tiles of rows, and the number of tiles that a task processes
//   together.
// - Task: a type. Each task creates an object of this type, which exists while the task multiplies.
// - multiply(weight, number, first, last): multiplies the tiles from `first` to `last` - 1 by panel
//   `number` of a weight matrix.
template <class Product>
void run_product(const Product& product, dlm::Parallel& parallel) {
  const dlm::Linear& layer = product.layer;
  const int64_t slices = product.slices();
  if (layer.rows * layer.inputs < kFewNumbers)
    for (int64_t slice = 0; slice < slices; ++slice) product.quantise(slice);
  else
    parallel.each(slices, [&](int64_t slice) { product.quantise(slice); });
  const size_t products = layer.is_gated() ? 1 : layer.count;
  int64_t panels = 0;
  for (size_t i = 0; i < products; ++i)
    panels += dlm::padded_columns(layer.weights[i].columns) / kPanel;
  const int64_t tiles = product.tiles.count,
                bands = (tiles + Product::kTogether - 1) / Product::kTogether;
  const int64_t chunk = most(1, least(8, panels * bands / kTasks)),
                chunks = (panels + chunk - 1) / chunk;
  parallel.each(bands * chunks, [&](int64_t i) {
    [[maybe_unused]] const typename Product::Task task(product);
    const int64_t band = i / chunks, from = i % chunks * chunk;
    const int64_t first = band * Product::kTogether,
                  last = least(first + Product::kTogether, tiles);
    for (int64_t n = from; n < least(from + chunk, panels); ++n) {
      size_t weight = 0;
      int64_t number = n;
      while (number >= dlm::padded_columns(layer.weights[weight].columns) / kPanel)
        number -= dlm::padded_columns(layer.weights[weight++].columns) / kPanel;
      product.multiply(weight, number, first, last);
    }
  });
}

inline void linear(const dlm::Linear& layer, void* scratch, dlm::Parallel& parallel) {
  if (layer.rows == 0) return;
  if (layer.group_size == 0)
    run_product(Product<simd::Int8>(layer, scratch), parallel);
  else
    run_product(Product<simd::Int4>(layer, scratch), parallel);
}

}  // namespace
