#pragma once

#include <cstdint>

namespace dlm {

// One request of several in a row of tokens: `cached` of the rows that lie in past from `start` on
// are its own, and of the new tokens `tokens` from `first` on. A row of the graph's port
// "segments".
struct Segment {
  int64_t start, cached, first, tokens;
};

}  // namespace dlm
