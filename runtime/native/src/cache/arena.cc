#include "cache/arena.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "base/error.h"

namespace dlm {

namespace {

// Returns the tokens of a shared page of the layers with a window: the serial number of the page of
// the other layers.
std::array<int32_t, 2> tokens_of(int64_t serial) {
  return {static_cast<int32_t>(serial), static_cast<int32_t>(serial >> 32)};
}

int32_t root_of(int32_t group) { return -1 - group; }

}  // namespace

Arena::Arena(HostEngine& engine, const CacheShape& shape, std::unique_ptr<RowMemory> memory,
             int32_t page_rows, RowCounts rows, int64_t most_idle)
    : engine_(engine),
      shape_(shape),
      page_rows_(page_rows),
      rows_(rows),
      window_(window_of(shape)),
      shares_(most_idle > 0),
      pages_(static_cast<int32_t>(rows.full / page_rows),
             static_cast<int32_t>(most_idle / page_rows)),
      windows_(static_cast<int32_t>(rows.window / page_rows),
               static_cast<int32_t>(std::min(most_idle, rows.window) / page_rows)),
      memory_(std::move(memory)),
      starts_(1, 0),
      pointers_(shape.size()) {
  for (size_t i = 0; i < 2 * shape.size(); ++i) {
    const size_t row = heads(i) * row_bytes(i);
    size_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(row, rows_of(i), &bytes) ||
        __builtin_add_overflow(starts_.back(), bytes, &end))
      throw std::bad_alloc();
    starts_.push_back(end);
    (has_window(i) ? window_row_sum_ : row_sum_) += row;
  }
}

size_t Arena::pages_for(int64_t rows) const {
  return static_cast<size_t>(in_pages(rows, page_rows_) / page_rows_);
}

int32_t Arena::window_page_of(int32_t page) const {
  const auto tokens = tokens_of(pages_.serial(page));
  return windows_.find_one(-1, tokens.data(), tokens.size());
}

Pages::Found Arena::find(const std::vector<int32_t>& tokens, int32_t group, int32_t most) const {
  Pages::Found found = pages_.find(root_of(group), tokens.data(), page_rows_, most / page_rows_);
  if (window_ == 0) return found;
  size_t usable = 0, together = 0;  // together: number of consecutive pages up to this one
  for (size_t number = 0; number < found.pages.size(); ++number) {
    together = window_page_of(found.pages[number]) < 0 ? 0 : together + 1;
    if (together >= std::min(number + 1, pages_for(window_))) usable = number + 1;
  }
  if (usable < found.pages.size())
    found = pages_.find(root_of(group), tokens.data(), page_rows_, usable);
  return found;
}

int32_t Arena::stored(const std::vector<int32_t>& tokens, int32_t group, int32_t most) const {
  if (!shares_) return 0;
  return static_cast<int32_t>(find(tokens, group, most).pages.size()) * page_rows_;
}

bool Arena::has_room(const std::vector<Wanted>& wanted) const {
  size_t needed = 0, window_needed = static_cast<size_t>(window_reserved_);
  for (const Wanted& one : wanted) {
    const Pages::Found found = find(one.tokens, one.group, one.stored);
    // Idle pages count as unused. An idle page that this canvas shares cannot take new rows, so it
    // must be counted as needed.
    needed += pages_for(one.rows) - found.pages.size() + found.idle;
    window_needed += pages_for(window_rows(one.rows, one.kept, page_rows_));
  }
  return needed <= static_cast<size_t>(pages_.unused()) && window_needed <= pages_for(rows_.window);
}

std::vector<Arena::Handle> Arena::take(const std::vector<Wanted>& wanted) {
  std::vector<Handle> taken;
  taken.reserve(wanted.size());
  std::list<Place> places;
  for (const Wanted& one : wanted) {
    if (one.rows > 0 && storage_ == nullptr) make_room();
    Place& place = places.emplace_back();
    place.pages = find(one.tokens, one.group, one.stored).pages;
    place.group = one.group;
    place.shared = place.pages.size();
    place.length = static_cast<int32_t>(place.shared) * page_rows_;
    place.pages.reserve(pages_for(one.rows));
    if (window_ == 0) continue;
    place.kept = one.kept;
    place.reserved = static_cast<int64_t>(pages_for(window_rows(one.rows, one.kept, page_rows_)));
    place.window_pages.resize(pages_for(one.rows), -1);
    place.window_end = place.shared;
    place.window_begin = place.shared - std::min(place.shared, pages_for(window_));
    for (size_t number = place.window_begin; number < place.window_end; ++number)
      place.window_pages[number] = window_page_of(place.pages[number]);
  }
  // From here on, no statement allocates memory. First mark the shared pages of all canvases as
  // used, so that the loop below does not take these pages for new rows.
  for (const Place& place : places) {
    for (const int32_t page : place.pages) pages_.use(page);
    for (size_t number = place.window_begin; number < place.window_end; ++number)
      windows_.use(place.window_pages[number]);
    window_reserved_ += place.reserved;
  }
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
  drop_window_pages(*place);
  window_reserved_ -= place->reserved;
  places_.erase(place);
}

