// An arena is host memory for the keys and values of requests that share passes as segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cache/slots.h"
#include "engines/engine.h"

namespace dlm {

class Arena {
  // The part of the arena that belongs to one request: `rows` rows in every head of every layer.
  struct Place {
    int64_t start;
    int32_t rows;
    Slots slots;
  };

 public:
  using Handle = std::list<Place>::iterator;

  // One request's part of a pass.
  struct Part {
    Handle place;
    int32_t first, tokens, cached;  // computes [first, first + tokens), and reads `cached` rows of
                                    // the request
    CacheUse use;
  };

  // The memory is allocated when the first request that stores rows takes its place. Throws
  // std::bad_alloc.
  Arena(HostEngine& engine, const CacheShape& shape, int64_t rows);

  // True if there is room for several requests at once. `wanted` has the number of rows of each.
  // The rows of a request must be contiguous.
  bool has_room(const std::vector<int32_t>& wanted) const;

  // Reserves rows for a request. A request without a cache takes 0 rows. Call it only if has_room()
  // returned true.
  Handle take(int32_t rows);
  void give_back(Handle place) { places_.erase(place); }

  // Runs a pass over all parts, in order, with B = 1. Like Context::run, but sets the pass's
  // pointers to keys and values itself.
  void run(dlm_pass& pass, const std::vector<Part>& parts);

  // Does for one request what Context::keep_outside does for a context.
  void keep_outside(Handle place, int32_t first, int32_t last);

  // The bytes of the rows that a request stores now.
  uint64_t bytes_of(Handle place) const {
    return static_cast<uint64_t>(place->slots.length()) * row_sum_;
  }

  // The largest number of bytes that were ever stored at the same time.
  uint64_t cache_bytes() const { return used_bytes_; }

 private:
  size_t row_bytes(size_t tensor) const { return shape_[tensor / 2].row_bytes(); }
  size_t heads(size_t tensor) const { return static_cast<size_t>(shape_[tensor / 2].kv_heads); }
  // The first row of a head in a tensor, for one request.
  std::byte* rows_of(const Place& place, size_t tensor, size_t head) const;
  void make_room();
  void keep_new(const dlm_pass& pass, const std::vector<Part>& parts);

  HostEngine& engine_;
  const CacheShape& shape_;  // belongs to the engine
  const int64_t rows_;
  std::list<Place> places_;                       // ordered by first row
  std::unique_ptr<std::byte[]> storage_, fresh_;  // storage_ has all rows; fresh_ has the rows of a
                                                  // pass that must be stored
  std::vector<size_t> starts_;  // [2 * layers + 1]: where each tensor (keys, values, ...) starts in
                                // storage_
  // row_sum_: the bytes of one position in all tensors, over all heads.
  size_t fresh_bytes_ = 0, row_sum_ = 0;
  uint64_t used_bytes_ = 0;
  KeyValues pointers_;
  std::vector<Segment> segments_;
};

}  // namespace dlm
