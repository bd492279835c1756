// Compiles expressions to minimal automata.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include "compile/byte_automaton.h"
#include "compile/expression.h"

namespace dlm::compile {

// Compiles nodes to automata. It caches the automaton of each node, and those of the node's parts.
class Automata {
 public:
  explicit Automata(const Expressions& expressions) : expressions_(expressions) {}

  // Returns the minimal automaton of a node. The reference is valid while this object exists.
  const ByteAutomaton& of(Node node);
  bool is_empty(Node node) { return of(node).is_empty(); }

 private:
  const Expressions& expressions_;
  std::unordered_map<Node, std::unique_ptr<const ByteAutomaton>> kept_;
  size_t kept_bytes_ = 0;
};

}  // namespace dlm::compile
