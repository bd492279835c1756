// Generates random numbers with Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011).
//
// Each random number depends only on a key and a counter. So a request with the same seed uses the
// same random numbers on every engine. The kernel that draws tokens on a CUDA device includes this
// file too.
#pragma once

#include <cstdint>

namespace dlm {

// A block of random words, or a counter.
struct Words {
  uint32_t words[4];
  uint32_t operator[](int at) const { return words[at]; }
};

inline Words philox(uint64_t key, Words counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0], p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// Each random number has one of these purposes. The purpose is the last word of the counter, so
// random numbers for different purposes are independent.
enum : uint32_t { kScores = 0, kDraws = 1, kNoise = 2 };

// Converts 64 random bits to a uniform random number strictly between 0 and 1. Uses 52 of the bits
// and adds one half to them, so that a double represents the result exactly.
inline double unit(uint32_t high, uint32_t low) {
  const uint64_t bits = (uint64_t{high} << 32 | low) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// Returns a uniform random number strictly between 0 and 1 for one position and one step. `step` is
// the number of earlier passes of the request.
inline double random_score(uint64_t seed, uint32_t step, uint32_t position) {
  const auto words = philox(seed, {{step, position, 0, kScores}});
  return unit(words[0], words[1]);
}

// Returns a uniform random token for one position of a canvas that starts from random tokens.
// `step` is the number of earlier passes over the position's block. The result is never `left_out`.
// `left_out` may be vocab_size.
inline int32_t random_token(uint64_t seed, uint32_t step, uint32_t position, int32_t vocab_size,
                            int32_t left_out) {
  const auto words = philox(seed, {{step, position, 0, kNoise}});
  const int32_t count = left_out < vocab_size ? vocab_size - 1 : vocab_size;
  // The random number is at most 1 - 2^-53, and `count` is below 2^25. So the product stays below
  // `count`, even after rounding.
  const auto token = static_cast<int32_t>(unit(words[0], words[1]) * count);
  return token < left_out ? token : token + 1;
}

}  // namespace dlm
