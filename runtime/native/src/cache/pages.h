// Divides an arena into pages, and finds pages that already contain the keys and values of a
// prompt.
//
// A page contains the rows of a fixed number of consecutive positions. Several requests can use the
// same page if its rows depend only on tokens that these requests have in common. Such a page is
// called shared. To find a shared page, a request needs the page's tokens and the page before it.
// So a request finds a page only if its tokens are the same from the start to the end of the page.
// The first page has a root before it, which is a negative number. Requests with different roots
// therefore find no pages of each other.
//
// If no request uses a shared page any more, the page becomes idle, and keeps its rows. When memory
// is needed, idle pages are freed, beginning with the page that was used least recently. A page is
// always freed before the page that precedes it, because a request returns its last page first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dlm {

class Pages {
 public:
  // `most_idle` is the largest number of idle pages to keep.
  Pages(int32_t count, int32_t most_idle);

  // Shared pages that a request can use, in the order of their positions.
  struct Found {
    std::vector<int32_t> pages;
    int32_t idle = 0;  // number of pages in `pages` that no request uses
  };
  // Returns the shared page with these tokens after the shared page or root `before`, or -1.
  int32_t find_one(int32_t before, const int32_t* tokens, size_t rows) const;
  // Finds the longest sequence of shared pages after `root` that contain the first tokens of a
  // request. Compares at most `count` pages of `rows` tokens each.
  Found find(int32_t root, const int32_t* tokens, size_t rows, size_t count) const;

  // Returns the number of pages that no request uses.
  int32_t unused() const { return static_cast<int32_t>(free_.size()) + idle_count_; }

  // Takes a page that no request uses, and returns it. Call this function only if unused() is above
  // 0.
  int32_t take();
  // Records that one more request uses a shared page.
  void use(int32_t page);
  // Takes back the pages of one request. `pages` must be in the order of their positions.
  void give_back(const std::vector<int32_t>& pages) noexcept;
  void give_back(int32_t page) noexcept;

  // Converts a page that one request uses to a shared page. `before` is the shared page of the
  // preceding positions, or the root. Returns the page that the request must use from now on. This
  // is a different page if there is already a shared page with the same tokens.
  int32_t share(int32_t page, int32_t before, const int32_t* tokens, size_t rows);

  // Returns a number that identifies the content of a shared page. No other content ever gets the
  // same number.
  int64_t serial(int32_t page) const { return pages_[page].serial; }

  // Returns the number of shared pages, including idle pages.
  int32_t shared() const { return static_cast<int32_t>(by_tokens_.size()); }
  int32_t idle() const { return idle_count_; }
  // Returns how many more pages the requests would need if they did not share pages.
  int64_t saved() const { return saved_; }

 private:
  struct Page {
    int32_t users = 0, before = -1;
    std::vector<int32_t> tokens;  // empty if the page is not shared
    // The next older and the next newer idle page, or -1.
    int32_t older = -1, newer = -1;
    int64_t serial = 0;
  };
  using ByTokens = std::unordered_multimap<uint64_t, int32_t>;

  static uint64_t hash_of(int32_t before, const int32_t* tokens, size_t rows);
  void add_free(int32_t page) noexcept;
  void add_idle(int32_t page) noexcept;
  void remove_idle(int32_t page) noexcept;
  void free_oldest() noexcept;

  // give_back() must not fail, so it must not allocate memory in the members below.
  std::vector<Page> pages_;
  const int32_t most_idle_;
  // A heap of the pages that are neither used nor idle. take() returns the lowest page first, so
  // that the pages of a request are mostly contiguous.
  std::vector<int32_t> free_;
  // The ends and the length of the list of idle pages.
  int32_t oldest_ = -1, newest_ = -1, idle_count_ = 0;
  // Shared pages by hash_of their preceding page and their tokens.
  ByTokens by_tokens_;
  int64_t saved_ = 0, serials_ = 0;
};

}  // namespace dlm
