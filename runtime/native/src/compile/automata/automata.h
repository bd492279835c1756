// Compiles expressions to minimal automata.
#pragma once

#include <cstddef>
#include <memory>
#include <unordered_map>

#include "compile/automata/byte_automaton.h"
#include "compile/automata/expression.h"

namespace dlm::compile {

// Compiles nodes of an expression graph to minimal automata over bytes. For example, the node for
// the regular expression a|b becomes an automaton with two states. The object caches all automata
// that it compiles. So if several nodes share a part, the part is compiled only once.
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
