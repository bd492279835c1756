#include "cache/arena.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"

namespace dlm {

Arena::Arena(HostEngine& engine, const CacheShape& shape, int32_t page_rows, int64_t rows,
             int64_t most_idle)
    : engine_(engine),
      shape_(shape),
      page_rows_(page_rows),
      rows_(rows),
      shares_(most_idle > 0),
      pages_(static_cast<int32_t>(rows / page_rows), static_cast<int32_t>(most_idle / page_rows)),
      starts_(1, 0),
      pointers_(shape.size()) {
  for (size_t i = 0; i < 2 * shape.size(); ++i) {
    const size_t row = heads(i) * row_bytes(i);
    size_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(row, static_cast<size_t>(rows), &bytes) ||
        __builtin_add_overflow(starts_.back(), bytes, &end))
      throw std::bad_alloc();
    starts_.push_back(end);
    row_sum_ += row;
  }
}

size_t Arena::pages_for(int32_t rows) const {
  return static_cast<size_t>(in_pages(rows, page_rows_) / page_rows_);
}

int32_t Arena::stored(const std::vector<int32_t>& tokens, int32_t most) const {
  if (!shares_) return 0;
  const Pages::Found found = pages_.find(tokens.data(), page_rows_, most / page_rows_);
  return static_cast<int32_t>(found.pages.size()) * page_rows_;
}

bool Arena::has_room(const std::vector<Wanted>& wanted) const {
  size_t needed = 0;
  for (const Wanted& one : wanted) {
    const Pages::Found found = pages_.find(one.tokens.data(), page_rows_, one.stored / page_rows_);
    // Idle pages count as unused. An idle page that this canvas shares cannot take new rows, so it
    // must be counted as needed.
    needed += pages_for(one.rows) - found.pages.size() + found.idle;
  }
  return needed <= static_cast<size_t>(pages_.unused());
}

std::vector<Arena::Handle> Arena::take(const std::vector<Wanted>& wanted) {
  std::vector<Handle> taken;
  taken.reserve(wanted.size());
  std::list<Place> places;
  for (const Wanted& one : wanted) {
    if (one.rows > 0 && storage_ == nullptr) make_room();
    Place& place = places.emplace_back();
    place.pages = pages_.find(one.tokens.data(), page_rows_, one.stored / page_rows_).pages;
    place.shared = place.pages.size();
    place.length = static_cast<int32_t>(place.shared) * page_rows_;
    place.pages.reserve(pages_for(one.rows));
  }
  // From here on, no statement allocates memory. First mark the shared pages of all canvases as
  // used, so that the loop below does not take these pages for new rows.
  for (const Place& place : places)
    for (const int32_t page : place.pages) pages_.use(page);
  auto one = wanted.begin();
  for (auto place = places.begin(); place != places.end(); ++place, ++one) {
    taken.push_back(place);
    while (place->pages.size() < pages_for(one->rows)) place->pages.push_back(pages_.take());
  }
  places_.splice(places_.end(), places);
  return taken;
}

void Arena::give_back(Handle place) noexcept {
  pages_.give_back(place->pages);
  places_.erase(place);
}

void Arena::adopt(Handle place, const std::vector<int32_t>& tokens, int32_t stored,
                  const PromptCaches::Found& file) {
  std::vector<int32_t> found;
  if (shares_) found = pages_.find(tokens.data(), page_rows_, stored / page_rows_).pages;
  for (size_t& number = place->shared; number < found.size(); ++number) {
    pages_.use(found[number]);
    pages_.give_back(place->pages[number]);
    place->pages[number] = found[number];
  }
  while (place->shared < static_cast<size_t>(file.rows / page_rows_)) {
    const std::byte* from = file.cache->page(place->shared);
    each_part(place->pages[place->shared], [&](std::byte* to, size_t bytes) {
      std::memcpy(to, from, bytes);
      from += bytes;
    });
    keep_next(*place, tokens);
  }
  place->length = std::max(place->length, static_cast<int32_t>(place->shared) * page_rows_);
}

void Arena::make_room() {
  // make_unique would fill all this memory with zeros.
  storage_.reset(new std::byte[starts_.back()]);
  for (size_t i = 0; i < 2 * shape_.size(); ++i) pointers_.set_past(i, storage_.get() + starts_[i]);
}

template <class Visit>
void Arena::each_run(const Place& place, int32_t first, int32_t last, Visit visit) const {
  for (int32_t position = first, end; position < last; position = end) {
    size_t page = position / page_rows_;
    const int64_t row = int64_t{place.pages[page]} * page_rows_ + position % page_rows_;
    while ((static_cast<int64_t>(page) + 1) * page_rows_ < last &&
           place.pages[page + 1] == place.pages[page] + 1)
      ++page;
    end = static_cast<int32_t>(
        std::min<int64_t>((static_cast<int64_t>(page) + 1) * page_rows_, last));
    visit(row, end - position, position);
  }
}

