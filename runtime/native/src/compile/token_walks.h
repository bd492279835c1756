// The tokens that lead from state to state, as lists of nodes of trees of tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/budget.h"
#include "compile/token_states.h"
#include "compile/vocabulary.h"

namespace dlm::compile {

// Lists of nodes, equal ones once. The nodes of all trees have one numbering.
class TokenGroups {
 public:
  // Numbers the nodes of a tree, which must outlive this; returns the number of its first.
  int32_t add_tree(const TokenTree& tree) {
    const int32_t base = next_base_;
    bases_.push_back({base, &tree});
    next_base_ += tree.size();
    return base;
  }
  // The number of a list of nodes.
  int32_t group_of(const std::vector<int32_t>& nodes);
  size_t size() const { return begins_.size() - 1; }
  size_t nodes() const { return content_.size(); }  // of all groups

  template <class See>
  void each_token(int32_t group, See see) const {
    for (size_t i = begins_[static_cast<size_t>(group)];
         i < begins_[static_cast<size_t>(group) + 1]; ++i) {
      const int32_t node = content_[i];
      const auto after =
          std::upper_bound(bases_.begin(), bases_.end(), node,
                           [](int32_t value, const std::pair<int32_t, const TokenTree*>& each) {
                             return value < each.first;
                           });
      const auto& [base, tree] = *std::prev(after);
      for (int32_t j = tree->token_starts[static_cast<size_t>(node - base)];
           j < tree->token_starts[static_cast<size_t>(node - base) + 1]; ++j)
        see(tree->tokens[static_cast<size_t>(j)]);
    }
  }

 private:
  std::vector<std::pair<int32_t, const TokenTree*>>
      bases_;  // the first number of each tree's nodes
  int32_t next_base_ = 0;
  std::vector<int32_t> content_;   // the nodes of all groups
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
  // A node of a tree: of the tree by bytes as it is, of a tree by classes as a number of its own.
  struct Step {
    int32_t node, state;  // its tokens lead to this state
  };

  // The tree for the states of one part of an automaton, in which bytes are told apart alike.
  struct Part {
    std::shared_ptr<const TokenTree> tree;  // made when it is first walked
    int32_t base = 0;                       // the number of the tree's first node
  };

  void walk(int32_t state);
  void walk_bytes(int32_t first, int32_t end, int32_t depth, int32_t state, std::vector<Step>& out);
  void walk_part(int32_t start);
  void go_on(const Part& part, int32_t node, int32_t state);

  const Vocabulary& vocabulary_;
  const TokenTree& tree_;
  Budget& budget_;
  const TokenStates table_;
  const size_t state_count_;
  std::vector<Part> parts_;
  TokenGroups groups_;
  std::vector<Step> steps_, behind_;
  std::vector<int32_t> states_;                                        // of a walk, by depth
  std::unordered_map<uint64_t, std::pair<size_t, size_t>> continued_;  // steps in behind_
};

}  // namespace dlm::compile
