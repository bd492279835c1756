#include "cache/arena.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"

namespace dlm {

Arena::Arena(HostEngine& engine, const CacheShape& shape, int64_t rows)
    : engine_(engine), shape_(shape), rows_(rows), starts_(1, 0), pointers_(shape.size()) {
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

std::byte* Arena::rows_of(const Place& place, size_t tensor, size_t head) const {
  const size_t row = head * rows_ + place.start;
  return storage_.get() + starts_[tensor] + row * row_bytes(tensor);
}

bool Arena::has_room(const std::vector<int32_t>& wanted) const {
  // The lengths of the free gaps between the places of requests. A new request takes the first gap
  // that is long enough.
  std::vector<int64_t> gaps;
  int64_t end = 0;
  for (const Place& place : places_) {
    gaps.push_back(place.start - end);
    end = place.start + place.rows;
  }
  gaps.push_back(rows_ - end);
  return std::all_of(wanted.begin(), wanted.end(), [&](int32_t rows) {
    const auto gap =
        std::find_if(gaps.begin(), gaps.end(), [&](int64_t length) { return length >= rows; });
    if (gap != gaps.end()) *gap -= rows;
    return gap != gaps.end();
  });
}

Arena::Handle Arena::take(int32_t rows) {
  if (rows > 0 && storage_ == nullptr) make_room();
  int64_t start = 0;
  auto before = places_.begin();
  for (; before != places_.end() && before->start - start < rows; ++before)
    start = before->start + before->rows;
  if (before == places_.end() && rows_ - start < rows)
    fail(DLM_INTERNAL, "no room for %d key/value rows", rows);
  std::list<Place> made;
  made.push_back({start, rows, {}});
  const Handle place = made.begin();
  place->slots.lay_out(1, std::max(rows, 1));
  places_.splice(before, made);
  return place;
}

void Arena::make_room() {
  // make_unique would fill all the memory with zeros.
  storage_.reset(new std::byte[starts_.back()]);
  for (size_t i = 0; i < 2 * shape_.size(); ++i) pointers_.set_past(i, storage_.get() + starts_[i]);
}

void Arena::run(dlm_pass& pass, const std::vector<Part>& parts) {
  bool has_past = false, keeps = false;
  segments_.clear();
  int64_t first = 0;
  for (const Part& part : parts) {
    has_past |= part.cached > 0, keeps |= keeps_rows(part.use);
    if (part.cached > 0 && part.place->slots.kept() != part.cached)
      fail(DLM_INTERNAL, "a pass over %d cached rows a head, but %d are kept", part.cached,
           part.place->slots.kept());
    if (keeps_rows(part.use) && part.cached + part.tokens > part.place->rows)
      fail(DLM_INTERNAL, "a pass that keeps %d rows after %d, but there is room for %d",
           part.tokens, part.cached, part.place->rows);
    segments_.push_back({part.cached > 0 ? part.place->start : 0, part.cached, first, part.tokens});
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
    const size_t own = part.tokens, cached = part.cached;
    if (keeps_rows(part.use)) {
      part.place->slots.note_written(part.first, part.tokens, part.cached);
      for (size_t i = 0; i < 2 * shape_.size(); ++i) {
        const size_t row = row_bytes(i);
        const auto* const fresh = static_cast<const std::byte*>(
            (i % 2 == 0 ? pass.present_keys : pass.present_values)[i / 2]);
        for (size_t head = 0; head < heads(i); ++head)
          std::memcpy(rows_of(*part.place, i, head) + cached * row,
                      fresh + (head * tokens + first) * row, own * row);
      }
    }
    first += own;
  }
  size_t held = 0;
  for (const Place& place : places_) held += place.slots.length();
  used_bytes_ = std::max<uint64_t>(used_bytes_, held * row_sum_);
}

void Arena::keep_outside(Handle place, int32_t first, int32_t last) {
  const std::vector<Slots::Move> moves = place->slots.keep_outside(first, last);
  for (size_t i = 0; i < 2 * shape_.size(); ++i)
    for (size_t head = 0; head < heads(i); ++head)
      apply(moves, rows_of(*place, i, head), row_bytes(i));
}

}  // namespace dlm
