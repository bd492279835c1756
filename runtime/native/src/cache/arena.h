// An arena is memory for the keys and values of all requests that share passes. It is on the host,
// or on the device that runs the engine.
//
// The arena is divided into pages (cache/pages.h). Each canvas has a list of pages. Rows never move
// while their request runs. In each pass, the arena tells the engine which rows the pass reads.
//
// With block-causal attention, the row of a position depends only on the tokens before the end of
// its block. So requests whose prompts start with the same tokens can use the same pages. A shared
// page is never written again.
//
// Layers with a window have pages of their own. A canvas keeps only its last pages of these layers,
// which contain all rows that later passes can read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cache/pages.h"
#include "cache/prompt_cache.h"
#include "cache/row_memory.h"
#include "engines/engine.h"

namespace dlm {

class Arena {
  // The pages of one canvas.
  struct Place {
    std::vector<int32_t> pages;
    size_t shared = 0;   // the first `shared` pages are never written again
    int32_t length = 0;  // rows are stored at positions before `length`
    // The pages of the layers with a window, in the same order as `pages`. Only the pages from
    // number `window_begin` to `window_end` - 1 exist.
    std::vector<int32_t> window_pages{};
    size_t window_begin = 0, window_end = 0;
    int32_t group = 0;     // see dlm_request.prefix_group
    int32_t kept = 0;      // see Wanted::kept
    int64_t reserved = 0;  // number of pages that are reserved in layers with a window
  };

 public:
  using Handle = std::list<Place>::iterator;

  // The part of a pass that belongs to one canvas.
  struct Part {
    Handle place;
    // The pass computes positions `first` to `first + tokens - 1`. It also reads `cached` cached
    // rows. These are the rows of the lowest positions that the pass does not compute.
    int32_t first, tokens, cached;
    CacheUse use;
  };

  // The arena allocates its memory when it reserves rows for the first request with a cache. Both
  // numbers of `rows` must be multiples of page_rows(). `most_idle` is the largest number of rows
  // that stay stored after their requests have ended, and is at most `rows.full`. If `most_idle` is
  // 0, requests never share pages. Throws std::bad_alloc.
  Arena(HostEngine& engine, const CacheShape& shape, std::unique_ptr<RowMemory> memory,
        int32_t page_rows, RowCounts rows, int64_t most_idle);

  // Returns how many of the first tokens of `tokens` have stored rows in pages that the requests of
  // `group` share. The result is a multiple of the page size, and at most `most`. In layers with a
  // window, only the rows that the next pass reads must be stored.
  int32_t stored(const std::vector<int32_t>& tokens, int32_t group, int32_t most) const;

  // A canvas that needs `rows` rows. The rows of its first `stored` tokens are in shared pages of
  // `group`. In layers with a window, later passes read only the last `kept` stored rows.
  struct Wanted {
    const std::vector<int32_t>& tokens;
    int32_t rows, stored, kept = 0, group = 0;
  };
  // Returns true if the arena has room for all of these canvases at the same time.
  bool has_room(const std::vector<Wanted>& wanted) const;

  // Reserves the rows of several canvases. Call this function only if has_room() returned true. If
  // a canvas uses no cache, Wanted::rows is 0.
  std::vector<Handle> take(const std::vector<Wanted>& wanted);
  void give_back(Handle place) noexcept;

  // Gets the rows of a canvas's first tokens without computing them. The canvas uses shared pages
  // for its first `stored` tokens, if these pages exist. Then the arena copies more pages from
  // `file`, a prompt cache that contains the same tokens.
  void adopt(Handle place, const std::vector<int32_t>& tokens, int32_t stored,
             const PromptCaches::Found& file);
  bool shares() const { return shares_; }

  // Runs a pass over all parts, in the given order, with batch size 1. Sets the pass's pointers to
  // keys and values, and throws the same errors as Context::run.
  void run(Pass& pass, const std::vector<Part>& parts);

  // Lets other requests use the pages that contain the first `rows` positions of a canvas. The rows
  // must be stored, and must have been computed from the canvas's final tokens.
  void share(Handle place, const std::vector<int32_t>& tokens, int32_t rows);

  // Copies a stored page of a canvas to `to`, in the format of a prompt cache. All layers must have
  // kept the page.
  void read_page(Handle place, size_t number, std::byte* to) const;

  // Returns how many bytes the rows of a canvas take now.
  uint64_t bytes_of(Handle place) const {
    return bytes_of({place->length, window_rows_of(*place)});
  }

  // Returns the largest number of bytes that the rows of all requests together have taken so far.
  // Shared pages count once.
  uint64_t cache_bytes() const { return used_bytes_; }
  // Returns the number of bytes of the pages that new requests can share.
  uint64_t shared_bytes() const {
    return bytes_of(
        {int64_t{pages_.shared()} * page_rows_, int64_t{windows_.shared()} * page_rows_});
  }

