// Deterministic automata over bytes: their minimal form, products, and what is left of one when the
// text around is given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/budget.h"

namespace dlm::compile {

struct ByteEdge {
  uint8_t low, high;  // bytes of the edge, both included
  int32_t state;      // that it leads to
};

// State 0 is the first. What the functions below return is minimal: a text is accepted from every
// state, no two states accept the same texts, and states are in breadth-first order. No state: the
// language is empty.
struct ByteAutomaton {
  std::vector<uint32_t> starts;    // [states + 1]: of state s the edges [starts[s], starts[s + 1])
  std::vector<ByteEdge> edges;     // of a state ascending by byte; adjacent ones differ in state
  std::vector<uint8_t> accepting;  // [states]

  size_t states() const { return accepting.size(); }
  bool is_empty() const { return accepting.empty(); }
  int32_t next(int32_t state, uint8_t byte) const;  // -1: none
  bool matches(std::string_view text) const;
};

// Appends an edge to the last state of an automaton, or joins it to the edge before it.
void append_edge(ByteAutomaton& automaton, uint8_t low, uint8_t high, int32_t state);

// The minimal automaton of the texts that `automaton` accepts from state `first` on; it need not be
// minimal itself. Throws when the result has more states than the limit.
ByteAutomaton minimised(const ByteAutomaton& automaton, int32_t first, Budget& budget);

// Texts of both, and texts of `first` that are not of `second`. Minimal.
ByteAutomaton intersection(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);
ByteAutomaton difference(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);

// The texts without NUL that make a text of `texts` when `before` and `behind` are put around them.
// Throws when there is none; `hint` goes to the end of that message if `before` is the reason.
ByteAutomaton between(const ByteAutomaton& texts, const std::string& before,
                      const std::string& behind, const std::string& hint, Budget& budget);

}  // namespace dlm::compile
