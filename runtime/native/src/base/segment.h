#pragma once

#include <cstdint>

namespace dlm {

// One request's part of a shared pass. It is a row of the graph's input "segments". The request's
// cached rows are rows [start, start + cached) of the past keys and values. Its new tokens are
// tokens [first, first + tokens) of the pass.
struct Segment {
  int64_t start, cached, first, tokens;
};

}  // namespace dlm
