// The choice of cached rows for passes whose graph has the inputs of graph/row_choice.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/segment.h"
#include "dlm_runtime.h"

namespace dlm {

// The cached rows that a pass reads, and the request to which each row and each new token belongs.
struct RowChoice {
  std::vector<int64_t> rows, requests, of_tokens;

  // Adds rows that belong to no request, until there are `count` rows.
  void pad(size_t count) {
    rows.resize(count, 0);
    requests.resize(count, -1);
  }
};

// Lists the rows of a pass. Without segments, the pass reads all cached rows.
inline RowChoice choose_rows(const dlm_pass& pass, const std::vector<Segment>& segments) {
  RowChoice chosen{{}, {}, std::vector<int64_t>(static_cast<size_t>(pass.tokens), 0)};
  const std::vector<Segment> whole = {{0, pass.cached, 0, pass.tokens}};
  const std::vector<Segment>& all = segments.empty() ? whole : segments;
  int64_t request = -1, first = -1;
  for (const Segment& segment : all) {
    if (std::exchange(first, segment.first) != segment.first) ++request;
    for (int64_t row = segment.start; row < segment.start + segment.cached; ++row)
      chosen.rows.push_back(row);
    chosen.requests.resize(chosen.rows.size(), request);
    std::fill_n(chosen.of_tokens.begin() + first, segment.tokens, request);
  }
  return chosen;
}

// Rounds a count up, so that few different counts remain: to a multiple of `step`, or of a larger
// power of two times `step` if that adds at most an eighth.
inline size_t rounded_up(size_t count, size_t step) {
  while (16 * step < count) step *= 2;
  return (count + step - 1) / step * step;
}

}  // namespace dlm
