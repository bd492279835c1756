// Tables about the states of a byte automaton, used by the walks over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "compile/budget.h"
#include "compile/byte_automaton.h"
#include "compile/token_sets.h"

namespace dlm::compile {

// Both arguments must outlive this object.
class TokenStates {
 public:
  TokenStates(const ByteAutomaton& texts, TokenSets& sets, Budget& budget);

  // The bytes that a state takes, divided by their next states.
  int32_t shape(int32_t state) const { return states_[static_cast<size_t>(state)].shape; }
  // The next state of a part of the shape.
  int32_t target(int32_t state, int32_t part) const {
    return targets_[states_[static_cast<size_t>(state)].first + static_cast<size_t>(part)];
  }
  // The number of bytes after the state that are forced, because no other bytes are allowed.
  int32_t forced(int32_t state) const { return forced_[static_cast<size_t>(state)]; }
  // Returns whether many bytes are allowed, and many of them lead to the same state.
  bool is_wide(int32_t state) const { return states_[static_cast<size_t>(state)].is_wide; }
  // Returns whether many bytes lead from the state back to itself. Many walks reach such a state.
  bool is_hub(int32_t state) const { return states_[static_cast<size_t>(state)].is_hub; }
  // The text that must follow a state. The text is cut to whole characters and to the length that
  // the tokenizer is given.
  std::string text_after(int32_t state) const;
  size_t bytes() const;

 private:
  struct State {
    int32_t shape;
    uint32_t first;  // in targets_
    bool is_wide, is_hub;
  };

  void find_shapes(TokenSets& sets);
  void find_forced();

  const ByteAutomaton& texts_;
  Budget& budget_;
  std::vector<State> states_;
  std::vector<int32_t> targets_;  // by state and part
  std::vector<int32_t> forced_;   // [states]
};

}  // namespace dlm::compile
