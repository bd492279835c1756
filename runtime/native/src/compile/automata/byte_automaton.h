// Defines deterministic automata over bytes, and functions that minimise, intersect and subtract
// automata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/budget.h"

namespace dlm::compile {

// Two bytes that occur in no UTF-8 text. kTextStart comes before the first token of a text. kNamed
// and the name of an added token, such as <tool_call>, stand for this token. A constraint allows an
// added token only if it contains these bytes, because other tokens may spell the same name.
constexpr char kTextStart = '\xFF';
constexpr char kNamed = '\xFE';

struct ByteEdge {
  uint8_t low, high;  // first and last byte of the range that this edge accepts
  int32_t state;      // the next state
};

// A deterministic automaton. State 0 is the start state. An automaton without states accepts no
// text.
//
// The functions below return minimal automata. In a minimal automaton, no two states accept the
// same continuations, and there is a path from every state to an accepting state. The states are in
// breadth-first order.
struct ByteAutomaton {
  // [states + 1]: the edges of state s are edges[starts[s]] to edges[starts[s + 1] - 1].
  std::vector<uint32_t> starts;
  // All edges, sorted by state and byte. Two edges of the same state with adjacent byte ranges lead
  // to different states.
  std::vector<ByteEdge> edges;
  std::vector<uint8_t> accepting;  // [states]: 1 if a text may end in the state

  size_t states() const { return accepting.size(); }
  bool is_empty() const { return accepting.empty(); }
  // Returns the state to which `byte` leads from `state`, or -1 if there is no edge for the byte.
  int32_t next(int32_t state, uint8_t byte) const;
  bool matches(std::string_view text) const;
};

// Appends an edge to the last state of an automaton. If the previous edge leads to the same state,
// and its bytes end directly before `low`, the function extends the previous edge instead.
void append_edge(ByteAutomaton& automaton, uint8_t low, uint8_t high, int32_t state);

// Returns the minimal automaton for all texts that `automaton` accepts from state `first` on.
// `automaton` need not be minimal. Throws an error if the result has more states than the
// limit.
ByteAutomaton minimised(const ByteAutomaton& automaton, int32_t first, Budget& budget);

// The automaton that intersection() returns accepts the texts that both automata accept. The
// automaton that difference() returns accepts the texts that `first` accepts and `second` does not
// accept. Both results are minimal.
ByteAutomaton intersection(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);
ByteAutomaton difference(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget);

// Returns an automaton that accepts each text T without NUL bytes for which `texts` accepts
// `before` + T + `behind`. `texts` must be minimal and not empty. Throws an error if there is no
// such T. If `texts` accepts no text that starts with `before`, the error message ends with `hint`.
ByteAutomaton between(const ByteAutomaton& texts, const std::string& before,
                      const std::string& behind, const std::string& hint, Budget& budget);

}  // namespace dlm::compile
