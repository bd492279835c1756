// Represents regular languages of byte strings as a graph of nodes. Front ends build the graph;
// automata.h compiles it.
//
// Equal nodes share one number. So a shared part is stored once, and is compiled once for each
// different continuation. To share as much as possible, build sequences from right to left: for
// example, the rest of a list of optional members is then one node, however often it is used.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "compile/budget.h"
#include "compile/byte_automaton.h"

namespace dlm::compile {

using ByteSet = std::bitset<256>;

struct CodePointRange {
  char32_t low, high;  // first and last, both included
  bool operator==(const CodePointRange& other) const {
    return low == other.low && high == other.high;
  }
};
using CodePoints = std::vector<CodePointRange>;  // ascending; no two overlap or touch

// Sorts ranges and joins those that overlap or touch.
CodePoints normalised(CodePoints ranges);
// Returns all code points outside `points`, except surrogates. `points` must be normalised.
CodePoints complement(const CodePoints& points);

using Node = uint32_t;
constexpr uint32_t kUnbounded = UINT32_MAX;

class Expressions {
 public:
  // The memory of the nodes counts against the budget, which must outlive this object.
  explicit Expressions(Budget& budget);
  Expressions(const Expressions&) = delete;
  Expressions& operator=(const Expressions&) = delete;

  enum class Kind : uint8_t {
    nothing,     // matches no text
    empty,       // matches the empty text
    bytes,       // matches one text
    set,         // one byte of a set
    characters,  // one code point of a set of ranges, as UTF-8
    machine,     // the texts that an automaton accepts
    sequence,    // first, then second
    either,      // any of several nodes, in ascending order
    repeat,      // first, repeated low to high times
    both,        // texts that match first and second
    without      // texts that match first and not second
  };

  Node nothing() const { return 0; }
  Node empty() const { return 1; }
  Node bytes(std::string_view text);
  Node set(const ByteSet& bytes);
  Node characters(const CodePoints& points);     // must be normalised; drops surrogates
  Node machine(const ByteAutomaton& automaton);  // need not be minimal
  Node sequence(Node first, Node second);
  Node sequence(const std::vector<Node>& parts);  // built from right to left
  Node either(Node first, Node second);
  Node either(std::vector<Node> choices);
  Node repeat(Node part, uint32_t low, uint32_t high);  // high may be kUnbounded
  Node optional(Node part) { return repeat(part, 0, 1); }
  Node both(Node first, Node second);
  Node without(Node first, Node second);

  Budget& budget() const { return budget_; }
  size_t size() const { return nodes_.size(); }

  // Used by the compiler to read the nodes.
  Kind kind(Node node) const { return nodes_[node].kind; }
  Node first(Node node) const { return nodes_[node].first; }
  Node second(Node node) const { return nodes_[node].second; }
  uint32_t low(Node node) const { return nodes_[node].low; }
  uint32_t high(Node node) const { return nodes_[node].high; }
  bool is_nullable(Node node) const { return nodes_[node].is_nullable; }
  const std::string& text(Node node) const { return texts_[nodes_[node].first]; }
  const ByteSet& byte_set(Node node) const { return sets_[nodes_[node].first]; }
  const CodePoints& code_points(Node node) const { return points_[nodes_[node].first]; }
  const ByteAutomaton& automaton(Node node) const { return automata_[nodes_[node].first]; }
  const std::vector<Node>& choices(Node node) const { return choices_[nodes_[node].first]; }

 private:
  struct Item {
    Kind kind;
    bool is_nullable;
    uint32_t first, second, low,
        high;  // first of bytes, set, characters, machine, either: an index
  };
  Node add(const Item& item, const std::string& content);

  Budget& budget_;
  size_t bytes_ = 0;
  std::vector<Item> nodes_;
  std::vector<std::string> texts_;
  std::vector<ByteSet> sets_;
  std::vector<CodePoints> points_;
  std::vector<ByteAutomaton> automata_;
  std::vector<std::vector<Node>> choices_;
  std::unordered_map<std::string, Node> numbers_;  // by kind and content
};

}  // namespace dlm::compile
