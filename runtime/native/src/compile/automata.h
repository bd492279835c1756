// Minimal automata of expressions.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include "compile/byte_automaton.h"
#include "compile/expression.h"

namespace dlm::compile {

// Automata of nodes. They are kept, with those that they are made of.
class Automata {
 public:
  explicit Automata(const Expressions& expressions) : expressions_(expressions) {}

  // Valid as long as this.
  const ByteAutomaton& of(Node node);
  bool is_empty(Node node) { return of(node).is_empty(); }

 private:
  const Expressions& expressions_;
  std::unordered_map<Node, std::unique_ptr<const ByteAutomaton>> kept_;
  size_t kept_bytes_ = 0;
};

}  // namespace dlm::compile
