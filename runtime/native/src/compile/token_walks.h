// The tokens that lead from state to state, as sets of nodes of trees of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/budget.h"
#include "compile/token_states.h"
#include "compile/vocabulary.h"

namespace dlm::compile {

// Sets of tokens, each a list of items: a node of a tree (0 or more), or ~n for all of set n, which
// has a lower number than the set that it is in. Equal lists are one set. The nodes of all trees
// have one numbering.
class TokenGroups {
 public:
  // Numbers the nodes of a tree, which must outlive this; returns the number of its first.
  int32_t add_tree(const TokenTree& tree) {
    const int32_t base = node_count_;
    trees_.push_back({base, &tree});
    node_count_ += tree.size();
    return base;
  }
  // The number of a list of items.
  int32_t group_of(const std::vector<int32_t>& items);
  int32_t size() const { return static_cast<int32_t>(begins_.size()) - 1; }
  int32_t node_count() const { return node_count_; }
  size_t bytes() const { return content_.size() * sizeof(int32_t) + begins_.size() * 48; }

  template <class See>
  void each_item(int32_t group, See see) const {
    const auto at = static_cast<size_t>(group);
    for (size_t i = begins_[at]; i < begins_[at + 1]; ++i) see(content_[i]);
  }
  // All nodes in ascending order: see(number, first token, last token).
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
  std::vector<std::pair<int32_t, const TokenTree*>> trees_;  // by the first number of their nodes
  int32_t node_count_ = 0;
  std::vector<int32_t> content_;   // the items of all groups
  std::vector<size_t> begins_{0};  // of group g the content [begins_[g], begins_[g + 1])
  std::unordered_multimap<uint64_t, int32_t> numbers_;
};

struct TokenEdge {
  int32_t group, state;
};

// The edges of the states that tokens lead to.
struct TokenEdges {
  std::vector<uint8_t> is_met;  // [states]: whether tokens lead there
  std::vector<int32_t> row_of;  // [states]: its row of rows
  std::vector<std::vector<TokenEdge>> rows;
};

// Walks from the first state over all states that tokens lead to.
class TokenWalks {
 public:
  TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget);

  TokenEdges walk_all();
  // What walk_all() found; valid as long as this.
  const TokenGroups& groups() const { return groups_; }

 private:
  struct Step {
    int32_t item, state;  // the tokens of an item of TokenGroups lead to this state
  };
  // Steps that many walks share: [first, last) of shared_.
  struct Shared {
    size_t first, last;
  };

  // The tree for the states of one part of an automaton, in which bytes are told apart alike.
  struct Part {
    std::shared_ptr<const TokenTree> tree;  // made when it is first walked
    int32_t base = 0;                       // the number of the tree's first node
    std::vector<uint8_t> is_end;            // ends_of() the tree
  };

  void walk(int32_t state);
  void walk_bytes(int32_t first, int32_t end, int32_t depth, int32_t state, std::vector<Step>& out);
  void walk_part(int32_t number, int32_t first, int32_t end, int32_t state, std::vector<Step>& out);
  std::vector<uint8_t> ends_of(const TokenTree& tree) const;
  // Appends the steps that go on from a node of a part's tree, which leads to a state.
  void go_on(int32_t number, int32_t node, int32_t state, std::vector<Step>& out);
  // Sorts steps by their state: lists_[i] has the items that lead to targets_[i].
  void sort_steps(const std::vector<Step>& steps);

  const Vocabulary& vocabulary_;
  const TokenTree& tree_;
  Budget& budget_;
  const TokenStates table_;
  const size_t state_count_;
  std::vector<Part> parts_;
  TokenGroups groups_;
  std::vector<Step> steps_;
  std::vector<int32_t> states_;  // of a walk over the tree by bytes, by depth
  std::vector<int32_t> targets_, slot_;
  std::vector<std::vector<int32_t>> lists_;
  int nesting_ = 0;
  std::vector<Step> shared_;
  std::unordered_map<uint64_t, Shared> gone_on_;  // by node and state
};

}  // namespace dlm::compile
