// Finds the tokens that lead from state to state. Sets of tokens are sets of nodes in trees of
// tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/budget.h"
#include "compile/lists.h"
#include "compile/token_states.h"
#include "compile/vocabulary.h"

namespace dlm::compile {

// Stores sets of tokens. Each set is a list of items. An item n >= 0 is a node of a tree. An item
// ~n means all tokens of set n, which must have a lower number than the set that contains it. Equal
// lists are one set. The nodes of all trees share one numbering.
class TokenGroups {
 public:
  // Numbers the nodes of a tree and returns the number of its first node. The tree must outlive
  // this object.
  int32_t add_tree(const TokenTree& tree) {
    const int32_t base = node_count_;
    trees_.push_back({base, &tree});
    node_count_ += tree.size();
    return base;
  }
  // Returns the number of the set with these items; adds the set if it is new.
  int32_t group_of(const std::vector<int32_t>& items) { return items_.number_of(items); }
  int32_t size() const { return items_.size(); }
  int32_t node_count() const { return node_count_; }
  size_t bytes() const {
    return items_.elements() * sizeof(int32_t) + (index(items_.size()) + 1) * 48;
  }

  template <class See>
  void each_item(int32_t group, See see) const {
    const auto [first, end] = items_.list(group);
    std::for_each(first, end, see);
  }
  // Visits all nodes in ascending order: see(number, first token, last token).
  template <class See>
  void each_node(See see) const {
    for (const auto& [base, tree] : trees_)
      for (int32_t node = 0; node < tree->size(); ++node) {
        const auto at = static_cast<size_t>(node);
        see(base + node, tree->tokens.data() + tree->token_starts[at],
            tree->tokens.data() + tree->token_starts[at + 1]);
      }
  }

 private:
  // Each tree with the number of its first node.
  std::vector<std::pair<int32_t, const TokenTree*>> trees_;
  int32_t node_count_ = 0;
  Lists items_;  // by group
};

struct TokenEdge {
  int32_t group, state;
};

// The edges of the states that tokens reach.
struct TokenEdges {
  std::vector<uint8_t> is_met;  // [states]: whether tokens reach the state
  std::vector<int32_t> row_of;  // [states]: index into rows
  std::vector<std::vector<TokenEdge>> rows;
};

// Walks from the start state over all states that tokens reach.
class TokenWalks {
 public:
  TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget);

  TokenEdges walk_all();
  // The sets that walk_all() found. The reference is valid while this object exists.
  const TokenGroups& groups() const { return groups_; }

 private:
  struct Step {
    int32_t item, state;  // the tokens of an item of TokenGroups lead to this state
  };
  // A range [first, last) of shared_: steps that many walks use.
  struct Shared {
    size_t first, last;
  };

  // The tree of tokens for one part of the automaton. The states of a part have the same byte
  // classes.
  struct Part {
    std::shared_ptr<const TokenTree> tree;  // created by the first walk
    int32_t base = 0;                       // the number of the tree's first node
    std::vector<uint8_t> is_end;            // result of ends_of()
  };

  void walk(int32_t state);
  void walk_bytes(int32_t first, int32_t end, int32_t depth, int32_t state, std::vector<Step>& out);
  void walk_part(int32_t number, int32_t first, int32_t end, int32_t state, std::vector<Step>& out);
  std::vector<uint8_t> ends_of(const TokenTree& tree) const;
  // Appends the steps below a node of a part's tree. The node leads to `state`.
  void go_on(int32_t number, int32_t node, int32_t state, std::vector<Step>& out);
  // Groups steps by their state: lists_[i] has the items that lead to targets_[i].
  void sort_steps(const std::vector<Step>& steps);

  const Vocabulary& vocabulary_;
  const TokenTree& tree_;
  Budget& budget_;
  const TokenStates table_;
  const size_t state_count_;
  std::vector<Part> parts_;
  TokenGroups groups_;
  std::vector<Step> steps_;
  std::vector<int32_t> states_;  // the state at each depth of walk_bytes()
  std::vector<int32_t> targets_, slot_;
  std::vector<std::vector<int32_t>> lists_;
  int nesting_ = 0;
  std::vector<Step> shared_;
  std::unordered_map<uint64_t, Shared> gone_on_;  // key: node and state
};

}  // namespace dlm::compile
