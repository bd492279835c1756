#pragma once

#include <cstdint>
#include <vector>

namespace dlm {

// A segment belongs to one request in a pass that several requests share. A segment describes a
// range of the request's cached rows, and the range of the request's new tokens in the pass. The
// cached rows are rows `start` to `start + cached - 1` of the past keys and values. The new tokens
// are tokens `first` to `first + tokens - 1` of the pass. The graph reads each segment as one row
// of its input "segments".
//
// If the cached rows of a request are in several ranges, the request has one segment for each
// range. These segments follow each other, and have the same `first` and `tokens`.
struct Segment {
  int64_t start, cached, first, tokens;
};

// Returns the index of the first segment of each request. The last element of the returned list is
// the total number of segments.
inline std::vector<int64_t> first_segments(const Segment* segments, int64_t count) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || segments[i].first != segments[i - 1].first) found.push_back(i);
  found.push_back(count);
  return found;
}

}  // namespace dlm
