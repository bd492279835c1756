// Tracks where each row of a tensor of keys or values is stored. The rows that the next passes read
// are always at the start of the tensor.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace dlm {

// Assigns the rows of a tensor of keys or values to slots, which are places in the tensor. A row
// belongs to one position and one head. The number of heads is the total over all requests of the
// batch. S is the number of cached positions, T is the number of positions that the pass computes,
// and L = S + T. There are heads * L slots. L is the length of the canvas, or with
// CacheUse::append, the number of positions so far. A pass reads the first part of the tensor,
// [heads, S], and writes the part after it, [heads, T].
//
// The cached rows of a head may be in any order. If S or the cached positions change, each head
// gets a new part of the tensor, and only the rows outside this part must move. How many rows of a
// head must move depends on the number of preceding heads, but not on the length of the canvas.
class Slots {
 public:
  // Moves `rows` consecutive rows of a tensor from index `from` to index `to`. If is_swap is true,
  // exchanges the two ranges of rows instead. The ranges do not overlap.
  struct Move {
    size_t from, to, rows;
    bool is_swap;
  };

  // Makes room for `capacity` rows per head. If the number of heads does not change, the cached
  // rows are preserved.
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

  // Records that a pass has read `cached` rows per head, and has written the rows of `tokens`
  // positions from `first` on.
  void note_written(int32_t first, int32_t tokens, int32_t cached) {
    const size_t from = first, written = tokens;
    kept_ = cached;
    length_ = kept_ + written;
    hole_ = {from, from + written};
    size_t slot = heads_ * kept_;
    for (size_t head = 0; head < heads_; ++head)
      for (size_t i = from; i < hole_.last; ++i) put(head * stride_ + i, slot++);
  }

  // Selects the cached rows for the next passes: the rows of all positions except `first` to `last`
  // - 1. Returns the moves that bring these rows to the start of the tensor, head by head. The
  // caller must apply these moves to the tensor.
  std::vector<Move> keep_outside(int32_t first, int32_t last) {
    const Range hole{std::min(static_cast<size_t>(first), length_),
                     std::min(static_cast<size_t>(last), length_)};
    const size_t kept = length_ - (hole.last - hole.first);
    // For each head, `slots` lists the slots in the head's new part whose rows may have to leave
    // this part. `rows` lists the rows of the head that may be outside its new part. All other
    // slots of the new part contain rows that stay.
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
      // The heads are processed in the direction in which their parts shift. So the target slots
      // are rarely occupied.
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
        // This loop looks for a row that must move into the head's part. It always finds one,
        // because `rows` and `slots` have the same length.
        while (!belongs(*row) || part.holds(slot_of_[*row])) ++row;
        const size_t from = slot_of_[*row];
        const bool is_swap = !hole.holds(row_at_[slot] % stride_);
        put(row_at_[slot], from);
        put(*row, slot);
        // Moves are merged only within a head. All rows that a head gets come from outside its
        // part, so the source and the target of a merged move cannot overlap. Merged moves of two
        // heads could overlap, because the source of the second head may start in the target of the
        // first head.
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

  // Calls `visit` for each index in the range `one` that is not in the range `other`.
  template <class Visit>
  static void each_in_one(const Range& one, const Range& other, const Visit& visit) {
    for (size_t i = one.first; i < std::min(one.last, other.first); ++i) visit(i);
    for (size_t i = std::max(one.first, other.last); i < one.last; ++i) visit(i);
  }

  void put(size_t row, size_t slot) {
    row_at_[slot] = row;
    slot_of_[row] = slot;
  }

  size_t heads_ = 0, length_ = 0;  // length_ is L, the number of positions per head
  size_t stride_ = 1;              // allocated rows per head
  // S, the number of cached rows per head. The cached rows are at the start of the tensor, and
  // their positions are outside hole_.
  size_t kept_ = 0;
  Range hole_{0, 0};
  // Both arrays have heads * stride elements. The row of head h and position i has the index h *
  // stride + i.
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
