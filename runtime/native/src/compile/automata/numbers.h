// Small helpers for arrays whose indices are int32_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

constexpr int32_t kNone = -1;  // no index

inline size_t index(int32_t number) { return static_cast<size_t>(number); }

// Adds a value to a hash, and returns the new hash.
inline uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

}  // namespace dlm::compile
