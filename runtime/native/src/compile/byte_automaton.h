// Deterministic automata over bytes, and functions that minimise, intersect and subtract them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/budget.h"

namespace dlm::compile {

struct ByteEdge {
  uint8_t low, high;  // first and last byte of the edge
  int32_t state;      // the target
};

// A deterministic automaton. State 0 is the start state. An automaton without states accepts no
// text.
//
// The functions below return minimal automata: every state has a path to an accepting state, no two
// states accept the same texts, and states are in breadth-first order.
struct ByteAutomaton {
  std::vector<uint32_t> starts;    // [states + 1]: state s has edges [starts[s], starts[s + 1])
  std::vector<ByteEdge> edges;     // per state by byte; adjacent ranges differ in target
  std::vector<uint8_t> accepting;  // [states]

  size_t states() const { return accepting.size(); }
  bool is_empty() const { return accepting.empty(); }
  int32_t next(int32_t state, uint8_t byte) const;  // -1 if there is no edge
  bool matches(std::string_view text) const;
};

// Appends an edge to the last state of an automaton. Extends the previous edge instead if both are
// adjacent and have the same target.
void append_edge(ByteAutomaton& automaton, uint8_t low, uint8_t high, int32_t state);

// Returns the minimal automaton of the texts that `automaton` accepts from state `first` on.
// `automaton` need not be minimal. Throws if the result has more states than the limit.
ByteAutomaton minimised(const ByteAutomaton& automaton, int32_t first, Budget& budget);

// intersection(): the texts that both accept. difference(): the texts that `first` accepts and
// `second` does not. Both results are minimal.
ByteAutomaton intersection(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);
ByteAutomaton difference(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);

// Returns every text T without NUL for which `texts` accepts `before` + T + `behind`. Throws if
// there is no such text. If `before` is the reason, `hint` is appended to the message. `texts` must
// be minimal.
ByteAutomaton between(const ByteAutomaton& texts, const std::string& before,
                      const std::string& behind, const std::string& hint, Budget& budget);

}  // namespace dlm::compile
