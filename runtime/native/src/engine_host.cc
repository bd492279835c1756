// Contexts in host memory, for the engines whose passes run there. Each holds one copy of a request's keys and values.
#include <algorithm>
#include <cassert>
#include <climits>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "engine.h"
#include "error.h"

namespace dlm {
namespace {

// Where the rows of a tensor of keys or values lie: heads * L of them, one for every stored position and every head of all
// requests of a batch. A pass reads [heads, S] at the start and writes [heads, T] behind them; S + T is L, which is the canvas,
// or grows by what is appended.
//
// As cached rows may stand in any order, another S or other positions move only the rows that are outside their head's new
// part: as many as a few blocks have, times the heads before, however long the canvas is.
class Slots {
 public:
  // Rows [from, from + rows) of a tensor go to `to`, or change places with what is there; the two do not overlap.
  struct Move {
    size_t from, to, rows;
    bool is_swap;
  };

  // Makes room for `capacity` rows a head; those that were kept stay where they are if there are as many heads.
  void lay_out(size_t heads, int32_t capacity) {
    const std::vector<size_t> before(row_at_.begin(), row_at_.begin() + static_cast<std::ptrdiff_t>(heads == heads_ ? heads * kept_ : 0));
    const size_t stride = stride_;
    heads_ = heads;
    stride_ = static_cast<size_t>(capacity);
    row_at_.resize(heads_ * stride_);
    slot_of_.resize(heads_ * stride_);
    for (size_t slot = 0; slot < before.size(); ++slot) put(before[slot] / stride * stride_ + before[slot] % stride, slot);
  }

  int32_t kept() const { return static_cast<int32_t>(kept_); }

  // A pass over `cached` rows has written those of the positions from `first` on.
  void note_written(int32_t first, int32_t tokens, int32_t cached) {
    const auto from = static_cast<size_t>(first), written = static_cast<size_t>(tokens);
    kept_ = static_cast<size_t>(cached);
    length_ = kept_ + written;
    hole_ = {from, from + written};
    size_t slot = heads_ * kept_;
    for (size_t head = 0; head < heads_; ++head)
      for (size_t i = from; i < hole_.last; ++i) put(head * stride_ + i, slot++);
  }

  // Gives each head's rows of the stored positions outside [first, last) the head's part of the start; all others are lost.
  std::vector<Move> keep_outside(int32_t first, int32_t last) {
    const Range hole{std::min(static_cast<size_t>(first), length_), std::min(static_cast<size_t>(last), length_)};
    const size_t kept = length_ - (hole.last - hole.first);
    // Of each head: slots of its new part that may hold what does not belong there, and rows that may be elsewhere. All other
    // slots of the part hold a row that stays.
    std::vector<std::vector<size_t>> slots(heads_), rows(heads_);
    for (size_t head = 0; head < heads_; ++head) {
      const Range part{head * kept, (head + 1) * kept}, before{head * kept_, (head + 1) * kept_};
      each_in_one(part, before, [&](size_t slot) { slots[head].push_back(slot); });
      each_in_one(hole, hole_, [&](size_t i) { slots[head].push_back(slot_of_[head * stride_ + i]); });
      each_in_one(before, part, [&](size_t slot) { rows[head].push_back(row_at_[slot]); });
      each_in_one(hole_, hole, [&](size_t i) { rows[head].push_back(head * stride_ + i); });
    }
    std::vector<Move> moves;
    for (size_t n = 0; n < heads_; ++n) {
      const size_t head = kept < kept_ ? n : heads_ - 1 - n;  // the way in which parts shift, so that little is in it
      const Range part{head * kept, (head + 1) * kept}, own{head * stride_, head * stride_ + length_};
      const auto belongs = [&](size_t row) { return own.holds(row) && !hole.holds(row - own.first); };
      const size_t begun = moves.size();
      auto row = rows[head].begin();
      for (const size_t slot : slots[head]) {
        if (!part.holds(slot) || belongs(row_at_[slot])) continue;
        while (!belongs(*row) || part.holds(slot_of_[*row])) ++row;  // there are as many as such slots
        const size_t from = slot_of_[*row];
        const bool is_swap = !hole.holds(row_at_[slot] % stride_);
        put(row_at_[slot], from);
        put(*row, slot);
        // Rows of one head go together alone: they come from outside its part, so that what goes to the part cannot overlap
        // them. The next head's may start where this one's arrived.
        const Move* const last_move = moves.size() == begun ? nullptr : &moves.back();
        const bool goes_on = last_move != nullptr && last_move->is_swap == is_swap &&
                             last_move->from + last_move->rows == from && last_move->to + last_move->rows == slot;
        if (goes_on) ++moves.back().rows;
        else moves.push_back({from, slot, 1, is_swap});
      }
    }
    kept_ = kept;
    hole_ = hole;
    return moves;
  }

