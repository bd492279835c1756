// Computes INT8 and INT4 linear layers of many rows with matrix registers. Before this file,
// include a header that defines the namespace `matrix`. The vector kernel of kernels/linear.h runs
// instead if there are few rows, or if the layer's group size does not suit the matrix registers.
// Both kernels give bit-identical results.
//
// A tile has 32 rows, which fill two registers of 16 rows each. A panel has 32 columns, which also
// fill two registers. The bytes of a panel are already stored in the layout of these registers.
// Each of the two tile registers is multiplied by each of the two panel registers. The sums of
// these products need four more registers. So each byte that is loaded into a register is used for
// 32 products.
#pragma once

#include "kernels/linear.h"

namespace {

constexpr int64_t kMatrixRows = 32;  // number of rows in a tile
// The number of rows that one task quantises. This is less than the rows of a tile, so that several
// threads can quantise a single tile.
constexpr int64_t kSliceRows = 8;
constexpr int64_t kMatrixTogether = 8;  // number of tiles that a task multiplies by each panel
// The number of inputs whose INT4 weights are unpacked to bytes at a time. The unpacked weights use
// 8 KiB, which fits the first-level cache.
constexpr int64_t kUnpackedInputs = 256;

// Layers with at most this many rows use the vector kernel, because most rows of the matrix
// registers would contain only padding. The vector kernel needs 16 cycles per row and 2048 weights,
// so 16 rows need 256 cycles. A core does not read 2048 weights from memory in less time. At 3 GHz,
// that would need a bandwidth of 24 GB/s (12 GB/s for INT4), which is more than a core's share of
// the memory bandwidth.
constexpr int64_t kFewRows = 16;

// The formats of codes. In both formats, the codes of rows are signed bytes, and the weights are
// unsigned bytes. One instruction multiplies two registers over kStep inputs.
struct MatrixInt8 : simd::Bytes {
  static constexpr bool kIsInt4 = false;
  static constexpr int32_t kWeightOffset = 128;
  static constexpr int64_t kStep = 64;
};
template <int64_t kInputs>
struct MatrixInt4 : simd::Bytes {
  static constexpr bool kIsInt4 = true;
  static constexpr int32_t kWeightOffset = 8;
  static constexpr int64_t kStep = kInputs;
};

// The data to prefetch while products are computed. With each product, the code prefetches `lines`
// cache lines.
struct Fetched {
  const uint8_t* next;
  int64_t lines;

  // Prefetches `bytes` bytes from `from` on, evenly distributed over `products` products. Stops at
  // `end`.
  Fetched(const uint8_t* from, int64_t bytes, const uint8_t* end, int64_t products)
      : next(from), lines((least(bytes, end - from) + 64 * products - 1) / (64 * products)) {}
};

inline void start_sums() {
  matrix::zero<0>(), matrix::zero<1>(), matrix::zero<2>(), matrix::zero<3>();
}

// Multiplies codes [count, 32, step] by weights [count, step / 4, 32, 4]. Adds the products to the
// sums in the registers.
inline void add_products(const int8_t* codes, const uint8_t* weights, int64_t step, int64_t count,
                         Fetched& fetched) {
  constexpr int64_t kHalf = kMatrixRows / 2, kWidth = kPanel * kDot;
  for (; count > 0; --count, codes += kMatrixRows * step, weights += step * kPanel) {
    matrix::load<6>(weights, kWidth);
    matrix::load<4>(codes, step);
    matrix::multiply<0, 4, 6>();
    matrix::load<7>(weights + kWidth / 2, kWidth);
    matrix::multiply<1, 4, 7>();
    matrix::load<5>(codes + kHalf * step, step);
    matrix::multiply<2, 5, 6>();
    matrix::multiply<3, 5, 7>();
    for (int64_t i = 0; i < fetched.lines; ++i, fetched.next += 64) fetch_ahead(fetched.next, 0);
  }
}

// Stores the sums from the registers as an array [32, 32].
inline void store_sums(int32_t* sums) {
  constexpr int64_t kHalf = kMatrixRows / 2, kWidth = kPanel * kDot;
  matrix::store<0>(sums, kWidth), matrix::store<1>(sums + kPanel / 2, kWidth);
  sums += kHalf * kPanel;
  matrix::store<2>(sums, kWidth), matrix::store<3>(sums + kPanel / 2, kWidth);
}

// Unpacks the INT4 weights of one panel to bytes [inputs / 4, 32, 4].
inline void unpack(const uint8_t* packed, int64_t inputs, uint8_t* bytes) {
  constexpr int64_t kWidth = kPanel * kDot, kVector = kLanes * kDot;
  for (int64_t k = 0; k < inputs; k += dlm::kPairs, packed += kWidth, bytes += 2 * kWidth) {
    unroll<kWidth / kVector>([&](auto v) __attribute__((always_inline)) {
      const auto low = simd::Int4::load<0>(packed + v * kVector),
                 high = simd::Int4::load<1>(packed + v * kVector);
      __builtin_memcpy(bytes + v * kVector, &low, kVector);
      __builtin_memcpy(bytes + kWidth + v * kVector, &high, kVector);
    });
  }
}

template <class Codes>
struct MatrixProduct {
  struct Task {
    const matrix::Registers registers{Codes::kStep};
    explicit Task(const MatrixProduct&) {}
  };
  static constexpr int64_t kTogether = kMatrixTogether, kStep = Codes::kStep;
  static constexpr int kVectors = kPanel / kLanes;

