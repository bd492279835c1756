#pragma once

#include <cstdint>

namespace dlm {

// One request of several in a row of tokens, and a row of the graph's port "segments". Its cached
// rows are [start, start + cached) of past, its new tokens [first, first + tokens) of the row.
struct Segment {
  int64_t start, cached, first, tokens;
};

}  // namespace dlm
