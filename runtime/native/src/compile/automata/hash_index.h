// A hash index. The caller stores objects and numbers them. The index finds the number of an object
// by the object's hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dlm::compile {

// The index uses open addressing with linear probing. The load factor is at most 1/2. The number of
// an object must not be negative, because -1 marks a free slot.
class HashIndex {
 public:
  // Returns a number that was added with this hash, and for which is_equal(number) is true. Returns
  // -1 if there is no such number.
  template <class Equal>
  int32_t find(uint64_t hash, const Equal& is_equal) const {
    if (slots_.empty()) return -1;
    const auto tag = static_cast<uint32_t>(hash);
    for (size_t at = tag & mask();; at = (at + 1) & mask()) {
      if (slots_[at].number < 0) return -1;
      if (slots_[at].tag == tag && is_equal(slots_[at].number)) return slots_[at].number;
    }
  }
  void add(uint64_t hash, int32_t number) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    ++count_;
    put({static_cast<uint32_t>(hash), number});
  }
  size_t bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t tag;  // the low bits of the hash
    int32_t number;
  };

  size_t mask() const { return slots_.size() - 1; }
  void put(Slot slot) {
    size_t at = slot.tag & mask();
    while (slots_[at].number >= 0) at = (at + 1) & mask();
    slots_[at] = slot;
  }
  void grow() {
    constexpr size_t kFewest = 16;
    std::vector<Slot> old(slots_.empty() ? kFewest : 2 * slots_.size(), Slot{0, -1});
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.number >= 0) put(slot);
  }

  std::vector<Slot> slots_;  // the number of slots is a power of two
  size_t count_ = 0;
};

}  // namespace dlm::compile