void Arena::drop_window_pages(Place& place) noexcept {
  while (place.window_end > place.window_begin)
    windows_.give_back(place.window_pages[--place.window_end]);
}

void Arena::adopt(Handle place, const std::vector<int32_t>& tokens, int32_t stored,
                  const PromptCaches::Found& file) {
  auto end = static_cast<size_t>(file.rows / page_rows_);
  std::vector<int32_t> found;
  if (shares_) {
    end = std::max(end, find(tokens, place->group, stored).pages.size());
    found = pages_.find(root_of(place->group), tokens.data(), page_rows_, end).pages;
  }
  if (end <= place->shared) return;
  // The pages that the canvas needs in layers with a window. -1 means that `file` has the page.
  const size_t begin = end - std::min(end, pages_for(window_));
  std::vector<int32_t> window_pages;
  for (size_t number = begin; number < end; ++number) {
    window_pages.push_back(number < found.size() ? window_page_of(found[number]) : -1);
    if (window_pages.back() < 0 && number >= static_cast<size_t>(file.rows / page_rows_))
      fail(DLM_INTERNAL, "page %zu of %zu is missing in layers with a window", number, end);
  }
  // First mark these pages as used. Otherwise, the calls of give_back() below could free them.
  for (const int32_t page : window_pages)
    if (page >= 0) windows_.use(page);
  for (size_t& number = place->shared; number < found.size(); ++number) {
    pages_.use(found[number]);
    pages_.give_back(place->pages[number]);
    place->pages[number] = found[number];
  }
  drop_window_pages(*place);
  const auto copy = [&](size_t number, int32_t page, int32_t window_page) {
    const std::byte* from = file.cache->page(number);
    each_part(page, window_page, [&](std::byte* to, size_t bytes) {
      if (to != nullptr) memory_->write(from, to, bytes);
      from += bytes;
    });
  };
  while (place->shared < end) {
    copy(place->shared, place->pages[place->shared], -1);
    keep_next(*place, tokens);
  }
  place->length = std::max(place->length, static_cast<int32_t>(end) * page_rows_);
  if (window_ == 0) return;
  place->window_begin = place->window_end = begin;
  for (int32_t page : window_pages) {
    const size_t number = place->window_end;
    const bool is_there = page >= 0;
    if (!is_there) page = windows_.take();
    place->window_pages[number] = page;
    ++place->window_end;
    if (is_there) continue;
    copy(number, -1, page);
    share_window_page(*place, number);
  }
}

void Arena::make_room() {
  storage_ = memory_->allocate(starts_.back());
  for (size_t i = 0; i < 2 * shape_.size(); ++i) pointers_.set_past(i, storage_.get() + starts_[i]);
}

template <class Visit>
void Arena::each_run(const std::vector<int32_t>& pages, int32_t first, int32_t last,
                     Visit visit) const {
  for (int32_t position = first, end; position < last; position = end) {
    size_t page = position / page_rows_;
    const int64_t row = int64_t{pages[page]} * page_rows_ + position % page_rows_;
    while ((static_cast<int64_t>(page) + 1) * page_rows_ < last &&
           pages[page + 1] == pages[page] + 1)
      ++page;
    end = static_cast<int32_t>(
        std::min<int64_t>((static_cast<int64_t>(page) + 1) * page_rows_, last));
    visit(row, end - position, position);
  }
}

// Adds the segments of one canvas's part of a pass. `first` is the index of the part's first token
// in the pass.
void Arena::add_segments(const Part& part, int64_t first) {
  const size_t before = segments_.size(), window_before = window_rows_.segments.size();
  const auto add_to = [&](std::vector<Segment>& segments) {
    return [&segments, &part, first](int64_t row, int32_t rows, int32_t) {
      segments.push_back({row, rows, first, part.tokens});
    };
  };
  const auto add = add_to(segments_), add_window = add_to(window_rows_.segments);
  const Place& place = *part.place;
  if (part.cached > 0) {
    const int32_t end = part.cached > part.first ? part.cached + part.tokens : part.first;
    if (part.cached < part.first || end > place.length)
      fail(DLM_INTERNAL, "a pass over %d cached rows before %d, but %d are stored", part.cached,
           end, place.length);
    each_run(place.pages, 0, part.first, add);
    each_run(place.pages, part.first + part.tokens, end, add);
    if (window_ > 0) {
      const int32_t from = std::max(0, part.first - window_);
      if (end > part.first || static_cast<size_t>(from) < place.window_begin * page_rows_)
        fail(DLM_INTERNAL, "a pass from position %d to %d, but layers with a window keep %zu to %d",
             part.first, end, place.window_begin * page_rows_, place.length);
      each_run(place.window_pages, from, part.first, add_window);
    }
  }
  if (segments_.size() == before) add(0, 0, 0);
  if (window_ > 0 && window_rows_.segments.size() == window_before) add_window(0, 0, 0);
}

