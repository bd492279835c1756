// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//
// A draw is a pure function of key and counter, so a seeded run repeats on any engine.
#pragma once

#include <array>
#include <cstdint>

namespace dlm {

inline std::array<uint32_t, 4> philox(uint64_t key, std::array<uint32_t, 4> counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0], p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// The purpose of a random number. It is the last word of the counter, so purposes share no numbers.
enum : uint32_t { kScores = 0, kDraws = 1 };

// Uniform in (0, 1), both ends excluded. Uses 52 bits plus one half, which fits a double exactly.
inline double unit(uint32_t high, uint32_t low) {
  const uint64_t bits = (uint64_t{high} << 32 | low) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// Uniform in (0, 1) for a position at a step. step counts the request's passes.
inline double random_score(uint64_t seed, uint32_t step, uint32_t position) {
  const auto words = philox(seed, {step, position, 0, kScores});
  return unit(words[0], words[1]);
}

}  // namespace dlm