 private:
  struct Range {
    size_t first, last;
    bool holds(size_t i) const { return i >= first && i < last; }
  };

  // What is in `one` and not in `other`.
  template <class Visit>
  static void each_in_one(const Range& one, const Range& other, const Visit& visit) {
    for (size_t i = one.first; i < std::min(one.last, other.first); ++i) visit(i);
    for (size_t i = std::max(one.first, other.last); i < one.last; ++i) visit(i);
  }

  void put(size_t row, size_t slot) {
    row_at_[slot] = row;
    slot_of_[row] = slot;
  }

  size_t heads_ = 0, length_ = 0;         // L
  size_t stride_ = 1;                     // rows a head that there is room for
  size_t kept_ = 0;                       // S: rows of each head at the start, of all positions outside hole_
  Range hole_{0, 0};
  std::vector<size_t> row_at_, slot_of_;  // [heads * stride]; the row of head h and position i is h * stride + i
};

class HostContext final : public Context {
 public:
  HostContext(HostEngine& engine, const CacheShape& cache, int32_t longest)
      : engine_(engine), cache_(cache), longest_(longest), nothing_(cache.size(), nullptr) {
    for (size_t i = 0; i < cache.size(); ++i) {
      const auto alike = [&](const Group& group) { return group.kv_heads == cache[i].kv_heads; };
      auto found = std::find_if(groups_.begin(), groups_.end(), alike);
      if (found == groups_.end()) found = groups_.insert(found, {cache[i].kv_heads, {}, {}});
      found->layers.push_back(i);
    }
  }

  void run(const dlm_pass& wanted, CacheUse use) override {
    dlm_pass pass = wanted;
    pass.layers = static_cast<int32_t>(cache_.size());
    pass.past_keys = pass.past_values = nothing_.data();
    const bool is_read = use != CacheUse::none && pass.cached > 0;
    const bool is_written = use != CacheUse::none && use != CacheUse::read;
    for (const Group& group : groups_)
      if (is_read && group.slots.kept() != pass.cached)
        fail(DLM_INTERNAL, "a pass over %d cached rows a head, and %d are kept", pass.cached, group.slots.kept());
    if (use == CacheUse::write) lay_out(pass.batch, pass.tokens, pass.tokens);
    if (use == CacheUse::append) make_room(pass.batch, pass.cached, pass.tokens);
    if (is_read) {
      point(past_, pass.batch, 0);
      pass.past_keys = past_.keys.data();
      pass.past_values = past_.values.data();
    }
    if (is_written) {
      point(present_, pass.batch, pass.cached);
      pass.present_keys = present_.keys.data();
      pass.present_values = present_.values.data();
    }
    engine_.run(pass);
    if (!is_written) return;
    const auto first = static_cast<int32_t>(pass.position_ids[0]);
    for (Group& group : groups_) group.slots.note_written(first, pass.tokens, pass.cached);
  }

  void keep_outside(int32_t first, int32_t last) override {
    for (Group& group : groups_) {
      const std::vector<Slots::Move> moves = group.slots.keep_outside(first, last);
      for (const size_t layer : group.layers) {
        const size_t row = cache_[layer].row_bytes();
        for (const size_t start : {starts_[2 * layer], starts_[2 * layer + 1]}) apply(moves, storage_.get() + start, row);
      }
    }
  }

  uint64_t cache_bytes() const override { return used_bytes_; }

 private:
  // Layers of as many heads: their rows lie, and move, alike.
  struct Group {
    int32_t kv_heads;
    std::vector<size_t> layers;
    Slots slots;
  };

  struct Tensors {
    std::vector<void*> keys, values;  // [layers]
  };

  static void apply(const std::vector<Slots::Move>& moves, std::byte* rows, size_t row) {
    for (const Slots::Move& move : moves) {
      assert(move.from + move.rows <= move.to || move.to + move.rows <= move.from);
      std::byte *const from = rows + move.from * row, *const to = rows + move.to * row;
      if (move.is_swap) std::swap_ranges(from, from + move.rows * row, to);
      else std::memcpy(to, from, move.rows * row);
    }
  }