  const dlm::Linear& layer;
  int64_t group_size, groups;
  Tiles tiles;
  // The next arrays contain the data of all tiles. The comments give the shapes per tile. Tiles are
  // padded to 32 rows, and rows are padded to a multiple of `step` inputs.
  int8_t* codes;     // [K / step, 32, step]
  int32_t* offsets;  // [groups, 32]: numbers to add to the sums of each group
  float* scales;     // [32]

  MatrixProduct(const dlm::Linear& of, void* scratch)
      : layer(of),
        group_size(of.group_size == 0 ? of.inputs : of.group_size),
        groups(dlm::groups_of(of.inputs, group_size)),
        tiles(of.rows, kMatrixRows),
        codes(static_cast<int8_t*>(scratch)),
        offsets(reinterpret_cast<int32_t*>(codes + tiles.count * kMatrixRows * products() * kStep)),
        scales(reinterpret_cast<float*>(offsets + tiles.count * kMatrixRows * groups)) {}

  int64_t products() const { return (layer.inputs + kStep - 1) / kStep; }
  const int8_t* codes_of(int64_t tile) const {
    return codes + tile * products() * kStep * kMatrixRows;
  }

  int64_t slices() const { return tiles.count * (kMatrixRows / kSliceRows); }
  void quantise(int64_t slice) const {
    const int64_t K = layer.inputs, tile = slice * kSliceRows / kMatrixRows,
                  row = slice * kSliceRows % kMatrixRows;
    const int64_t rows = most(0, least(kSliceRows, tiles.rows(tile) - row)),
                  left = products() * kStep - K;
    int8_t* const to = codes + (tile * products() * kMatrixRows + row) * kStep;
    const float* const x = layer.x + (tiles.start(tile) + least(row, tiles.rows(tile))) * K;
    quantise_tile<Codes, kStep>(x, rows, K, group_size, kMatrixRows, to,
                                offsets + tile * kMatrixRows * groups + row,
                                scales + tile * kMatrixRows + row);
    for (int64_t product = 0; product < products(); ++product) {
      int8_t* const at = to + product * kMatrixRows * kStep;
      __builtin_memset(at + rows * kStep, 0, (kSliceRows - rows) * kStep);
      if (product < products() - 1) continue;
      for (int64_t r = 0; r < rows; ++r) __builtin_memset(at + (r + 1) * kStep - left, 0, left);
    }
  }

  void multiply(size_t weight, int64_t number, int64_t first, int64_t last) const {
    alignas(64) float results[2][kTogether * kMatrixRows * kPanel];
    for (size_t i = 0; i < (layer.is_gated() ? 2 : 1); ++i) {
      if constexpr (Codes::kIsInt4)
        multiply_int4(layer.weights[weight + i], number, first, last, results[i]);
      else
        multiply_int8(layer.weights[weight + i], number, first, last, results[i]);
    }
    const int64_t all = layer.weights[weight].columns;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t at = (tile - first) * kMatrixRows * kPanel, rows = tiles.rows(tile);
      if (layer.is_gated()) gate(layer.activation, results[0] + at, results[1] + at, rows * kPanel);
      copy_panel(results[0] + at, rows, number, all,
                 layer.outputs[weight] + tiles.start(tile) * all);
    }
  }

  // Multiplies the tiles `first` to `last` - 1 by one panel. Writes the results [tiles, 32, 32].
  void multiply_int8(const dlm::LinearWeight& weight, int64_t number, int64_t first, int64_t last,
                     float* results) const {
    const int64_t K = layer.inputs, bytes = K * kPanel, whole = K / kStep, left = K % kStep;
    const uint8_t* const panel = weight.panels + number * bytes;
    const uint8_t* const end = weight.panels + dlm::padded_columns(weight.columns) * K;
    // If the number of inputs is not a multiple of kStep, the last weights of the panel do not fill
    // a register. This array contains a padded copy of them, because loading a whole register could
    // read past the end of the matrix.
    alignas(64) uint8_t rest[kStep * kPanel];
    __builtin_memcpy(rest, panel + whole * kStep * kPanel, left * kPanel);
    __builtin_memset(rest + left * kPanel, 0, (kStep - left) * kPanel);
    Fetched fetched(panel + bytes, bytes, end, products() * (last - first));
    F column_scales[kVectors];
    load_columns(static_cast<const float*>(weight.scales) + number * kPanel, column_scales);
    for (int64_t tile = first; tile < last; ++tile, results += kMatrixRows * kPanel) {
      start_sums();
      add_products(codes_of(tile), panel, kStep, whole, fetched);
      if (left > 0)
        add_products(codes_of(tile) + whole * kMatrixRows * kStep, rest, kStep, 1, fetched);
      each_sum(tile, 0, [&](int64_t at, int v, F sum) __attribute__((always_inline)) {
        const F scaled = sum * simd::set(scales[tile * kMatrixRows + at / kPanel]);
        simd::store(results + at, scaled * column_scales[v]);
      });
    }
  }