void Arena::run(Pass& pass, const std::vector<Part>& parts) {
  bool has_past = false, keeps = false;
  segments_.clear();
  window_rows_.segments.clear();
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
  pass.cached = has_past ? static_cast<int32_t>(rows_.full) : 0;
  window_rows_.cached = has_past && window_ > 0 ? static_cast<int32_t>(rows_.window) : 0;
  if (keeps) {
    const size_t tokens = pass.tokens;
    const size_t bytes = tokens * (row_sum_ + window_row_sum_);
    if (fresh_bytes_ < bytes) {
      fresh_bytes_ = 0;
      fresh_.reset();
      fresh_ = memory_->allocate(bytes);
      fresh_bytes_ = bytes;
    }
    std::byte* at = fresh_.get();
    for (size_t i = 0; i < 2 * shape_.size(); ++i) {
      pointers_.set_present(i, at);
      at += tokens * heads(i) * row_bytes(i);
    }
  }
  pointers_.put(pass, has_past, keeps);
  memory_->finish();
  engine_.run(pass, segments_, window_rows_);
  if (keeps) keep_new(pass, parts);
}

void Arena::move_window(Place& place, int32_t end) {
  const auto begin = static_cast<size_t>(std::max(0, end - place.kept) / page_rows_);
  while (place.window_begin < std::min(begin, place.window_end))
    windows_.give_back(place.window_pages[place.window_begin++]);
  if (place.window_begin == place.window_end && begin > place.window_end)
    place.window_begin = place.window_end = begin;
  while (place.window_end < pages_for(end))
    place.window_pages[place.window_end++] = windows_.take();
}

void Arena::keep_new(const dlm_pass& pass, const std::vector<Part>& parts) {
  const size_t tokens = pass.tokens;
  size_t first = 0;
  for (const Part& part : parts) {
    if (keeps_rows(part.use)) {
      Place& place = *part.place;
      const int32_t last = part.first + part.tokens;
      place.length = std::max(place.length, last);
      if (window_ > 0) move_window(place, last);
      const auto window_first = static_cast<int32_t>(place.window_begin) * page_rows_;
      for (size_t i = 0; i < 2 * shape_.size(); ++i) {
        const size_t size = row_bytes(i), head_rows = rows_of(i);
        const auto* const fresh = static_cast<const std::byte*>(
            (i % 2 == 0 ? pass.present_keys : pass.present_values)[i / 2]);
        std::byte* const tensor = storage_.get() + starts_[i];
        const auto& pages = has_window(i) ? place.window_pages : place.pages;
        const int32_t start = has_window(i) ? std::max(part.first, window_first) : part.first;
        each_run(pages, start, last, [&](int64_t row, int32_t rows, int32_t position) {
          const size_t from = first + (position - part.first);
          memory_->copy(fresh + from * size, tokens * size, tensor + row * size, head_rows * size,
                        rows * size, heads(i));
        });
      }
    }
    first += part.tokens;
  }
  RowCounts held{-pages_.saved() * page_rows_, -windows_.saved() * page_rows_};
  for (const Place& place : places_) held = held + RowCounts{place.length, window_rows_of(place)};
  used_bytes_ = std::max(used_bytes_, bytes_of(held));
}

// A canvas has shared pages, followed by other pages. Converts the first of the other pages to a
// shared page.
void Arena::keep_next(Place& place, const std::vector<int32_t>& tokens) {
  const size_t number = place.shared;
  const int32_t before = number == 0 ? root_of(place.group) : place.pages[number - 1];
  if (shares_)
    place.pages[number] =
        pages_.share(place.pages[number], before, tokens.data() + number * page_rows_, page_rows_);
  ++place.shared;
  if (number >= place.window_begin && number < place.window_end) share_window_page(place, number);
}

void Arena::share_window_page(Place& place, size_t number) {
  if (!shares_) return;
  const auto tokens = tokens_of(pages_.serial(place.pages[number]));
  int32_t& page = place.window_pages[number];
  page = windows_.share(page, -1, tokens.data(), tokens.size());
}

void Arena::share(Handle place, const std::vector<int32_t>& tokens, int32_t rows) {
  if (!shares_) return;
  while (place->shared < static_cast<size_t>(rows / page_rows_)) keep_next(*place, tokens);
}

template <class Visit>
void Arena::each_part(int32_t page, int32_t window_page, Visit visit) const {
  for (size_t i = 0; i < 2 * shape_.size(); ++i) {
    const int32_t own = has_window(i) ? window_page : page;
    const size_t bytes = page_rows_ * row_bytes(i);
    for (size_t head = 0; head < heads(i); ++head)
      visit(own < 0 ? nullptr
                    : storage_.get() + starts_[i] + head * rows_of(i) * row_bytes(i) + own * bytes,
            bytes);
  }
}

void Arena::read_page(Handle place, size_t number, std::byte* to) const {
  const int32_t window_page = window_ > 0 ? place->window_pages[number] : -1;
  each_part(place->pages[number], window_page, [&](const std::byte* from, size_t bytes) {
    memory_->read(from, to, bytes);
    to += bytes;
  });
}

}  // namespace dlm
