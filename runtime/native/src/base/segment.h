#pragma once

#include <cstdint>
#include <vector>

namespace dlm {

// Some of the cached rows of one request in a pass that several requests share, and the request's
// new tokens. A segment is one row of the graph's input "segments". The cached rows are rows
// `start` to `start + cached - 1` of the past keys and values. The new tokens are tokens `first` to
// `first + tokens - 1` of the pass.
//
// The segments of a request are contiguous, and have the same `first` and `tokens`. So a request
// can have cached rows in several places.
struct Segment {
  int64_t start, cached, first, tokens;
};

// Returns the index of the first segment of each request, and the number of segments as the last
// element.
inline std::vector<int64_t> first_segments(const Segment* segments, int64_t count) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || segments[i].first != segments[i - 1].first) found.push_back(i);
  found.push_back(count);
  return found;
}

}  // namespace dlm
