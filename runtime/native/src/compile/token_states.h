// Tables about the states of a byte automaton, used by the walks over tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "compile/budget.h"
#include "compile/byte_automaton.h"
#include "compile/vocabulary.h"

namespace dlm::compile {

// Groups bytes into kinds. In each state, all bytes of one kind lead to the same next state.
struct Kinds {
  std::array<uint8_t, 256> of{};    // the kind of each byte
  std::array<uint8_t, 256> byte{};  // the lowest byte of each kind
  size_t count = 0;
};

// Both arguments must outlive this object.
class TokenStates {
 public:
  TokenStates(const ByteAutomaton& texts, Budget& budget);

  int32_t next_by_byte(int32_t state, uint8_t byte) const { return next(state, kinds_.of[byte]); }
  // The number of bytes after the state that are forced, because no other bytes are allowed.
  int32_t forced(int32_t state) const { return forced_[static_cast<size_t>(state)]; }
  // The number of the part of the automaton that contains the state, or -1. In each state of a
  // part, many bytes are allowed, and many of them lead to the same state. The states of a part are
  // connected, or have the same byte classes.
  int32_t part(int32_t state) const { return part_[static_cast<size_t>(state)]; }
  // Returns whether many bytes lead from the state back to itself. Many walks reach such a state.
  bool is_hub(int32_t state) const { return is_hub_[static_cast<size_t>(state)] != 0; }
  // The byte classes of each part. The states of a part treat all bytes of one class alike.
  const std::vector<ByteClasses>& parts() const { return parts_; }
  // The text that must follow a state. The text is cut to whole characters and to the length that
  // the tokenizer is given.
  std::string text_after(int32_t state) const;
  // The memory of the table of next states.
  size_t bytes() const { return table_.size() * sizeof(int32_t); }

 private:
  int32_t next(int32_t state, size_t kind) const {
    return table_[static_cast<size_t>(state) * kinds_.count + kind];
  }
  void fill_table();
  void find_forced();
  void find_parts();
  ByteClasses classes_of(const std::vector<int32_t>& states);

  const ByteAutomaton& texts_;
  Budget& budget_;
  const Kinds kinds_;
  std::vector<int32_t> table_;  // [states, kinds]: the next state, or -1
  std::vector<int32_t> forced_, part_;
  std::vector<uint8_t> is_hub_;
  std::vector<ByteClasses> parts_;
};

}  // namespace dlm::compile
