// How often what contains itself may do so: schemas, elements and rules.
#pragma once

#include <cstdint>
#include <optional>

#include "base/error.h"

namespace dlm::compile {

constexpr uint32_t kMostDepth = 10'000;  // largest max_depth
constexpr uint32_t kUsualDepth = 3;      // if max_depth is not set

inline void check_max_depth(std::optional<uint32_t> max_depth) {
  if (max_depth.value_or(0) > kMostDepth)
    fail(DLM_INVALID_ARGUMENT, "max_depth: give an integer from 0 to %u, not %u", kMostDepth,
         *max_depth);
}

}  // namespace dlm::compile
