// Sets of nodes in a tree of tokens. The compiler follows tokens byte by byte, from set to set. So
// the compiler processes many tokens at once (token_walks.h).
//
// A state of an automaton divides the bytes into parts. The bytes of a part lead to the same next
// state. From a set of nodes, each part leads to a new set, which contains the children whose last
// byte is in the part. For example, "hello" and "world" take the same path from a state inside a
// string. Each set is computed only once, when the compiler first needs the set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compile/budget.h"
#include "compile/hash_index.h"
#include "compile/numbers.h"

namespace dlm::compile {

// A tree of the prefixes of all tokens. Each node is a prefix. Parents come before their children.
// The children of a node are sorted by their last bytes.
struct TokenTree {
  std::vector<uint8_t> bytes;   // [nodes]: the last byte of the prefix
  std::vector<int32_t> depths;  // [nodes]: length of the prefix in bytes
  std::vector<int32_t> behind;  // [nodes]: the first node after the node's subtree
  // The tokens of node n are the tokens from index token_starts[n] to token_starts[n + 1] - 1.
  std::vector<int32_t> token_starts, tokens;

  int32_t size() const { return static_cast<int32_t>(bytes.size()); }
};

class TokenSets {
 public:
  // A range of bytes that belongs to a part. A list of such ranges is a shape. The parts of a shape
  // are numbered from 0.
  struct Range {
    uint8_t low, high;
    uint16_t part;
  };
  struct Child {
    int32_t part, set;
  };
  static constexpr int32_t kRoot = 0;  // the set whose children are the first bytes of tokens

  // The tree must outlive this object.
  explicit TokenSets(const TokenTree& tree);

  // Returns the index of a shape, which is a list of ranges in ascending order. Adds the shape if
  // the shape is new.
  int32_t shape_of(const std::vector<Range>& ranges);

  // Returns the children of a set that are not empty, in the order of their parts. The result is a
  // range of indices for child().
  std::pair<size_t, size_t> children(int32_t set, int32_t shape, Budget& budget);
  const Child& child(size_t at) const { return children_[at]; }

  int32_t size() const { return static_cast<int32_t>(sets_.size()); }
  int32_t depth(int32_t set) const { return sets_[index(set)].depth; }
  // Returns the number of nodes below the nodes of the set.
  int32_t below(int32_t set) const { return sets_[index(set)].below; }
  bool has_tokens(int32_t set) const { return sets_[index(set)].has_tokens; }
  size_t count(int32_t set) const { return sets_[index(set)].count; }
  // Returns the set that contains only one node of the given set: the node with the index `number`.
  int32_t alone(int32_t set, size_t number) {
    return set_of({nodes_[sets_[index(set)].first + number]}, depth(set));
  }
  // Returns true if the set contains exactly this one node.
  bool is_node(int32_t set, int32_t node) const {
    return sets_[index(set)].count == 1 && nodes_[sets_[index(set)].first] == node;
  }
  // Calls see(first, last) for each node of a set. `first` and `last` are pointers to the start and
  // the end of the node's tokens.
  template <class See>
  void each_tokens(int32_t set, const See& see) const {
    for (size_t i = 0; i < sets_[index(set)].count; ++i) {
      const size_t node = index(nodes_[sets_[index(set)].first + i]);
      see(tree_.tokens.data() + tree_.token_starts[node],
          tree_.tokens.data() + tree_.token_starts[node + 1]);
    }
  }
  size_t bytes() const;

 private:
  struct Set {
    size_t first, count;  // index of the first node in nodes_, and number of nodes
    int32_t depth, below;
    bool has_tokens;
    int32_t last;  // index in opened_ of the shape that was requested last, or -1
  };
  struct Opened {
    int32_t set, shape;
    size_t first, last;  // range of indices in children_
  };
  struct Shape {
    size_t first, count;  // index of the first range in ranges_, and number of ranges
    int32_t parts;
  };

  int32_t set_of(const std::vector<int32_t>& nodes, int32_t depth);

  const TokenTree& tree_;
  std::vector<Set> sets_;
  std::vector<int32_t> nodes_;  // the nodes of all sets
  std::vector<Shape> shapes_;
  std::vector<Range> ranges_;  // the ranges of all shapes
  std::vector<Opened> opened_;
  std::vector<Child> children_;  // the children of all opened sets
  HashIndex set_index_, shape_index_, opened_index_;
  // For each part: the children of the set that is being opened.
  std::vector<std::vector<int32_t>> found_;
};

}  // namespace dlm::compile
