// Computes RMSNorm of a row, and RMSNorm of the sum of two rows.
#pragma once

#include "kernels/common.h"

namespace {

// Returns the factor by which RMSNorm multiplies a row: 1 / sqrt(mean of the squares + epsilon).
// `squares` is the sum of the row's squares.
inline float inverse_size(float squares, int64_t width, float epsilon) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + epsilon);
}

// Computes y = x * inverse * weight. `inverse` comes from inverse_size().
inline void scale_row(const float* x, float inverse, const float* weight, int64_t width, float* y) {
  const F by = simd::set(inverse);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    simd::store(y + i, simd::load(x + i) * by * simd::load(weight + i));
  for (; i < width; ++i) y[i] = x[i] * inverse * weight[i];
}

// Returns the sum of the squares of a row. read(i) returns the vector of the numbers from index i
// on. read_one(i) returns the number at index i, and is called for the numbers after the last whole
// vector.
template <class Read, class ReadOne>
[[gnu::always_inline]] inline float sum_squares(int64_t width, Read read, ReadOne read_one) {
  // Number of sums that are computed in parallel. This hides the latency of multiply-adds.
  constexpr int kSums = 4;
  F sums[kSums];
  unroll<kSums>([&](auto j) __attribute__((always_inline)) { sums[j] = simd::zero(); });
  int64_t i = 0;
  for (; i + kSums * kLanes <= width; i += kSums * kLanes)
    unroll<kSums>([&](auto j) __attribute__((always_inline)) {
      const F x = read(i + j * kLanes);
      sums[j] = simd::fma(x, x, sums[j]);
    });
  for (; i + kLanes <= width; i += kLanes) {
    const F x = read(i);
    sums[0] = simd::fma(x, x, sums[0]);
  }
  float squares = simd::total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < width; ++i) {
    const float x = read_one(i);
    squares += x * x;
  }
  return squares;
}

inline void norm_row(const float* x, const float* weight, int64_t width, float epsilon, float* y) {
  const float squares = sum_squares(
      width, [&](int64_t i) { return simd::load(x + i); }, [&](int64_t i) { return x[i]; });
  scale_row(x, inverse_size(squares, width, epsilon), weight, width, y);
}

inline void add_norm_row(const dlm::AddNorm& a, int64_t row) {
  const int64_t start = row * a.width;
  const float *const x = a.x + start, *const y = a.y + start;
  float* const sum = a.sum + start;
  const float squares = sum_squares(
      a.width,
      [&](int64_t i) {
        const F both = simd::load(x + i) + simd::load(y + i);
        simd::store(sum + i, both);
        return both;
      },
      [&](int64_t i) { return sum[i] = x[i] + y[i]; });
  scale_row(sum, inverse_size(squares, a.width, a.epsilon), a.weight, a.width, a.normed + start);
}

inline void add_norm(const dlm::AddNorm& a, dlm::Parallel& parallel) {
  if (a.rows == 0) return;
  const int64_t together = a.rows * a.width < kFewNumbers ? a.rows : 16;  // number of rows per task
  parallel.each((a.rows + together - 1) / together, [&](int64_t task) {
    const int64_t first = task * together;
    for (int64_t row = first; row < least(first + together, a.rows); ++row) add_norm_row(a, row);
  });
}

}  // namespace
