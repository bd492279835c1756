#pragma once

#include <cstdint>

namespace dlm {

// One request's part of a pass that several requests share. A segment is one row of the graph's
// input "segments". The request's cached rows are rows `start` to `start + cached - 1` of the past
// keys and values. The request's new tokens are tokens `first` to `first + tokens - 1` of the pass.
struct Segment {
  int64_t start, cached, first, tokens;
};

}  // namespace dlm
