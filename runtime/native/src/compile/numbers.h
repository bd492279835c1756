// Small helpers for arrays whose elements are numbered by int32_t.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dlm::compile {

inline size_t index(int32_t number) { return static_cast<size_t>(number); }

// Returns the hash after adding a value to it.
inline uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

}  // namespace dlm::compile
