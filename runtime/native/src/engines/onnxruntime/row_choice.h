// The choice of cached rows for passes whose graph has the inputs of graph/row_choice.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/segment.h"
#include "dlm_runtime.h"
#include "engines/engine.h"

namespace dlm {

// Cached rows of some layers, and the request to which each row belongs.
struct ChosenRows {
  std::vector<int64_t> rows, requests;

  // Adds rows that belong to no request, until there are `count` rows.
  void pad(size_t count) {
    rows.resize(count, 0);
    requests.resize(count, -1);
  }
};

// The cached rows that a pass reads, and the request to which each new token belongs. In layers
// with a window, `distances` says how far each row is before the first new token of its request.
struct RowChoice {
  ChosenRows full, window{};
  std::vector<int64_t> of_tokens, distances{};
};

// Lists the rows that the segments of a pass select. Calls visit(token, tokens, request) for the
// new tokens of each request.
template <class Visit>
ChosenRows choose_rows(const std::vector<Segment>& segments, Visit visit) {
  ChosenRows chosen;
  int64_t request = -1, first = -1;
  for (const Segment& segment : segments) {
    if (std::exchange(first, segment.first) != segment.first) ++request;
    for (int64_t row = segment.start; row < segment.start + segment.cached; ++row)
      chosen.rows.push_back(row);
    chosen.requests.resize(chosen.rows.size(), request);
    visit(first, segment.tokens, request);
  }
  return chosen;
}

// Lists the rows of a pass. Without segments, the pass reads all cached rows, and the last
// `window_size` of them in layers with a window. If `window_size` is 0, there are no such layers.
inline RowChoice choose_rows(const dlm_pass& pass, const std::vector<Segment>& segments,
                             const WindowRows& window, int32_t window_size) {
  const auto last = [&](int32_t rows, int32_t cached) {
    return std::vector<Segment>{{cached - rows, rows, 0, pass.tokens}};
  };
  RowChoice chosen{{}, {}, std::vector<int64_t>(static_cast<size_t>(pass.tokens), 0)};
  chosen.full = choose_rows(segments.empty() ? last(pass.cached, pass.cached) : segments,
                            [&](int64_t first, int64_t tokens, int64_t request) {
                              std::fill_n(chosen.of_tokens.begin() + first, tokens, request);
                            });
  if (window_size == 0) return chosen;
  chosen.window =
      choose_rows(segments.empty() ? last(std::min(window.cached, window_size), window.cached)
                                   : window.segments,
                  [](int64_t, int64_t, int64_t) {});
  // The rows of a request are in the order of their positions, and end before its new tokens.
  const std::vector<int64_t>& requests = chosen.window.requests;
  chosen.distances.resize(requests.size());
  for (size_t i = requests.size(); i-- > 0;)
    chosen.distances[i] =
        i + 1 < requests.size() && requests[i] == requests[i + 1] ? chosen.distances[i + 1] + 1 : 1;
  return chosen;
}

// Rounds a count up, so that few different counts remain: to a multiple of `step`, or of a larger
// power of two times `step` if that adds at most an eighth.
inline size_t rounded_up(size_t count, size_t step) {
  while (16 * step < count) step *= 2;
  return (count + step - 1) / step * step;
}

}  // namespace dlm
