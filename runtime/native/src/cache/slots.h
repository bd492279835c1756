// Keeps track of where each row of a key or value tensor is stored. The rows that passes read are
// stored first.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace dlm {

// Maps the rows of a key or value tensor to slots. A row belongs to one position and one head. The
// heads of all requests in a batch are counted together, so there are heads * L slots. A pass reads
// [heads, S] at the start of the tensor, and writes [heads, T] after that. L is S + T. It is the
// length of the canvas or, with appended rows, grows with them.
//
// The cached rows of a head may be in any order. So when S or the positions change, only rows
// outside their head's new part move. These are a few blocks of rows for each preceding head,
// whatever the length of the canvas.
class Slots {
 public:
  // Moves the rows [from, from + rows) of a tensor to `to`, or swaps them with the rows there. The
  // two ranges do not overlap.
  struct Move {
    size_t from, to, rows;
    bool is_swap;
  };

  // Makes room for `capacity` rows per head. The kept rows stay if the number of heads is the same.
  void lay_out(size_t heads, int32_t capacity) {
    const std::vector<size_t> before(
        row_at_.begin(),
        row_at_.begin() + static_cast<std::ptrdiff_t>(heads == heads_ ? heads * kept_ : 0));
    const size_t stride = stride_;
    heads_ = heads;
    stride_ = static_cast<size_t>(capacity);
    row_at_.resize(heads_ * stride_);
    slot_of_.resize(heads_ * stride_);
    for (size_t slot = 0; slot < before.size(); ++slot)
      put(before[slot] / stride * stride_ + before[slot] % stride, slot);
  }

  int32_t kept() const { return static_cast<int32_t>(kept_); }
  int32_t length() const { return static_cast<int32_t>(length_); }

  // Records that a pass that read `cached` rows has written the rows of `tokens` positions from
  // `first` on.
  void note_written(int32_t first, int32_t tokens, int32_t cached) {
    const size_t from = first, written = tokens;
    kept_ = cached;
    length_ = kept_ + written;
    hole_ = {from, from + written};
    size_t slot = heads_ * kept_;
    for (size_t head = 0; head < heads_; ++head)
      for (size_t i = from; i < hole_.last; ++i) put(head * stride_ + i, slot++);
  }

  // Collects the rows outside the positions [first, last) of each head in the head's part at the
  // start. Returns the moves that the caller must apply.
  std::vector<Move> keep_outside(int32_t first, int32_t last) {
    const Range hole{std::min(static_cast<size_t>(first), length_),
                     std::min(static_cast<size_t>(last), length_)};
    const size_t kept = length_ - (hole.last - hole.first);
    // These lists exist per head. `slots` has the slots of the head's new part whose rows may have
    // to leave. `rows` has the head's rows that may be outside the part. All other slots of the
    // part hold rows that stay.
    std::vector<std::vector<size_t>> slots(heads_), rows(heads_);
    for (size_t head = 0; head < heads_; ++head) {
      const Range part{head * kept, (head + 1) * kept}, before{head * kept_, (head + 1) * kept_};
      each_in_one(part, before, [&](size_t slot) { slots[head].push_back(slot); });
      each_in_one(hole, hole_,
                  [&](size_t i) { slots[head].push_back(slot_of_[head * stride_ + i]); });
      each_in_one(before, part, [&](size_t slot) { rows[head].push_back(row_at_[slot]); });
      each_in_one(hole_, hole, [&](size_t i) { rows[head].push_back(head * stride_ + i); });
    }
    std::vector<Move> moves;
    for (size_t n = 0; n < heads_; ++n) {
      // The heads are processed in the direction in which the parts shift. So the target slots are
      // rarely occupied.
      const size_t head = kept < kept_ ? n : heads_ - 1 - n;
      const Range part{head * kept, (head + 1) * kept},
          own{head * stride_, head * stride_ + length_};
      const auto belongs = [&](size_t row) {
        return own.holds(row) && !hole.holds(row - own.first);
      };
      const size_t begun = moves.size();
      auto row = rows[head].begin();
      for (const size_t slot : slots[head]) {
        if (!part.holds(slot) || belongs(row_at_[slot])) continue;
        // there is one such row for each such slot
        while (!belongs(*row) || part.holds(slot_of_[*row])) ++row;
        const size_t from = slot_of_[*row];
        const bool is_swap = !hole.holds(row_at_[slot] % stride_);
        put(row_at_[slot], from);
        put(*row, slot);
        // Moves are merged only within a head. A head's rows come from outside its part, so source
        // and target of a merged move cannot overlap. But the next head's source may start where
        // this head's target is.
        const Move before = moves.size() == begun ? Move{} : moves.back();
        if (before.rows > 0 && before.is_swap == is_swap && before.from + before.rows == from &&
            before.to + before.rows == slot)
          ++moves.back().rows;
        else
          moves.push_back({from, slot, 1, is_swap});
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

  // Visits the elements of the range `one` that are not in the range `other`.
  template <class Visit>
  static void each_in_one(const Range& one, const Range& other, const Visit& visit) {
    for (size_t i = one.first; i < std::min(one.last, other.first); ++i) visit(i);
    for (size_t i = std::max(one.first, other.last); i < one.last; ++i) visit(i);
  }

  void put(size_t row, size_t slot) {
    row_at_[slot] = row;
    slot_of_[row] = slot;
  }

  size_t heads_ = 0, length_ = 0;  // L
  size_t stride_ = 1;              // allocated rows per head
  size_t kept_ = 0;  // S: rows per head at the start; they are the positions outside hole_
  Range hole_{0, 0};
  // Both [heads * stride]. The row of head h and position i has index h * stride + i.
  std::vector<size_t> row_at_, slot_of_;
};

// Applies the moves to a tensor with `row` bytes per row.
inline void apply(const std::vector<Slots::Move>& moves, std::byte* rows, size_t row) {
  for (const Slots::Move& move : moves) {
    assert(move.from + move.rows <= move.to || move.to + move.rows <= move.from);
    std::byte *const from = rows + move.from * row, *const to = rows + move.to * row;
    if (move.is_swap)
      std::swap_ranges(from, from + move.rows * row, to);
    else
      std::memcpy(to, from, move.rows * row);
  }
}

}  // namespace dlm
