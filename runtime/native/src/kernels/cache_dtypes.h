// The formats of cached rows. A row contains the key or the value of one position and one head.
// Each format is a class, Fp16Rows or Int8Rows, with these functions:
//
//   bytes(D)             returns the bytes of a row of D numbers
//   widen(row, D, out)   converts a row to floats
//   store(x, D, row)     stores D floats as a row
#pragma once

#include "kernels/common.h"

namespace {

// Calls one_vector(in, out) for every kLanes numbers. If the last vector is incomplete, one_vector
// gets a padded copy of it.
template <class In, class Out, class OneVector>
[[gnu::always_inline]] inline void each_vector(const In* in, int64_t count, Out* out,
                                               OneVector one_vector) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) one_vector(in + i, out + i);
  if (i == count) return;
  const auto left = count - i;
  In last[kLanes] = {};
  Out made[kLanes];
  __builtin_memcpy(last, in + i, left * sizeof(In));
  one_vector(last, made);
  __builtin_memcpy(out + i, made, left * sizeof(Out));
}

struct Fp16Rows {
  static int64_t bytes(int64_t size) { return 2 * size; }

  static void widen(const void* row, int64_t size, float* out) {
    each_vector(static_cast<const uint16_t*>(row), size, out,
                [](const uint16_t* in, float* to) { simd::store(to, simd::load_half(in)); });
  }

  static void store(const float* x, int64_t size, void* row) {
    each_vector(x, size, static_cast<uint16_t*>(row),
                [](const float* in, uint16_t* to) { simd::store_half(to, simd::load(in)); });
  }
};

// The INT8 format. Each row consists of the codes, followed by two signed bytes m and e. The scale
// of the row is (128 + m) * 2 ^ (e + 1). If e is 127, the scale is infinite. Then codes of 0 give
// NaN, and all other codes give infinity.
struct Int8Rows {
  static int64_t bytes(int64_t size) { return size + dlm::kRowScaleBytes; }

  static void widen(const void* row, int64_t size, float* out) {
    const auto* const codes = static_cast<const int8_t*>(row);
    const F scale =
        simd::set(static_cast<float>(128 + codes[size]) * power_of_two(128 + codes[size + 1]));
    each_vector(codes, size, out, [scale](const int8_t* in, float* to) {
      simd::store(to, simd::load_codes(in) * scale);
    });
  }

  static void store(const float* x, int64_t size, void* row) {
    auto* const codes = static_cast<int8_t*>(row);
    const int32_t bits = largest_bits(x, size);
    if (bits >= 0x7f800000) {
      __builtin_memset(codes, 0, size + 1);
      codes[size + 1] = 127;
      return;
    }
    float wanted;
    __builtin_memcpy(&wanted, &bits, sizeof wanted);
    wanted = (wanted < kSmallestRow ? kSmallestRow : wanted) / 127.0f;
    // Round `wanted` up to the next scale that can be stored. These scales are integers from 128 to
    // 255, multiplied by a power of two. If rounding gives 256, use 128 and the next power of two.
    int32_t wanted_bits;
    __builtin_memcpy(&wanted_bits, &wanted, sizeof wanted_bits);
    const int32_t exponent = ((wanted_bits + 0xffff) >> 23) - 7;
    const float multiple = wanted * power_of_two(254 - exponent);
    auto mantissa = static_cast<int32_t>(multiple);
    if (static_cast<float>(mantissa) < multiple) ++mantissa;
    const F scale = simd::set(static_cast<float>(mantissa) * power_of_two(exponent));
    each_vector(x, size, codes, [scale](const float* in, int8_t* to) {
      simd::Bytes::store_codes(to, simd::to_int(simd::load(in) / scale));
    });
    codes[size] = static_cast<int8_t>(mantissa - 128);
    codes[size + 1] = static_cast<int8_t>(exponent - 128);
  }

 private:
  // Returns the float 2 ^ (field - 127). `field` is the float's exponent field, from 0 to 255.
  static float power_of_two(int32_t field) {
    const uint32_t bits = static_cast<uint32_t>(field) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return power;
  }
};

}  // namespace