  // Where each tensor starts if all have `rows` a head, and behind them the size of all.
  std::vector<size_t> starts_of(int32_t batch, int32_t rows) const {
    std::vector<size_t> starts(1, 0);
    for (size_t i = 0; i < 2 * cache_.size(); ++i) {
      size_t end = 0;
      if (__builtin_add_overflow(starts.back(), cache_[i / 2].tensor_bytes(batch, rows), &end)) throw std::bad_alloc();
      starts.push_back(end);
    }
    return starts;
  }

  // For `rows` of each head, and up to `most` where the storage has room. It grows and never shrinks; what it held is given back
  // first.
  void lay_out(int32_t batch, int32_t rows, int32_t most) {
    used_bytes_ = 0;
    size_t bytes = starts_of(batch, rows).back();
    if (bytes > storage_bytes_) {
      storage_bytes_ = 0;
      storage_.reset();
      storage_.reset(new std::byte[bytes]);  // not make_unique, which would write zeros to all of it
      storage_bytes_ = bytes;
    }
    capacity_ = static_cast<int32_t>(std::min(static_cast<size_t>(most), storage_bytes_ / (bytes / static_cast<size_t>(rows))));
    starts_ = starts_of(batch, capacity_);
    used_bytes_ = bytes;
    for (Group& group : groups_) group.slots.lay_out(static_cast<size_t>(batch) * static_cast<size_t>(group.kv_heads), capacity_);
  }

  // For `tokens` rows behind the `cached` ones of each head, which stay. Room doubles, so that rows are moved to a new place a few
  // times only, and never comes to more than the longest canvas has.
  void make_room(int32_t batch, int32_t cached, int32_t tokens) {
    const int32_t rows = cached + tokens;
    if (cached == 0) {
      lay_out(batch, rows, std::max(rows, longest_));
    } else if (rows > capacity_) {
      const int32_t most = static_cast<int32_t>(std::max<int64_t>(rows, std::min<int64_t>(2 * int64_t{capacity_}, longest_)));
      std::vector<size_t> starts = starts_of(batch, most);
      std::unique_ptr<std::byte[]> storage(new std::byte[starts.back()]);
      for (size_t i = 0; i + 1 < starts.size(); ++i)
        std::memcpy(storage.get() + starts[i], storage_.get() + starts_[i], cache_[i / 2].tensor_bytes(batch, cached));
      storage_ = std::move(storage);
      storage_bytes_ = starts.back();
      starts_ = std::move(starts);
      capacity_ = most;
      for (Group& group : groups_) group.slots.lay_out(static_cast<size_t>(batch) * static_cast<size_t>(group.kv_heads), most);
    }
    used_bytes_ = std::max(used_bytes_, starts_of(batch, rows).back());
  }

  // At what lies behind `cached` rows a head in each tensor.
  void point(Tensors& tensors, int32_t batch, int32_t cached) const {
    tensors.keys.resize(cache_.size());
    tensors.values.resize(cache_.size());
    for (size_t i = 0; i < cache_.size(); ++i) {
      const size_t offset = cache_[i].tensor_bytes(batch, cached);
      tensors.keys[i] = storage_.get() + starts_[2 * i] + offset;
      tensors.values[i] = storage_.get() + starts_[2 * i + 1] + offset;
    }
  }

  HostEngine& engine_;
  const CacheShape& cache_;                 // the engine's
  const int32_t longest_;
  const std::vector<const void*> nothing_;  // [layers], the past of a pass without one
  std::unique_ptr<std::byte[]> storage_;    // keys and values of layer 0, of layer 1, ...
  std::vector<size_t> starts_;              // [2 * layers + 1], where in the storage each of them starts
  int32_t capacity_ = 0;                    // rows a head that each has room for
  size_t storage_bytes_ = 0, used_bytes_ = 0;
  Tensors past_, present_;  // of the last pass that had them
  std::vector<Group> groups_;
};

class None final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  void run(const dlm_pass&) override {
    fail(DLM_UNSUPPORTED, "the bundle was opened with engine \"none\", which makes no passes: open it with another engine");
  }

  std::string description() const override { return "none"; }
};

}  // namespace

int32_t Engine::max_rows(int32_t, int32_t) const { return INT32_MAX; }

int32_t Engine::max_batch() const { return INT32_MAX; }

std::string Engine::limits() const { return ""; }

std::unique_ptr<Context> HostEngine::open_context(int32_t longest) {
  return std::make_unique<HostContext>(*this, cache_, longest);
}

std::unique_ptr<Engine> make_none(CacheShape cache) { return std::make_unique<None>(std::move(cache)); }

}  // namespace dlm
