#pragma once

#include <cstdint>

namespace dlm {

// One request's part of a shared pass, as a row of the graph's input "segments". Its cached rows
// are [start, start + cached) of past, its new tokens [first, first + tokens) of the row.
struct Segment {
  int64_t start, cached, first, tokens;
};

}  // namespace dlm
