// Stores sets of nodes of a token tree, in which each node is a prefix of tokens. The compiler
// follows tokens byte by byte, from one set of nodes to the next (token_walks.h). So it processes
// many tokens at once.
//
// A state of an automaton divides the bytes into parts. All bytes of a part lead to the same next
// state. So a set of nodes has one set of children for each part. Such a set of children contains
// the children whose last byte is in the part. For example, the tokens "hello" and "world" go
// through the same sets if the first state is inside a string. Each set is computed only once, when
// the compiler first needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/automata/hash_index.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {

// A tree of the prefixes of all tokens. Each node is a prefix. A node comes before its children.
// The children of a node are sorted by their last bytes.
struct TokenTree {
  std::vector<uint8_t> bytes;   // [nodes]: the last byte of the prefix
  std::vector<int32_t> depths;  // [nodes]: the length of the prefix in bytes
  std::vector<int32_t> behind;  // [nodes]: the first node after the node's subtree
  // The tokens of node n are tokens[token_starts[n]] to tokens[token_starts[n + 1] - 1].
  std::vector<int32_t> token_starts, tokens;

  int32_t size() const { return static_cast<int32_t>(bytes.size()); }
};

class TokenSets {
 public:
  // A range of bytes, and the part to which these bytes belong. A shape is a list of such ranges.
  // The parts of a shape are numbered from 0.
  struct Range {
    uint8_t low, high;
    uint16_t part;
  };
  struct Child {
    int32_t part, set;
  };
  // The set whose children are the nodes for the first bytes of all tokens.
  static constexpr int32_t kRoot = 0;

  // The tree must outlive this object.
  explicit TokenSets(const TokenTree& tree);

  // Returns the index of the shape with these ranges, which must be in ascending order. Adds the
  // shape if it is new.
  int32_t shape_of(const std::vector<Range>& ranges);

  // Finds the sets of children of a set, in the order of the shape's parts. Leaves out empty sets
  // of children. The result is a pair of indices for child(): the first index, and the index after
  // the last index.
  std::pair<size_t, size_t> children(int32_t set, int32_t shape, Budget& budget);
  const Child& child(size_t at) const { return children_[at]; }

  int32_t size() const { return static_cast<int32_t>(sets_.size()); }
  int32_t depth(int32_t set) const { return sets_[index(set)].depth; }
  // Returns the number of nodes that are below the nodes of the set.
  int32_t below(int32_t set) const { return sets_[index(set)].below; }
  bool has_tokens(int32_t set) const { return sets_[index(set)].has_tokens; }
  size_t count(int32_t set) const { return sets_[index(set)].count; }
  // Returns the set that contains only one node: the node with the index `number` in the given set.
  int32_t alone(int32_t set, size_t number) {
    return set_of({nodes_[sets_[index(set)].first + number]}, depth(set));
  }
  // Returns true if `node` is the only node of the set.
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
    size_t first, count;  // the index of the first node in nodes_, and the number of nodes
    int32_t depth, below;
    bool has_tokens;
    int32_t last;  // the index in opened_ for the last requested shape, or -1
  };
  struct Opened {
    int32_t set, shape;
    size_t first, last;  // the children are children_[first] to children_[last - 1]
  };
  struct Shape {
    size_t first, count;  // the index of the first range in ranges_, and the number of ranges
    int32_t parts;
  };

  int32_t set_of(const std::vector<int32_t>& nodes, int32_t depth);

  const TokenTree& tree_;
  std::vector<Set> sets_;
  std::vector<int32_t> nodes_;  // the nodes of all sets
  std::vector<Shape> shapes_;
  std::vector<Range> ranges_;  // the ranges of all shapes
  std::vector<Opened> opened_;
  std::vector<Child> children_;  // the results of children(), one after another
  HashIndex set_index_, shape_index_, opened_index_;
  // Scratch memory of children(). For each part of the shape, it contains the children in this
  // part.
  std::vector<std::vector<int32_t>> found_;
};

}  // namespace dlm::compile
