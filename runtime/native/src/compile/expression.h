// Regular languages of byte strings as a graph of nodes: what front ends write, and
// byte_automaton.h compiles.
//
// Equal nodes have one number, so that shared parts cost memory once, and the compiler works once
// on a part that is followed by the same. For that, write sequences to the right: the rest of a
// list of optional members is one node, however often it is used.
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
  char32_t low, high;  // both included
  bool operator==(const CodePointRange& other) const {
    return low == other.low && high == other.high;
  }
};
using CodePoints = std::vector<CodePointRange>;  // ascending, neither overlapping nor adjacent

// Sorts and joins ranges, whatever order they are in.
CodePoints normalised(CodePoints ranges);
// The other code points, without surrogates. `points` must be normalised.
CodePoints complement(const CodePoints& points);

using Node = uint32_t;
constexpr uint32_t kUnbounded = UINT32_MAX;

class Expressions {
 public:
  // The memory of the nodes counts in the budget, which must outlive this.
  explicit Expressions(Budget& budget);
  Expressions(const Expressions&) = delete;
  Expressions& operator=(const Expressions&) = delete;

  enum class Kind : uint8_t {
    nothing,     // no text
    empty,       // the empty text
    bytes,       // one text
    set,         // one byte of a set
    characters,  // the UTF-8 of one code point of ranges
    machine,     // what an automaton accepts
    sequence,    // first, then second
    either,      // one of several, ascending by number
    repeat,      // first, low to high times
    both,        // texts of first that are of second too
    without      // texts of first that are not of second
  };

  Node nothing() const { return 0; }
  Node empty() const { return 1; }
  Node bytes(std::string_view text);
  Node set(const ByteSet& bytes);
  Node characters(const CodePoints& points);     // normalised; surrogates are left out
  Node machine(const ByteAutomaton& automaton);  // which need not be minimal
  Node sequence(Node first, Node second);
  Node sequence(const std::vector<Node>& parts);  // to the right
  Node either(Node first, Node second);
  Node either(std::vector<Node> choices);
  Node repeat(Node part, uint32_t low, uint32_t high);  // high may be kUnbounded
  Node optional(Node part) { return repeat(part, 0, 1); }
  Node both(Node first, Node second);
  Node without(Node first, Node second);

  Budget& budget() const { return budget_; }
  size_t size() const { return nodes_.size(); }

  // For the compiler.
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
