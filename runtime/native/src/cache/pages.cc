#include "cache/pages.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace dlm {

Pages::Pages(int32_t count, int32_t most_idle)
    : pages_(static_cast<size_t>(count)), most_idle_(most_idle), free_(pages_.size()) {
  std::iota(free_.begin(), free_.end(), 0);  // sorted numbers already form a heap
}

// This hash is FNV-1a over whole tokens. A collision is harmless, because find_one also compares
// the tokens.
uint64_t Pages::hash_of(int32_t before, const int32_t* tokens, size_t rows) {
  constexpr uint64_t kStart = 0xcbf29ce484222325u, kFactor = 0x100000001b3u;
  uint64_t hash = (kStart ^ static_cast<uint32_t>(before)) * kFactor;
  for (size_t i = 0; i < rows; ++i) hash = (hash ^ static_cast<uint32_t>(tokens[i])) * kFactor;
  return hash ^ (hash >> 32);
}

int32_t Pages::find_one(int32_t before, const int32_t* tokens, size_t rows) const {
  const auto [first, last] = by_tokens_.equal_range(hash_of(before, tokens, rows));
  for (auto it = first; it != last; ++it) {
    const Page& page = pages_[it->second];
    if (page.before == before &&
        std::equal(page.tokens.begin(), page.tokens.end(), tokens, tokens + rows))
      return it->second;
  }
  return -1;
}

Pages::Found Pages::find(int32_t root, const int32_t* tokens, size_t rows, size_t count) const {
  Found found;
  int32_t page = root;
  for (size_t number = 0; number < count; ++number) {
    page = find_one(page, tokens + number * rows, rows);
    if (page < 0) break;
    found.pages.push_back(page);
    found.idle += pages_[page].users == 0 ? 1 : 0;
  }
  return found;
}

void Pages::add_free(int32_t page) noexcept {
  free_.push_back(page);  // this never allocates memory, because the constructor has added all
                          // pages once
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
}

int32_t Pages::take() {
  if (free_.empty()) free_oldest();
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[page].users = 1;
  return page;
}

void Pages::add_idle(int32_t number) noexcept {
  Page& page = pages_[number];
  page.older = newest_, page.newer = -1;
  (newest_ < 0 ? oldest_ : pages_[newest_].newer) = number;
  newest_ = number;
  ++idle_count_;
}

void Pages::remove_idle(int32_t number) noexcept {
  const Page& page = pages_[number];
  (page.older < 0 ? oldest_ : pages_[page.older].newer) = page.newer;
  (page.newer < 0 ? newest_ : pages_[page.newer].older) = page.older;
  --idle_count_;
}

void Pages::use(int32_t page) {
  if (pages_[page].users++ == 0)
    remove_idle(page);
  else
    ++saved_;
}

void Pages::give_back(const std::vector<int32_t>& pages) noexcept {
  for (auto it = pages.rbegin(); it != pages.rend(); ++it) give_back(*it);
}

void Pages::give_back(int32_t number) noexcept {
  Page& page = pages_[number];
  if (--page.users > 0)
    --saved_;
  else if (page.tokens.empty())
    add_free(number);
  else
    add_idle(number);
  while (idle_count_ > most_idle_) free_oldest();
}

int32_t Pages::share(int32_t page, int32_t before, const int32_t* tokens, size_t rows) {
  if (const int32_t other = find_one(before, tokens, rows); other >= 0) {
    use(other);
    give_back(page);
    return other;
  }
  pages_[page].before = before;
  pages_[page].serial = ++serials_;
  pages_[page].tokens.assign(tokens, tokens + rows);
  by_tokens_.emplace(hash_of(before, tokens, rows), page);
  return page;
}

// Frees the idle page that was used least recently. This page is never the preceding page of
// another shared page.
void Pages::free_oldest() noexcept {
  const int32_t number = oldest_;
  Page& page = pages_[number];
  const auto [first, last] =
      by_tokens_.equal_range(hash_of(page.before, page.tokens.data(), page.tokens.size()));
  by_tokens_.erase(
      std::find_if(first, last, [&](const auto& one) { return one.second == number; }));
  remove_idle(number);
  page.before = -1;
  page.serial = 0;
  page.tokens.clear();
  add_free(number);
}

}  // namespace dlm
