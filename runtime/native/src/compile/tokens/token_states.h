// Computes tables about the states of a byte automaton. token_walks.h uses these tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/automata/byte_automaton.h"
#include "compile/tokens/token_sets.h"

namespace dlm::compile {

// A forced text consists of the only bytes that can come next. The compiler passes at most this
// many bytes of such a text to the tokenizer.
constexpr size_t kEncodedBytes = 96;

// The tables of the states of `texts`. `texts` and `budget` must outlive this object.
class TokenStates {
 public:
  TokenStates(const ByteAutomaton& texts, TokenSets& sets, Budget& budget);

  // Returns the index that TokenSets has assigned to the state's shape. The shape divides the bytes
  // that the state accepts into parts. All bytes of a part lead to the same next state.
  int32_t shape(int32_t state) const { return states_[static_cast<size_t>(state)].shape; }
  // Returns the state to which the bytes of one part of the shape lead.
  int32_t target(int32_t state, int32_t part) const {
    return targets_[states_[static_cast<size_t>(state)].first + static_cast<size_t>(part)];
  }
  // Returns the number of forced bytes after the state. A byte is forced if it is the only possible
  // next byte.
  int32_t forced(int32_t state) const { return forced_[static_cast<size_t>(state)]; }
  // Returns true if the state accepts many bytes, and many of these bytes lead to the same state.
  bool is_wide(int32_t state) const { return states_[static_cast<size_t>(state)].is_wide; }
  // Returns true if many bytes lead from the state back to itself. Such a state is called a hub.
  // Tokens lead to it from many other states.
  bool is_hub(int32_t state) const { return states_[static_cast<size_t>(state)].is_hub; }
  // Returns the text that must follow a state. The text is cut to 96 bytes and to whole characters.
  std::string text_after(int32_t state) const;
  size_t bytes() const;

 private:
  struct State {
    int32_t shape;
    uint32_t first;  // the index of the first next state in targets_
    bool is_wide, is_hub;
  };

  void find_shapes(TokenSets& sets);
  void find_forced();

  const ByteAutomaton& texts_;
  Budget& budget_;
  std::vector<State> states_;
  std::vector<int32_t> targets_;  // for each state and each part: the next state
  std::vector<int32_t> forced_;   // [states]: the number of forced bytes after the state
};

}  // namespace dlm::compile
