// An arena is host memory for the keys and values of all requests that share passes.
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
  // The part of the arena that belongs to one request: `rows` rows in each head of each layer.
  struct Place {
    int64_t start;
    int32_t rows;
    Slots slots;
  };

 public:
  using Handle = std::list<Place>::iterator;

  // The part of a pass that belongs to one request.
  struct Part {
    Handle place;
    // The pass computes positions `first` to `first + tokens - 1`, and reads `cached` rows of the
    // request.
    int32_t first, tokens, cached;
    CacheUse use;
  };

  // The memory is allocated when the first request with a cache reserves its rows. Throws
  // std::bad_alloc.
  Arena(HostEngine& engine, const CacheShape& shape, int64_t rows);

  // Returns true if the arena has room for several more requests at once. `wanted` contains the
  // number of rows of each request. The rows of a request must be contiguous.
  bool has_room(const std::vector<int32_t>& wanted) const;

  // Reserves rows for a request. A request without a cache takes 0 rows. Call this function only if
  // has_room() returned true.
  Handle take(int32_t rows);
  void give_back(Handle place) { places_.erase(place); }

  // Runs a pass over all parts, in order, with batch size 1. Works like Context::run. The function
  // itself sets the pass's pointers to keys and values.
  void run(dlm_pass& pass, const std::vector<Part>& parts);

  // Does for one request what Context::keep_outside does for a context.
  void keep_outside(Handle place, int32_t first, int32_t last);

  // Returns the number of bytes of the rows that a request currently stores.
  uint64_t bytes_of(Handle place) const {
    return static_cast<uint64_t>(place->slots.length()) * row_sum_;
  }

  // Returns the largest number of bytes that all requests together have stored at any time.
  uint64_t cache_bytes() const { return used_bytes_; }

 private:
  size_t row_bytes(size_t tensor) const { return shape_[tensor / 2].row_bytes(); }
  size_t heads(size_t tensor) const { return static_cast<size_t>(shape_[tensor / 2].kv_heads); }
  // Returns the first row of one request, in one head of a tensor.
  std::byte* rows_of(const Place& place, size_t tensor, size_t head) const;
  void make_room();
  void keep_new(const dlm_pass& pass, const std::vector<Part>& parts);

  HostEngine& engine_;
  const CacheShape& shape_;  // belongs to the engine
  const int64_t rows_;
  std::list<Place> places_;  // ordered by first row
  // storage_ contains all stored rows. fresh_ contains the rows of the current pass that must still
  // be stored.
  std::unique_ptr<std::byte[]> storage_, fresh_;
  // [2 * layers + 1]: where each tensor (keys, values, ...) starts in storage_.
  std::vector<size_t> starts_;
  // row_sum_: the number of bytes of one position, summed over all heads of all tensors.
  size_t fresh_bytes_ = 0, row_sum_ = 0;
  uint64_t used_bytes_ = 0;
  KeyValues pointers_;
  std::vector<Segment> segments_;
};

}  // namespace dlm
