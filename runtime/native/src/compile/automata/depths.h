// Limits recursion. `max_depth` is the largest number of times that a JSON Schema, an XML element
// or a grammar rule may be nested inside itself.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.h"

namespace dlm::compile {

constexpr uint32_t kMostDepth = 10'000;  // largest allowed value of max_depth
constexpr uint32_t kUsualDepth = 3;      // default of max_depth

inline void check_max_depth(std::optional<uint32_t> max_depth) {
  if (max_depth.value_or(0) > kMostDepth)
    fail(DLM_INVALID_ARGUMENT, "max_depth: give an integer from 0 to %u, not %u", kMostDepth,
         *max_depth);
}

}  // namespace dlm::compile
