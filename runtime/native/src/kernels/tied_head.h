// The kernel for a tied head. It multiplies rows of activations by the rows of an embedding table.
// The table has the number format of the model's checkpoint, or FP8. Sums are fp32.
#pragma once

#include "kernels/common.h"

namespace {

// The kernel multiplies kTableRows table rows by kHeadRows rows of activations at a time. The sums
// of these products fit the registers.
constexpr int kTableRows = 4, kHeadRows = simd::kFloatRows * simd::kFloatVectors / kTableRows;

// Multiplies kRows rows of x by kTable rows of a table. Writes the products to y, whose rows are
// `stride` apart. At the same time, prefetches the table rows at `ahead`. kLoad loads one vector of
// the table.
template <class Element, F (*kLoad)(const Element*), int kRows, int kTable>
[[gnu::noinline]] void multiply_by_table(const float* x, const Element* table, int64_t inputs,
                                         const Element* ahead, const float* scales, float* y,
                                         int64_t stride) {
  F sums[kRows * kTable];
  unroll<kRows * kTable>([&](auto i) __attribute__((always_inline)) { sums[i] = simd::zero(); });
  const auto add = [&](const float* rows, int64_t row, const Element* elements,
                       int64_t element_row) __attribute__((always_inline)) {
    F weights[kTable];
    unroll<kTable>([&](auto t) __attribute__((always_inline)) {
      weights[t] = kLoad(elements + t * element_row);
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
                       __attribute__((always_inline)) { fetch_ahead(ahead + t * inputs + k, 0); });
    add(x + k, inputs, table + k, inputs);
  }
  if (k < inputs) {  // the last, incomplete vector, which is padded with zeros
    float rows[kRows * kLanes] = {};
    Element elements[kTable * kLanes] = {};
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

template <class Element, F (*kLoad)(const Element*)>
void multiply_head(const dlm::TiedHead& head, dlm::Parallel& parallel) {
  // The largest number of table rows per task. For a small table, tasks have fewer rows.
  constexpr int64_t kTaskRows = 256;
  const auto* const table = static_cast<const Element*>(head.table);
  const Tiles tiles(head.rows, kHeadRows);
  const int64_t K = head.inputs, N = head.columns;
  const int64_t chunk = most(kTableRows, least(kTaskRows, N / 16 / kTableRows * kTableRows)),
                chunks = (N + chunk - 1) / chunk;
  const int64_t bands = (tiles.count + kTilesTogether - 1) / kTilesTogether;
  parallel.each(bands * chunks, [&](int64_t i) {
    const int64_t band = i / chunks, from = i % chunks * chunk, to = least(from + chunk, N);
    const int64_t first = band * kTilesTogether, last = least(first + kTilesTogether, tiles.count);
    for (int64_t n = from; n < to;) {
      const bool is_whole = n + kTableRows <= to;
      const int64_t together = is_whole ? kTableRows : 1;
      // Prefetch the next rows of the table. At the end of the table, prefetch the current rows
      // again.
      const int64_t next = n + 2 * kTableRows <= N ? n + together : n;
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tiles.start(tile);
        with_constant<kHeadRows>(tiles.rows(tile), [&](auto rows) {
          constexpr auto multiply = multiply_by_table<Element, kLoad, rows, kTableRows>,
                         multiply_one = multiply_by_table<Element, kLoad, rows, 1>;
          (is_whole ? multiply : multiply_one)(
              head.x + start * K, table + n * K, K, table + next * K,
              head.scales == nullptr ? nullptr : head.scales + n, head.y + start * N + n, N);
        });
      }
      n += together;
    }
  });
}

void tied_head(const dlm::TiedHead& head, dlm::Parallel& parallel) {
  if (head.rows == 0) return;
  switch (head.type) {
    case dlm::TableType::fp32:
      return multiply_head<float, simd::load>(head, parallel);
    case dlm::TableType::bf16:
      return multiply_head<uint16_t, simd::load_bfloat>(head, parallel);
    case dlm::TableType::fp16:
      return multiply_head<uint16_t, simd::load_half>(head, parallel);
    case dlm::TableType::fp8:
      return multiply_head<uint8_t, simd::load_e4m3>(head, parallel);
  }
}

}  // namespace
