// Minimal deterministic automata over bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "compile/budget.h"
#include "compile/expression.h"

namespace dlm::compile {

struct ByteEdge {
  uint8_t low, high;  // bytes of the edge, both included
  int32_t state;      // that it leads to
};

// From every state a text is accepted, and no two states accept the same texts. State 0 is the
// first, the others follow in breadth-first order. No state: the language is empty.
struct ByteAutomaton {
  std::vector<uint32_t> starts;    // [states + 1]: of state s the edges [starts[s], starts[s + 1])
  std::vector<ByteEdge> edges;     // of a state ascending by byte
  std::vector<uint8_t> accepting;  // [states]

  size_t states() const { return accepting.size(); }
  bool is_empty() const { return accepting.empty(); }
  int32_t next(int32_t state, uint8_t byte) const;  // -1: none
  bool matches(std::string_view text) const;
};

// Automata of nodes. Those of both and without are kept, with all that they are made of.
class Automata {
 public:
  explicit Automata(const Expressions& expressions) : expressions_(expressions) {}

  // Valid as long as this. The order of calls does not change results.
  const ByteAutomaton& of(Node node);
  bool is_empty(Node node) { return of(node).is_empty(); }

 private:
  const Expressions& expressions_;
  std::unordered_map<Node, std::unique_ptr<const ByteAutomaton>> kept_;
};

}  // namespace dlm::compile
