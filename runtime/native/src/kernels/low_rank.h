// Adds low-rank updates (LoRA, arXiv:2106.09685) to some rows of the outputs of linear layers.
#pragma once

#include "kernels/common.h"
#include "kernels/linear.h"

namespace {

// The number of columns of `a` that are processed at a time.
constexpr int64_t kRanks = 4 * kLanes;

// Computes the product of x [inputs] and the columns [first, first + count) of a [inputs, rank].
inline void project_row(const float* x, const float* a, int64_t inputs, int64_t rank, int64_t first,
                        int64_t count, float* product) {
  const int64_t vectors = (count + kLanes - 1) / kLanes;
  F sums[kRanks / kLanes];
  for (F& sum : sums) sum = simd::zero();
  // A vector may reach into the next row of `a`. The last rows are added one number at a time.
  const int64_t reach = first + vectors * kLanes;
  const int64_t whole = inputs * rank < reach ? 0 : (inputs * rank - reach) / rank + 1;
  const int64_t most_whole = least(whole, inputs);
  with_constant<kRanks / kLanes>(vectors, [&](auto many) __attribute__((always_inline)) {
    for (int64_t k = 0; k < most_whole; ++k) {
      const F by = simd::set(x[k]);
      const float* const row = a + k * rank + first;
      unroll<many>([&](auto j) __attribute__((always_inline)) {
        sums[j] = simd::fma(by, simd::load(row + j * kLanes), sums[j]);
      });
    }
  });
  float totals[kRanks];
  for (int64_t j = 0; j < vectors; ++j) simd::store(totals + j * kLanes, sums[j]);
  for (int64_t k = most_whole; k < inputs; ++k)
    for (int64_t j = 0; j < count; ++j) totals[j] += x[k] * a[k * rank + first + j];
  for (int64_t j = 0; j < count; ++j) product[j] = totals[j];
}

// Computes out = y + product @ b, for the rows [first, first + count) of b [rank, columns].
inline void expand_row(const float* product, const dlm::LowRankMatrix& m, int64_t first,
                       int64_t count, const float* y, float* out) {
  const float* const b = m.b + first * m.columns;
  int64_t n = 0;
  for (; n + kLanes <= m.columns; n += kLanes) {
    F sum = simd::load(y + n);
    for (int64_t j = 0; j < count; ++j)
      sum = simd::fma(simd::set(product[j]), simd::load(b + j * m.columns + n), sum);
    simd::store(out + n, sum);
  }
  for (; n < m.columns; ++n) {
    float sum = y[n];
    for (int64_t j = 0; j < count; ++j) sum += product[j] * b[j * m.columns + n];
    out[n] = sum;
  }
}

inline void update_row(const dlm::LowRankUpdates& u, int64_t row) {
  const auto bytes = [](int64_t numbers) { return static_cast<size_t>(numbers) * sizeof(float); };
  for (size_t i = 0; i < u.count; ++i) {
    const dlm::LowRankMatrix& m = u.matrices[i];
    const float* const y = m.y + row * m.columns;
    float* const out = m.out + row * m.columns;
    if (u.is_updated[row] == 0) {
      __builtin_memcpy(out, y, bytes(m.columns));
      continue;
    }
    float product[kRanks];
    for (int64_t first = 0; first < m.rank; first += kRanks) {
      const int64_t count = least(kRanks, m.rank - first);
      project_row(u.x + row * u.inputs, m.a, u.inputs, m.rank, first, count, product);
      expand_row(product, m, first, count, first == 0 ? y : out, out);
    }
  }
  if (u.gated == nullptr) return;
  const int64_t columns = u.matrices[0].columns, start = row * columns;
  const float *const gate = u.matrices[0].out + start, *const up = u.matrices[1].out + start;
  float* const gated = u.gated + start;
  int64_t n = 0;
  for (; n + kLanes <= columns; n += kLanes)
    simd::store(gated + n, silu(simd::load(gate + n)) * simd::load(up + n));
  if (n == columns) return;
  float rest[2 * kLanes] = {};
  for (int64_t i = n; i < columns; ++i) rest[i - n] = gate[i], rest[kLanes + i - n] = up[i];
  simd::store(rest, silu(simd::load(rest)) * simd::load(rest + kLanes));
  for (int64_t i = n; i < columns; ++i) gated[i] = rest[i - n];
}

inline void low_rank_updates(const dlm::LowRankUpdates& u, dlm::Parallel& parallel) {
  if (u.rows == 0) return;
  // One thread processes a few rows. Draft passes have few rows, and only these are updated.
  constexpr int64_t kTogether = 16;
  parallel.each((u.rows + kTogether - 1) / kTogether, [&](int64_t task) {
    const int64_t first = task * kTogether;
    for (int64_t row = first; row < least(first + kTogether, u.rows); ++row) update_row(u, row);
  });
}

}  // namespace
