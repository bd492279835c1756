// Helpers that several kernels use. Before this file, include a header that defines the vector
// operations in the namespace `simd`.
#pragma once

#include <utility>

#include "kernels/kernels.h"

namespace {

using dlm::kDot;
using dlm::kPanel;
using simd::F;
using simd::I;
using simd::kLanes;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Computes 2 ^ x for x <= 127. If x is below -126, the result is 2 ^ -126, which is too small to
// change a softmax. If x is NaN, the result is NaN. The code splits x into an integer n and a
// fraction f in [-0.5, 0.5], and computes 2 ^ f with a polynomial of degree 6. The relative error
// is 1e-7.
inline F exp2(F x) {
  x = simd::max(simd::set(-126.0f), x);
  const F whole = simd::round(x);
  const F f = x - whole;
  F y = simd::set(1.535336188319500e-4f);
  y = simd::fma(y, f, simd::set(1.339887440266574e-3f));
  y = simd::fma(y, f, simd::set(9.618437357674640e-3f));
  y = simd::fma(y, f, simd::set(5.550332471162809e-2f));
  y = simd::fma(y, f, simd::set(2.402264791363012e-1f));
  y = simd::fma(y, f, simd::set(6.931472028550421e-1f));
  y = simd::fma(y, f, simd::set(1.0f));
  return y * simd::power_of_two(simd::to_int(whole));
}

constexpr float kLog2e = 1.44269504088896340736f;

// With fewer numbers than this, one thread does all the work, because it finishes before a second
// thread would wake up.
constexpr int64_t kFewNumbers = 100'000;

// Calls body(0), body(1), ..., body(kCount - 1). Each argument is a compile-time constant. So the
// compiler can keep an array in registers if `body` uses only its argument as the index.
template <int... kNumbers, class Body>
[[gnu::always_inline]] inline void unroll(std::integer_sequence<int, kNumbers...>, Body body) {
  (body(std::integral_constant<int, kNumbers>{}), ...);
}
template <int kCount, class Body>
[[gnu::always_inline]] inline void unroll(Body body) {
  unroll(std::make_integer_sequence<int, kCount>{}, body);
}

// The scale of a row is computed from the largest magnitude in the row. If this magnitude is below
// kSmallestRow, the scale is computed from kSmallestRow instead.
constexpr float kSmallestRow = 1e-30f;

// Returns the bits of the largest magnitude in a row, as an integer. If the row contains NaN or
// infinity, the result is 0x7f800000 or more.
inline int32_t largest_bits(const float* x, int64_t count) {
  I largest = simd::izero();
  const I sign = simd::iset(0x7fffffff);
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes)
    largest = simd::imax(largest, simd::iand(simd::bits(simd::load(x + k)), sign));
  int32_t lanes[kLanes];
  simd::istore(lanes, largest);
  int32_t bits = 0;
  for (const int32_t lane : lanes) bits = lane > bits ? lane : bits;
  for (; k < count; ++k) {
    int32_t one;
    __builtin_memcpy(&one, x + k, sizeof one);
    one &= 0x7fffffff;
    bits = one > bits ? one : bits;
  }
  return bits;
}

// Splits rows into tiles of at most `most` rows. The sizes of two tiles differ by at most one row.
struct Tiles {
  // `count` is the number of tiles. The first `larger` tiles have small + 1 rows each. The other
  // tiles have `small` rows each.
  int64_t count, small, larger;

  Tiles(int64_t rows, int64_t most)
      : count((rows + most - 1) / most), small(rows / count), larger(rows % count) {}
  int64_t start(int64_t tile) const { return tile * small + least(tile, larger); }
  int64_t rows(int64_t tile) const { return small + (tile < larger ? 1 : 0); }
};

// Prefetches the cache line that is `bytes` bytes after `at`. The address may be past the end of
// the data. The function must be inlined. Otherwise GCC deletes the call, because it does not count
// a prefetch as an effect.
[[gnu::always_inline]] inline void fetch_ahead(const void* at, uintptr_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + bytes));
}
// Like fetch_ahead, but prefetches into the second-level cache.
[[gnu::always_inline]] inline void fetch_far_ahead(const void* at, uintptr_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + bytes), 0, 2);
}

// Calls `body` with `number` as a compile-time constant. `number` must be in 1..kMost.
template <int kMost, class Body>
inline void with_constant(int64_t number, Body body) {
  if constexpr (kMost > 1) {
    if (number < kMost) return with_constant<kMost - 1>(number, body);
  }
  body(std::integral_constant<int, kMost>{});
}

// Copies the results [rows, 32] of panel `number` to the columns of this panel in the output `out`.
// `out` has `all` columns.
inline void copy_panel(const float* results, int64_t rows, int64_t number, int64_t all,
                       float* out) {
  const int64_t column = number * kPanel;
  const auto bytes = least(kPanel, all - column) * sizeof(float);
  for (int64_t r = 0; r < rows; ++r)
    __builtin_memcpy(out + r * all + column, results + r * kPanel, bytes);
}

// The number of tiles that a task multiplies by one panel before it goes on to the next panel. The
// codes of these tiles stay in the second-level cache while the task reads panels from memory.
constexpr int64_t kTilesTogether = 20;

}  // namespace
