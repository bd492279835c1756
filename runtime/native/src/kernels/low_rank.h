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
  float totals[kRanks];
  int64_t k = 0;
  // A vector may reach into the next row of `a`. The last rows are added one number at a time.
  const int64_t reach = first + vectors * kLanes;
  const int64_t whole = inputs * rank < reach ? 0 : (inputs * rank - reach) / rank + 1;
  const int64_t most_whole = least(whole, inputs);
  with_constant<kRanks / kLanes>(vectors, [&](auto many) __attribute__((always_inline)) {
    // A sum waits for its last addition, so a few vectors need several sums each.
    constexpr int64_t kSums = many > 2 ? 1 : 4;
    F sums[kSums][many];
    for (auto& of_row : sums)
      for (F& sum : of_row) sum = simd::zero();
    for (; k + kSums <= most_whole; k += kSums) {
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        const F by = simd::set(x[k + i]);
        const float* const row = a + (k + i) * rank + first;
        unroll<many>([&](auto j) __attribute__((always_inline)) {
          sums[i][j] = simd::fma(by, simd::load(row + j * kLanes), sums[i][j]);
        });
      });
    }
    for (int64_t j = 0; j < many; ++j) {
      F sum = sums[0][j];
      for (int64_t i = 1; i < kSums; ++i) sum = sum + sums[i][j];
      simd::store(totals + j * kLanes, sum);
    }
  });
  for (; k < inputs; ++k)
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

inline void update_row(const dlm::LowRankUpdates& u, const dlm::LowRankMatrix& m, int64_t row) {
  const float* const y = m.y + row * m.columns;
  float* const out = m.out + row * m.columns;
  if (u.is_updated[row] == 0) {
    __builtin_memcpy(out, y, static_cast<size_t>(m.columns) * sizeof(float));
    return;
  }
  float product[kRanks];
  for (int64_t first = 0; first < m.rank; first += kRanks) {
    const int64_t count = least(kRanks, m.rank - first);
    project_row(u.x + row * u.inputs, m.a, u.inputs, m.rank, first, count, product);
    expand_row(product, m, first, count, first == 0 ? y : out, out);
  }
}

// Computes silu(gate) * up from the outputs of the two matrices.
inline void gate_row(const dlm::LowRankUpdates& u, int64_t row) {
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
  constexpr int64_t kTogether = 16;
  const int64_t parts = (u.rows + kTogether - 1) / kTogether;
  const auto each_row = [&](int64_t part, auto body) {
    const int64_t first = part * kTogether;
    for (int64_t row = first; row < least(first + kTogether, u.rows); ++row) body(row);
  };
  // A pass has few updated rows, so reading a matrix takes the most time. Each is read by one
  // thread.
  const auto count = static_cast<int64_t>(u.count);
  parallel.each(parts * count, [&](int64_t task) {
    each_row(task / count, [&](int64_t row) { update_row(u, u.matrices[task % count], row); });
  });
  if (u.gated == nullptr) return;
  parallel.each(parts,
                [&](int64_t part) { each_row(part, [&](int64_t row) { gate_row(u, row); }); });
}

}  // namespace
