// Bounds for the Gumbel method (decode/sampling.h). With them, most tokens are rejected without
// computing a logarithm. The host and the kernel for CUDA devices use the same bounds.
#pragma once

#include <string.h>

#include <cstdint>

namespace dlm {

// A token cannot win if (best logit - its logit) / temperature is above kFarthest. This is because
// the random part of a token's score is always between -ln(53 ln 2) and 53 ln 2.
constexpr double kFarthest = 42;

constexpr double kLog2E = 1.4426950408889634;

// Returns an upper bound of 2^power. Unless 2^power is tiny, the bound is at most 1.07 * 2^power.
// The function computes an integer whose bits, read as a float, are about 2^power. This is an upper
// bound, because 2^n (1 + f) >= 2^(n + f) for f in 0..1. To cover rounding errors, the function
// then makes the float larger by one thousandth.
inline float exp_bound(float power) {
  // kOne is the exponent field of the float 1. kStep is the number of floats that have the same
  // exponent.
  constexpr float kOne = 127, kStep = 8388608;
  const float exponent = power + kOne;
  const auto bits =
      static_cast<int32_t>((exponent > 0 ? exponent < 254 ? exponent : 254 : 0) * kStep);
  float bound;
  memcpy(&bound, &bits, sizeof bound);
  return bound * 1.001f + 1e-37f;
}

// Returns a lower bound of 1 - u, where u is the uniform random number whose first word is `word`
// (base/random.h): the first 24 bits of 1 - u.
inline float spare_of(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(~word >> 8)) * 0x1p-24f;
}

}  // namespace dlm