 private:
  size_t row_bytes(size_t tensor) const { return shape_[tensor / 2].row_bytes(); }
  size_t heads(size_t tensor) const { return static_cast<size_t>(shape_[tensor / 2].kv_heads); }
  bool has_window(size_t tensor) const { return shape_[tensor / 2].window > 0; }
  size_t rows_of(size_t tensor) const {
    return static_cast<size_t>(has_window(tensor) ? rows_.window : rows_.full);
  }
  uint64_t bytes_of(const RowCounts& rows) const {
    return static_cast<uint64_t>(rows.full) * row_sum_ +
           static_cast<uint64_t>(rows.window) * window_row_sum_;
  }
  int64_t window_rows_of(const Place& place) const {
    const int64_t first = static_cast<int64_t>(place.window_begin) * page_rows_;
    return std::max<int64_t>(0, place.length - first) * (window_ > 0 ? 1 : 0);
  }
  size_t pages_for(int64_t rows) const;
  // Finds the shared pages of the first tokens of a canvas, at most `most` tokens. Leaves out the
  // last pages if a pass after them would read rows that layers with a window have not stored.
  Pages::Found find(const std::vector<int32_t>& tokens, int32_t group, int32_t most) const;
  // Returns the page of the layers with a window that belongs to a shared page of the other layers,
  // or -1.
  int32_t window_page_of(int32_t page) const;
  void drop_window_pages(Place& place) noexcept;
  // Converts a page of the layers with a window to a shared page. The page of the other layers with
  // the same number must be shared already.
  void share_window_page(Place& place, size_t number);
  // Gives back the pages of layers with a window whose rows no later pass reads. `end` is the
  // position after the last stored row. Then takes pages for the rows before `end`.
  void move_window(Place& place, int32_t end);
  // Calls visit(row, count, position) for positions `first` to `last` - 1. Each call covers `count`
  // rows that are contiguous in the arena. The first of these rows has the index `row` and belongs
  // to position `position`. `pages` are the pages of the canvas.
  template <class Visit>
  void each_run(const std::vector<int32_t>& pages, int32_t first, int32_t last, Visit visit) const;
  void make_room();
  // Calls visit(address in storage_, bytes) for each contiguous part of a page, in the order of a
  // prompt cache. `window_page` is the page of the layers with a window. If it is -1, the addresses
  // of these layers are NULL.
  template <class Visit>
  void each_part(int32_t page, int32_t window_page, Visit visit) const;
  void keep_next(Place& place, const std::vector<int32_t>& tokens);
  void add_segments(const Part& part, int64_t first);
  void keep_new(const dlm_pass& pass, const std::vector<Part>& parts);

  HostEngine& engine_;
  const CacheShape& shape_;  // belongs to the engine
  const int32_t page_rows_;
  const RowCounts rows_;
  const int32_t window_;  // the window of the layers that have one, or 0
  const bool shares_;
  // pages_: for the layers without a window. windows_: for the layers with a window. A shared page
  // of windows_ has the serial number of the page of pages_ with the same positions as its tokens.
  Pages pages_, windows_;
  int64_t window_reserved_ = 0;  // pages of windows_ that are reserved for the canvases
  std::list<Place> places_;
  // storage_ contains all stored rows. fresh_ contains the new rows of the current pass, which must
  // still be copied to storage_.
  const std::unique_ptr<RowMemory> memory_;
  RowMemory::Block storage_, fresh_;
  // [2 * layers + 1]: where each tensor (keys, values, ...) starts in storage_.
  std::vector<size_t> starts_;
  // row_sum_: the number of bytes of one position's rows, for all heads of all tensors of layers
  // without a window. window_row_sum_: the same for the layers with a window.
  size_t fresh_bytes_ = 0, row_sum_ = 0, window_row_sum_ = 0;
  uint64_t used_bytes_ = 0;
  KeyValues pointers_;
  std::vector<Segment> segments_;
  WindowRows window_rows_;
};

// Returns the number of rows in a page: the smallest multiple of the block length that is at least
// 16.
inline int32_t page_rows(int32_t visible_block) {
  constexpr int32_t kLeast = 16;
  if (visible_block == 0) return kLeast;
  return (kLeast + visible_block - 1) / visible_block * visible_block;
}

// Returns `rows`, rounded up to whole pages.
inline int64_t in_pages(int64_t rows, int32_t page_rows) {
  return (rows + page_rows - 1) / page_rows * page_rows;
}

// Returns the number of rows that a canvas of `length` tokens needs in layers with a window, in
// whole pages. `kept` is Arena::Wanted::kept. The last `kept` rows may start in the middle of a
// page.
inline int64_t window_rows(int64_t length, int32_t kept, int32_t page_rows) {
  if (kept == 0) return 0;
  return std::min(in_pages(length, page_rows), in_pages(kept, page_rows) + page_rows);
}

}  // namespace dlm
