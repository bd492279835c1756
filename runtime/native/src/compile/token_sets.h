// Sets of nodes of a tree of tokens. Walks over tokens go from set to set.
//
// A state of an automaton divides the bytes into parts: the bytes that lead to the same next state.
// From a set, each part leads to the set of the children whose last byte is in that part. So
// "hello" and "world" are one path for a state inside a string. Sets are computed when a walk needs
// them, and each of them is computed once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "compile/budget.h"
#include "compile/hash_index.h"
#include "compile/numbers.h"

namespace dlm::compile {

// A tree of the prefixes of all tokens. Parents come before their children. The children of a node
// are in the order of their last bytes.
struct TokenTree {
  std::vector<uint8_t> bytes;                 // [nodes]: the last byte
  std::vector<int32_t> depths;                // [nodes]: length in bytes
  std::vector<int32_t> behind;                // [nodes]: the first node after its subtree
  std::vector<int32_t> token_starts, tokens;  // node n has [starts[n], starts[n + 1])

  int32_t size() const { return static_cast<int32_t>(bytes.size()); }
};

class TokenSets {
 public:
  // Bytes low..high belong to a part. The parts of a shape are numbered from 0.
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

  // Returns the number of a shape: ranges in ascending order. Adds the shape if it is new.
  int32_t shape_of(const std::vector<Range>& ranges);

  // Returns the children of a set that are not empty, in the order of their parts, as a range for
  // child().
  std::pair<size_t, size_t> children(int32_t set, int32_t shape, Budget& budget);
  const Child& child(size_t at) const { return children_[at]; }

  int32_t size() const { return static_cast<int32_t>(sets_.size()); }
  int32_t depth(int32_t set) const { return sets_[index(set)].depth; }
  // The number of nodes below those of the set.
  int32_t below(int32_t set) const { return sets_[index(set)].below; }
  bool has_tokens(int32_t set) const { return sets_[index(set)].has_tokens; }
  size_t count(int32_t set) const { return sets_[index(set)].count; }
  // Returns the set of one node of a set.
  int32_t alone(int32_t set, size_t number) {
    return set_of({nodes_[sets_[index(set)].first + number]}, depth(set));
  }
  // Returns whether a set has only this node.
  bool is_node(int32_t set, int32_t node) const {
    return sets_[index(set)].count == 1 && nodes_[sets_[index(set)].first] == node;
  }
  // Calls see(first, last) for the tokens of each node of a set.
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
    size_t first, count;  // in nodes_
    int32_t depth, below;
    bool has_tokens;
    int32_t last;  // in opened_: the shape that was asked for last, or -1
  };
  struct Opened {
    int32_t set, shape;
    size_t first, last;  // in children_
  };
  struct Shape {
    size_t first, count;  // in ranges_
    int32_t parts;
  };

  int32_t set_of(const std::vector<int32_t>& nodes, int32_t depth);

  const TokenTree& tree_;
  std::vector<Set> sets_;
  std::vector<int32_t> nodes_;  // of all sets
  std::vector<Shape> shapes_;
  std::vector<Range> ranges_;  // of all shapes
  std::vector<Opened> opened_;
  std::vector<Child> children_;  // of all opened sets
  HashIndex set_index_, shape_index_, opened_index_;
  std::vector<std::vector<int32_t>> found_;  // by part: the children of the set being opened
};

}  // namespace dlm::compile