  void multiply_int4(const dlm::LinearWeight& weight, int64_t number, int64_t first, int64_t last,
                     float* results) const {
    const int64_t K = layer.inputs, stretch = kUnpackedInputs / group_size * group_size,
                  bytes = K / 2 * kPanel;
    const uint8_t* const end = weight.panels + dlm::padded_columns(weight.columns) / kPanel * bytes;
    alignas(64) uint8_t unpacked[kUnpackedInputs * kPanel];
    for (int64_t i = 0; i < (last - first) * kMatrixRows * kPanel; i += kLanes)
      simd::store(results + i, simd::zero());
    for (int64_t from = 0; from < K; from += stretch) {
      const int64_t inputs = least(stretch, K - from), count = (inputs + kStep - 1) / kStep;
      const uint8_t* const packed = weight.panels + number * bytes + from / 2 * kPanel;
      unpack(packed, inputs, unpacked);
      __builtin_memset(unpacked + inputs * kPanel, 0, (count * kStep - inputs) * kPanel);
      Fetched fetched(packed + inputs / 2 * kPanel, stretch / 2 * kPanel, end,
                      count * (last - first));
      for (int64_t tile = first; tile < last; ++tile) {
        float* const totals = results + (tile - first) * kMatrixRows * kPanel;
        for (int64_t k = 0; k < inputs; k += group_size) {
          const int64_t group = (from + k) / group_size, there = least(group_size, inputs - k);
          F steps[kVectors];
          load_columns(
              static_cast<const uint16_t*>(weight.scales) + (number * groups + group) * kPanel,
              steps);
          start_sums();
          add_products(codes_of(tile) + (from + k) * kMatrixRows, unpacked + k * kPanel, kStep,
                       (there + kStep - 1) / kStep, fetched);
          each_sum(tile, group, [&](int64_t at, int v, F sum) __attribute__((always_inline)) {
            simd::store(totals + at, simd::fma(sum, steps[v], simd::load(totals + at)));
          });
        }
      }
    }
    for (int64_t tile = first; tile < last; ++tile, results += kMatrixRows * kPanel)
      for (int64_t at = 0; at < tiles.rows(tile) * kPanel; at += kLanes)
        simd::store(results + at,
                    simd::load(results + at) * simd::set(scales[tile * kMatrixRows + at / kPanel]));
  }

  template <class Stored>
  static void load_columns(const Stored* from, F (&to)[kVectors]) {
    unroll<kVectors>(
        [&](auto v) __attribute__((always_inline)) { to[v] = load_scales(from + v * kLanes); });
  }

  // Adds the offsets of a group to the sums of a tile. Then calls `body` for each vector of sums.
  // The arguments of `body` are the index of the vector's first sum in [32, 32], the index of the
  // vector in its row, and the vector itself.
  template <class Body>
  [[gnu::always_inline]] void each_sum(int64_t tile, int64_t group, Body body) const {
    alignas(64) int32_t sums[kMatrixRows * kPanel];
    store_sums(sums);
    const int32_t* const offset = offsets + (tile * groups + group) * kMatrixRows;
    for (int64_t r = 0; r < tiles.rows(tile); ++r)
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        const int64_t at = r * kPanel + v * kLanes;
        body(at, v, simd::to_float(simd::iadd(simd::iload(sums + at), simd::iset(offset[r]))));
      });
  }
};

// Computes a linear layer with matrix registers. If the layer does not suit the registers, runs the
// vector kernel for the same processor.
template <const dlm::Kernels& kVectorKernels>
void matrix_linear(const dlm::Linear& layer, void* scratch, dlm::Parallel& parallel) {
  const int64_t size = layer.group_size;
  if (layer.rows <= kFewRows || size > kUnpackedInputs || size % 32 != 0)
    kVectorKernels.linear(layer, scratch, parallel);
  else if (size == 0)
    run_product(MatrixProduct<MatrixInt8>(layer, scratch), parallel);
  else if (size % 64 == 0)
    run_product(MatrixProduct<MatrixInt4<64>>(layer, scratch), parallel);
  else
    run_product(MatrixProduct<MatrixInt4<32>>(layer, scratch), parallel);
}

}  // namespace
