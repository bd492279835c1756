// Host memory for the keys and values of requests that share passes as segments.
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
  // The rows of one request, in every head of every layer.
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
    int32_t first, tokens, cached;  // computes [first, first + tokens) over `cached` own rows
    CacheUse use;
  };

  // Allocates memory with the first request that keeps rows. Throws std::bad_alloc.
  Arena(HostEngine& engine, const CacheShape& shape, int64_t rows);

  // True if each of `wanted` can get that many contiguous free rows.
  bool has_room(const std::vector<int32_t>& wanted) const;

  // rows = 0: for a request without a cache. Only if has_room().
  Handle take(int32_t rows);
  void give_back(Handle place) { places_.erase(place); }

  // Like Context::run, for all parts in order, with B = 1. Sets the pass's keys and values itself.
  void run(dlm_pass& pass, const std::vector<Part>& parts);

  // Like Context::keep_outside, for one request.
  void keep_outside(Handle place, int32_t first, int32_t last);

  // The bytes of the rows in a place.
  uint64_t bytes_of(Handle place) const {
    return static_cast<uint64_t>(place->slots.length()) * row_sum_;
  }

  // The most bytes of rows that were ever stored at once.
  uint64_t cache_bytes() const { return used_bytes_; }

 private:
  size_t row_bytes(size_t tensor) const { return shape_[tensor / 2].row_bytes(); }
  size_t heads(size_t tensor) const { return static_cast<size_t>(shape_[tensor / 2].kv_heads); }
  // The first row of a request's head in a tensor.
  std::byte* rows_of(const Place& place, size_t tensor, size_t head) const;
  void make_room();
  void keep_new(const dlm_pass& pass, const std::vector<Part>& parts);

  HostEngine& engine_;
  const CacheShape& shape_;  // the engine's
  const int64_t rows_;
  std::list<Place> places_;                       // ordered by first row
  std::unique_ptr<std::byte[]> storage_, fresh_;  // all rows; a pass's rows to store
  std::vector<size_t> starts_;  // [2 * layers + 1], of the tensors in storage_: keys, values, ...
  size_t fresh_bytes_ = 0, row_sum_ = 0;  // a row of all heads of all tensors
  uint64_t used_bytes_ = 0;
  KeyValues pointers_;
  std::vector<Segment> segments_;
};

}  // namespace dlm
