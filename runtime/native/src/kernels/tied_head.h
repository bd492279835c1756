// The product of a tied head: rows of activations times the rows of an embedding table, stored as
// in the checkpoint or in FP8. Sums are fp32.
#pragma once

#include "kernels/common.h"

namespace {

// One vector of a table's elements.
struct Fp32Table {
  using Element = float;
  static F load(const Element* from) { return simd::load(from); }
};
struct Bf16Table {
  using Element = uint16_t;
  static F load(const Element* from) { return simd::load_bfloat(from); }
};
struct Fp16Table {
  using Element = uint16_t;
  static F load(const Element* from) { return simd::load_half(from); }
};
struct Fp8Table {
  using Element = uint8_t;
  static F load(const Element* from) { return simd::load_e4m3(from); }
};

// The rows of the table and of activations whose sums fit the registers.
constexpr int kTableRows = 4, kHeadRows = simd::kFloatRows * simd::kFloatVectors / kTableRows;

// Multiplies kRows rows of x by kTable rows of a table, to y, whose rows are `stride` apart.
// Prefetches the table rows at `ahead`.
template <class Table, int kRows, int kTable>
void multiply_by_table(const float* x, const typename Table::Element* table, int64_t inputs,
                       const typename Table::Element* ahead, const float* scales, float* y,
                       int64_t stride) {
  F sums[kRows * kTable];
  unroll<kRows * kTable>([&](auto i) __attribute__((always_inline)) { sums[i] = simd::zero(); });
  const auto add = [&](const float* rows, int64_t row, const typename Table::Element* elements,
                       int64_t element_row) __attribute__((always_inline)) {
    F weights[kTable];
    unroll<kTable>([&](auto t) __attribute__((always_inline)) {
      weights[t] = Table::load(elements + t * element_row);
    });
    unroll<kRows>([&](auto r) __attribute__((always_inline)) {
      const F one = simd::load(rows + r * row);
      unroll<kTable>([&](auto t) __attribute__((always_inline)) {
        sums[r * kTable + t] = simd::fma(one, weights[t], sums[r * kTable + t]);
      });
    });
  };
  int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes) {
    unroll<kTable>([&](auto t)
                       __attribute__((always_inline)) { simd::prefetch(ahead + t * inputs + k); });
    add(x + k, inputs, table + k, inputs);
  }
  if (k < inputs) {  // the last vector, padded with zeros
    float rows[kRows * kLanes] = {};
    typename Table::Element elements[kTable * kLanes] = {};
    for (int64_t i = k; i < inputs; ++i) {
      for (int r = 0; r < kRows; ++r) rows[r * kLanes + i - k] = x[r * inputs + i];
      for (int t = 0; t < kTable; ++t) elements[t * kLanes + i - k] = table[t * inputs + i];
    }
    add(rows, kLanes, elements, kLanes);
  }
  unroll<kRows * kTable>([&](auto i) __attribute__((always_inline)) {
    constexpr int r = i / kTable, t = i % kTable;
    const float sum = simd::total(sums[i]);
    y[r * stride + t] = scales == nullptr ? sum : sum * scales[t];
  });
}

template <class Table>
using MultiplyByTable = void (*)(const float*, const typename Table::Element*, int64_t,
                                 const typename Table::Element*, const float*, float*, int64_t);

template <class Table, int kRows, int kTable>
MultiplyByTable<Table> find_multiply_by_table(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return find_multiply_by_table<Table, kRows - 1, kTable>(rows);
  }
  return multiply_by_table<Table, kRows, kTable>;
}

template <class Table>
void multiply_head(const dlm::TiedHead& head, dlm::Parallel& parallel) {
  constexpr int64_t kTaskRows = 256;  // table rows per task; fewer if the table is small
  const auto* const table = static_cast<const typename Table::Element*>(head.table);
  const Tiles tiles(head.rows, kHeadRows);
  const int64_t K = head.inputs, N = head.columns;
  const int64_t chunk = most(kTableRows, least(kTaskRows, N / 16 / kTableRows * kTableRows)),
                chunks = (N + chunk - 1) / chunk;
  const int64_t bands = (tiles.count + kTilesTogether - 1) / kTilesTogether;
  parallel.each(static_cast<size_t>(bands * chunks), [&](size_t i) {
    const int64_t band = static_cast<int64_t>(i) / chunks,
                  from = static_cast<int64_t>(i) % chunks * chunk, to = least(from + chunk, N);
    const int64_t first = band * kTilesTogether, last = least(first + kTilesTogether, tiles.count);
    for (int64_t n = from; n < to;) {
      const bool is_whole = n + kTableRows <= to;
      const int64_t together = is_whole ? kTableRows : 1;
      // The next rows, or the same again at the table's end.
      const int64_t next = n + 2 * kTableRows <= N ? n + together : n;
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tiles.start(tile), rows = tiles.rows(tile);
        const MultiplyByTable<Table> multiply =
            is_whole ? find_multiply_by_table<Table, kHeadRows, kTableRows>(rows)
                     : find_multiply_by_table<Table, kHeadRows, 1>(rows);
        multiply(head.x + start * K, table + n * K, K, table + next * K,
                 head.scales == nullptr ? nullptr : head.scales + n, head.y + start * N + n, N);
      }
      n += together;
    }
  });
}

void tied_head(const dlm::TiedHead& head, dlm::Parallel& parallel) {
  if (head.rows == 0) return;
  switch (head.type) {
    case dlm::TableType::fp32:
      return multiply_head<Fp32Table>(head, parallel);
    case dlm::TableType::bf16:
      return multiply_head<Bf16Table>(head, parallel);
    case dlm::TableType::fp16:
      return multiply_head<Fp16Table>(head, parallel);
    case dlm::TableType::fp8:
      return multiply_head<Fp8Table>(head, parallel);
  }
}

}  // namespace