// Adds the segments of one canvas's part of a pass. `first` is the index of the part's first token
// in the pass.
void Arena::add_segments(const Part& part, int64_t first) {
  const size_t before = segments_.size();
  const auto add = [&](int64_t row, int32_t rows, int32_t) {
    segments_.push_back({row, rows, first, part.tokens});
  };
  if (part.cached > 0) {
    const int32_t end = part.cached > part.first ? part.cached + part.tokens : part.first;
    if (part.cached < part.first || end > part.place->length)
      fail(DLM_INTERNAL, "a pass over %d cached rows before %d, but %d are stored", part.cached,
           end, part.place->length);
    each_run(*part.place, 0, part.first, add);
    each_run(*part.place, part.first + part.tokens, end, add);
  }
  if (segments_.size() == before) add(0, 0, 0);
}

void Arena::run(dlm_pass& pass, const std::vector<Part>& parts) {
  bool has_past = false, keeps = false;
  segments_.clear();
  int64_t first = 0;
  for (const Part& part : parts) {
    has_past |= part.cached > 0, keeps |= keeps_rows(part.use);
    if (keeps_rows(part.use) && pages_for(part.first + part.tokens) > part.place->pages.size())
      fail(DLM_INTERNAL, "a pass that stores %d rows from position %d, but there is room for %zu",
           part.tokens, part.first, part.place->pages.size() * page_rows_);
    if (keeps_rows(part.use) && static_cast<size_t>(part.first) < part.place->shared * page_rows_)
      fail(DLM_INTERNAL, "a pass that stores rows from position %d, which is shared", part.first);
    add_segments(part, first);
    first += part.tokens;
  }
  pass.cached = has_past ? static_cast<int32_t>(rows_) : 0;
  if (keeps) {
    const size_t tokens = pass.tokens;
    if (fresh_bytes_ < tokens * row_sum_) {
      fresh_bytes_ = 0;
      fresh_.reset();
      fresh_.reset(new std::byte[tokens * row_sum_]);
      fresh_bytes_ = tokens * row_sum_;
    }
    std::byte* at = fresh_.get();
    for (size_t i = 0; i < 2 * shape_.size(); ++i) {
      pointers_.set_present(i, at);
      at += tokens * heads(i) * row_bytes(i);
    }
  }
  pointers_.put(pass, has_past, keeps);
  engine_.run(pass, segments_);
  if (keeps) keep_new(pass, parts);
}

void Arena::keep_new(const dlm_pass& pass, const std::vector<Part>& parts) {
  const size_t tokens = pass.tokens;
  size_t first = 0;
  for (const Part& part : parts) {
    if (keeps_rows(part.use)) {
      const int32_t last = part.first + part.tokens;
      part.place->length = std::max(part.place->length, last);
      for (size_t i = 0; i < 2 * shape_.size(); ++i) {
        const size_t size = row_bytes(i);
        const auto* const fresh = static_cast<const std::byte*>(
            (i % 2 == 0 ? pass.present_keys : pass.present_values)[i / 2]);
        std::byte* const tensor = storage_.get() + starts_[i];
        for (size_t head = 0; head < heads(i); ++head)
          each_run(*part.place, part.first, last, [&](int64_t row, int32_t rows, int32_t position) {
            const size_t from = head * tokens + first + (position - part.first);
            std::memcpy(tensor + (head * rows_ + row) * size, fresh + from * size, rows * size);
          });
      }
    }
    first += part.tokens;
  }
  int64_t held = -pages_.saved() * page_rows_;
  for (const Place& place : places_) held += place.length;
  used_bytes_ = std::max<uint64_t>(used_bytes_, static_cast<uint64_t>(held) * row_sum_);
}

// A canvas has shared pages, followed by other pages. Converts the first of the other pages to a
// shared page.
void Arena::keep_next(Place& place, const std::vector<int32_t>& tokens) {
  const size_t number = place.shared;
  const int32_t before = number == 0 ? -1 : place.pages[number - 1];
  if (shares_)
    place.pages[number] =
        pages_.share(place.pages[number], before, tokens.data() + number * page_rows_, page_rows_);
  ++place.shared;
}

void Arena::share(Handle place, const std::vector<int32_t>& tokens, int32_t rows) {
  if (!shares_) return;
  while (place->shared < static_cast<size_t>(rows / page_rows_)) keep_next(*place, tokens);
}

template <class Visit>
void Arena::each_part(int32_t page, Visit visit) const {
  const auto first = static_cast<size_t>(page) * page_rows_;
  for (size_t i = 0; i < 2 * shape_.size(); ++i)
    for (size_t head = 0; head < heads(i); ++head)
      visit(storage_.get() + starts_[i] + (head * rows_ + first) * row_bytes(i),
            page_rows_ * row_bytes(i));
}

void Arena::read_page(Handle place, size_t number, std::byte* to) const {
  each_part(place->pages[number], [&](const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  });
}

}  // namespace dlm
