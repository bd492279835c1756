// What the walks over tokens need to know of the states of a byte automaton.
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

// Bytes of one kind lead to the same state from each state.
struct Kinds {
  std::array<uint8_t, 256> of{};    // the kind of each byte
  std::array<uint8_t, 256> byte{};  // the lowest byte of each kind
  size_t count = 0;
};

// Both arguments must outlive it.
class TokenStates {
 public:
  TokenStates(const ByteAutomaton& texts, Budget& budget);

  int32_t next_by_byte(int32_t state, uint8_t byte) const { return next(state, kinds_.of[byte]); }
  // How many bytes have to follow the state, as only one text can.
  int32_t forced(int32_t state) const { return forced_[static_cast<size_t>(state)]; }
  // The part that the state is of, -1 for states that take few bytes.
  int32_t part(int32_t state) const { return part_[static_cast<size_t>(state)]; }
  // Whether many bytes lead from the state back to it, so that many walks come there.
  bool is_hub(int32_t state) const { return is_hub_[static_cast<size_t>(state)] != 0; }
  // How the states of each part tell bytes apart.
  const std::vector<ByteClasses>& parts() const { return parts_; }
  // The text that has to follow a state, as far as the tokenizer gets it: whole characters.
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
  std::vector<int32_t> table_;  // [states, kinds]: the next state, -1: none
  std::vector<int32_t> forced_, part_;
  std::vector<uint8_t> is_hub_;
  std::vector<ByteClasses> parts_;
};

}  // namespace dlm::compile
