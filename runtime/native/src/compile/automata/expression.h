// Represents regular languages (sets of byte strings) as a graph of nodes. A node stands for one
// language. The functions in regex.h, schema/schema.h and other files build the graph. The class in
// automata.h compiles a node of the graph to an automaton.
//
// The graph never contains two nodes with the same content. If several expressions contain the same
// part, the graph stores this part only once. If these expressions also continue in the same way
// after the part, the part is compiled only once. To get as many common parts as possible, build
// sequences from right to left. For example, [a][b][c] and [d][b][c] then share one node for the
// end [b][c].
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/automata/byte_automaton.h"

namespace dlm::compile {

// Limits of patterns and grammars: the largest nesting depth of groups, as in Rust's regex crate,
// and the largest count of a repetition.
constexpr int kDeepestGroup = 250;
constexpr uint32_t kMostCount = 1000000;

using ByteSet = std::bitset<256>;

struct CodePointRange {
  char32_t low, high;  // first and last code point of the range
  bool operator==(const CodePointRange& other) const {
    return low == other.low && high == other.high;
  }
};
// The ranges are in ascending order, and do not overlap or touch.
using CodePoints = std::vector<CodePointRange>;

// Sorts ranges of code points. Merges ranges that overlap or touch.
CodePoints normalised(CodePoints ranges);
// Returns all code points that are not in `points`, except surrogates. `points` must be normalised.
CodePoints complement(const CodePoints& points);

using Node = uint32_t;
constexpr uint32_t kUnbounded = UINT32_MAX;

// Stores the graph of nodes and creates new nodes. For example, the regular expression a|b* is
// `either(bytes("a"), repeat(bytes("b"), 0, kUnbounded))`. Each function that creates a node first
// looks for an existing node with the same content. If there is such a node, the function returns
// it.
class Expressions {
 public:
  // `budget` limits the memory of the nodes, and must outlive this object.
  explicit Expressions(Budget& budget);
  Expressions(const Expressions&) = delete;
  Expressions& operator=(const Expressions&) = delete;

  enum class Kind : uint8_t {
    nothing,     // matches no text
    empty,       // matches the empty text
    bytes,       // matches one fixed text
    set,         // matches one byte of a set
    characters,  // matches the UTF-8 bytes of one code point of a set
    machine,     // matches the texts that a given automaton accepts
    sequence,    // matches a text of `first`, followed by a text of `second`
    either,      // matches each text of each choice; choices() is sorted
    repeat,      // matches `low` to `high` texts of `first`, one after another
    both,        // matches the texts of `first` that are also texts of `second`
    without      // matches the texts of `first` that are not texts of `second`
  };

  Node nothing() const { return 0; }
  Node empty() const { return 1; }
  Node bytes(std::string_view text);
  Node set(const ByteSet& bytes);
  // `points` must be normalised. Surrogates are left out.
  Node characters(const CodePoints& points);
  // Adds a node for the texts that `automaton` accepts. Stores a minimal copy of `automaton`.
  Node machine(const ByteAutomaton& automaton);
  Node sequence(Node first, Node second);
  // Adds a node for texts that consist of one text of each part, in the order of `parts`.
  Node sequence(const std::vector<Node>& parts);
  Node either(Node first, Node second);
  Node either(std::vector<Node> choices);
  Node repeat(Node part, uint32_t low, uint32_t high);  // `high` may be kUnbounded
  Node optional(Node part) { return repeat(part, 0, 1); }
  Node both(Node first, Node second);
  Node without(Node first, Node second);

  Budget& budget() const { return budget_; }
  size_t size() const { return nodes_.size(); }

  // The next functions return the content of a node. Some of these functions are valid only for
  // some kinds of nodes.
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
        // For the kinds bytes, set, characters, machine and either, `first` is an index in the list
        // for this kind.
        high;
  };
  Node add(const Item& item, const std::string& content);
  Node add_pair(Kind kind, bool is_nullable, Node first, Node second);

  Budget& budget_;
  size_t bytes_ = 0;
  std::vector<Item> nodes_;
  std::vector<std::string> texts_;
  std::vector<ByteSet> sets_;
  std::vector<CodePoints> points_;
  std::vector<ByteAutomaton> automata_;
  std::vector<std::vector<Node>> choices_;
  std::unordered_map<std::string, Node> numbers_;  // finds a node by its kind and content
};

}  // namespace dlm::compile
