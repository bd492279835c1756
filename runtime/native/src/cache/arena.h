// An arena is host memory for the keys and values of all requests that share passes.
//
// The arena is divided into pages (cache/pages.h). A canvas has a list of pages, and the row of a
// position is always at the same place in this list. Each pass tells the engine which rows the pass
// reads.
//
// With block-causal attention, the row of a position depends only on the tokens before the end of
// its block. So requests whose prompts start with the same tokens can use the same pages. A shared
// page is never written again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cache/pages.h"
#include "cache/prompt_cache.h"
#include "engines/engine.h"

namespace dlm {

class Arena {
  // The rows of one canvas.
  struct Place {
    std::vector<int32_t> pages;
    size_t shared = 0;   // the first `shared` pages are never written again
    int32_t length = 0;  // rows are stored at positions before `length`
  };

 public:
  using Handle = std::list<Place>::iterator;

  // The part of a pass that belongs to one canvas.
  struct Part {
    Handle place;
    // The pass computes positions `first` to `first + tokens - 1`. It reads the `cached` positions
    // that come first, apart from these positions.
    int32_t first, tokens, cached;
    CacheUse use;
  };

  // The memory is allocated when the first request with a cache takes its rows. `rows` is a
  // multiple of page_rows(). `most_idle` is the largest number of rows that are kept although no
  // request uses them, at most `rows`. With 0, pages are never shared. Throws std::bad_alloc.
  Arena(HostEngine& engine, const CacheShape& shape, int32_t page_rows, int64_t rows,
        int64_t most_idle);

  int64_t rows() const { return rows_; }

  // Returns the number of leading tokens whose rows are already stored, at most `most`. The result
  // is a multiple of the page size.
  int32_t stored(const std::vector<int32_t>& tokens, int32_t most) const;

  // One canvas that needs room. The first `stored` tokens use shared pages.
  struct Wanted {
    const std::vector<int32_t>& tokens;
    int32_t rows, stored;
  };
  // Returns true if the arena has room for several more canvases at once.
  bool has_room(const std::vector<Wanted>& wanted) const;

  // Reserves the rows of several canvases. Call this function only if has_room() returned true. A
  // canvas without a cache takes 0 rows.
  std::vector<Handle> take(const std::vector<Wanted>& wanted);
  void give_back(Handle place) noexcept;

  // Stores the rows of a canvas's first tokens without computing them. First replaces the pages of
  // the first `stored` tokens with the shared pages of these tokens, as far as these exist. Then
  // copies further pages from a prompt cache that contains the same tokens.
  void adopt(Handle place, const std::vector<int32_t>& tokens, int32_t stored,
             const PromptCaches::Found& file);
  bool shares() const { return shares_; }

  // Runs a pass over all parts, in order, with batch size 1. Works like Context::run. The function
  // itself sets the pass's pointers to keys and values.
  void run(dlm_pass& pass, const std::vector<Part>& parts);

  // Shares the pages of the first `rows` positions of a canvas with other requests. The rows must
  // be stored. They must be exact: computed from the tokens of the canvas, which must not change
  // any more.
  void share(Handle place, const std::vector<int32_t>& tokens, int32_t rows);

  // Copies a stored page of a canvas to `to`, in the layout of a prompt cache.
  void read_page(Handle place, size_t number, std::byte* to) const;
  uint64_t page_bytes() const { return static_cast<uint64_t>(page_rows_) * row_sum_; }

  // Returns the number of bytes of the rows that a canvas currently stores.
  uint64_t bytes_of(Handle place) const { return static_cast<uint64_t>(place->length) * row_sum_; }

  // Returns the largest number of bytes that all requests together have stored at any time. Shared
  // pages count once.
  uint64_t cache_bytes() const { return used_bytes_; }
  // Returns the number of bytes of the pages that new requests can share.
  uint64_t shared_bytes() const { return static_cast<uint64_t>(pages_.shared()) * page_bytes(); }

 private:
  size_t row_bytes(size_t tensor) const { return shape_[tensor / 2].row_bytes(); }
  size_t heads(size_t tensor) const { return static_cast<size_t>(shape_[tensor / 2].kv_heads); }
  size_t pages_for(int32_t rows) const;
  // Calls visit(row, count, position) for each run of contiguous rows in the arena that contain the
  // positions `first` to `last` - 1.
  template <class Visit>
  void each_run(const Place& place, int32_t first, int32_t last, Visit visit) const;
  void make_room();
  // Calls visit(place in storage_, bytes) for each contiguous part of a page, in the order of a
  // prompt cache.
  template <class Visit>
  void each_part(int32_t page, Visit visit) const;
  void keep_next(Place& place, const std::vector<int32_t>& tokens);
  void add_segments(const Part& part, int64_t first);
  void keep_new(const dlm_pass& pass, const std::vector<Part>& parts);

  HostEngine& engine_;
  const CacheShape& shape_;  // belongs to the engine
  const int32_t page_rows_;
  const int64_t rows_;
  const bool shares_;
  Pages pages_;
  std::list<Place> places_;
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

// Returns the number of rows in a page: a multiple of the length of a block that is at least 16.
inline int32_t page_rows(int32_t visible_block) {
  constexpr int32_t kLeast = 16;
  if (visible_block == 0) return kLeast;
  return (kLeast + visible_block - 1) / visible_block * visible_block;
}

// Returns the number of rows of the pages that `rows` rows need.
inline int64_t in_pages(int64_t rows, int32_t page_rows) {
  return (rows + page_rows - 1) / page_rows * page_rows;
}

}  // namespace dlm
