// Represents regular languages (sets of byte strings) as a graph of nodes. The front ends, such as
// regex.h and schema/schema.h, build the graph. automata.h compiles a node of the graph to an
// automaton.
//
// Two nodes with the same content are the same node. So the graph stores a shared part once. The
// compiler also compiles a part once for all places where the same text follows. Build sequences
// from right to left to share as much as possible. For example, the members [b][c] at the end of
// [a][b][c] and of [b][c] are then the same node.
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

// Sorts ranges, and merges ranges that overlap or touch.
CodePoints normalised(CodePoints ranges);
// Returns all code points that are not in `points`. The result has no surrogates. `points` must be
// normalised.
CodePoints complement(const CodePoints& points);

using Node = uint32_t;
constexpr uint32_t kUnbounded = UINT32_MAX;

// Stores the graph of nodes and creates new nodes. For example, the regular expression a|b* is
// `either(bytes("a"), repeat(bytes("b"), 0, kUnbounded))`. Each function that creates a node
// returns the existing node if there is one with the same content.
class Expressions {
 public:
  // The memory of the nodes counts against the budget. The budget must outlive this object.
  explicit Expressions(Budget& budget);
  Expressions(const Expressions&) = delete;
  Expressions& operator=(const Expressions&) = delete;

  enum class Kind : uint8_t {
    nothing,     // matches no text
    empty,       // matches the empty text
    bytes,       // one fixed text
    set,         // one byte of a set
    characters,  // one code point of a set, in UTF-8
    machine,     // every text that an automaton accepts
    sequence,    // a text of `first`, followed by a text of `second`
    either,      // the texts of several nodes; the list of nodes is ascending
    repeat,      // `low` to `high` texts of `first`, one after the other
    both,        // texts that are in `first` and in `second`
    without      // texts that are in `first` and not in `second`
  };

  Node nothing() const { return 0; }
  Node empty() const { return 1; }
  Node bytes(std::string_view text);
  Node set(const ByteSet& bytes);
  Node characters(const CodePoints& points);  // `points` must be normalised; leaves out surrogates
  Node machine(const ByteAutomaton& automaton);  // minimises `automaton`
  Node sequence(Node first, Node second);
  Node sequence(const std::vector<Node>& parts);  // in the order of `parts`
  Node either(Node first, Node second);
  Node either(std::vector<Node> choices);
  Node repeat(Node part, uint32_t low, uint32_t high);  // `high` may be kUnbounded
  Node optional(Node part) { return repeat(part, 0, 1); }
  Node both(Node first, Node second);
  Node without(Node first, Node second);

  Budget& budget() const { return budget_; }
  size_t size() const { return nodes_.size(); }

  // Read the content of a node. Which functions are valid depends on the kind of the node.
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
