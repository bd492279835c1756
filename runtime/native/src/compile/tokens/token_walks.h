// Finds the tokens that lead from one state of a byte automaton to another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/automata/budget.h"
#include "compile/tokens/lists.h"
#include "compile/tokens/token_states.h"
#include "compile/tokens/vocabulary.h"

namespace dlm::compile {

// Stores groups of tokens. Each group is a list of items. An item n >= 0 stands for the tokens of
// one set of nodes. An item ~n stands for all tokens of group n. A group may contain only groups
// with lower indices. Equal lists are stored as one group.
class TokenGroups {
 public:
  // The sets must outlive this object.
  explicit TokenGroups(const TokenSets& sets) : sets_(sets) {}

  // Returns the item for a set of nodes. Each set gets the next number when it is used for the
  // first time.
  int32_t item_of(int32_t set) {
    if (index(set) >= items_of_.size()) items_of_.resize(index(sets_.size()), -1);
    int32_t& item = items_of_[index(set)];
    if (item < 0) {
      item = item_count();
      item_sets_.push_back(set);
    }
    return item;
  }
  int32_t item_count() const { return static_cast<int32_t>(item_sets_.size()); }
  int32_t set_of(int32_t item) const { return item_sets_[index(item)]; }
  // Returns the index of the group with these items. Adds the group if it is new.
  int32_t group_of(const std::vector<int32_t>& items) { return items_.number_of(items); }
  int32_t size() const { return items_.size(); }
  size_t bytes() const {
    return (items_.elements() + items_of_.size() + item_sets_.size()) * sizeof(int32_t) +
           (index(items_.size()) + 1) * 24;
  }

  template <class See>
  void each_item(int32_t group, See see) const {
    const auto [first, end] = items_.list(group);
    std::for_each(first, end, see);
  }
  // Visits all tokens of an item, which must not be negative. Calls see(first, last) one or more
  // times, each time with a part of the tokens. `first` and `last` point to the start and the end
  // of this part.
  template <class See>
  void each_tokens(int32_t item, const See& see) const {
    sets_.each_tokens(set_of(item), see);
  }

 private:
  const TokenSets& sets_;
  std::vector<int32_t> items_of_;   // for each set: its item, or -1
  std::vector<int32_t> item_sets_;  // for each item: its set
  Lists items_;                     // for each group: its items
};

struct TokenEdge {
  int32_t group, state;
};

// The edges of the states that are reached after a whole token.
struct TokenEdges {
  // Returns pointers to the first edge of a state and to the end of its edges. The state must have
  // a row.
  std::pair<const TokenEdge*, const TokenEdge*> of(size_t state) const {
    const auto row = index(row_of[state]);
    return {edges.data() + starts[row], edges.data() + starts[row + 1]};
  }

  std::vector<int32_t> row_of;  // [states]: the row of each state, or -1 if no tokens lead to it
  // Row r consists of edges[starts[r]] to edges[starts[r + 1] - 1].
  std::vector<size_t> starts{0};
  std::vector<TokenEdge> edges;
};

// Finds the edges of all states that can be reached from the start state with whole tokens. A walk
// follows all tokens from one state.
class TokenWalks {
 public:
  TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, TokenSets& sets,
             Budget& budget);

  TokenEdges walk_all();
  // Returns the groups that walk_all() found. The reference is valid while this object exists.
  const TokenGroups& groups() const { return groups_; }

 private:
  struct Step {
    int32_t item, state;  // all tokens of `item` (see TokenGroups) lead to `state`
  };
  // The stored result of a walk from `state` over the nodes below `set`. The result consists of the
  // steps shared_[first] to shared_[last - 1].
  struct Shared {
    int32_t set, state;
    size_t first, last;
  };

  struct Open {
    int32_t set, state;
  };

  void walk(int32_t state);
  // Walks over all nodes below the nodes of a set, and appends the steps to `out`. The walk starts
  // in `state`, to which all nodes of the set lead.
  void walk_below(int32_t set, int32_t state, std::vector<Step>& out);
  // Does the same as walk_below(), but also stores the steps for later walks.
  void go_on(int32_t set, int32_t state, std::vector<Step>& out);
  // Groups the steps by their states. Afterwards, lists_[i] contains the items that lead to
  // targets_[i].
  void sort_steps(const std::vector<Step>& steps);

  const Vocabulary& vocabulary_;
  TokenSets& sets_;
  Budget& budget_;
  const TokenStates table_;
  const size_t state_count_;
  TokenGroups groups_;
  std::vector<Step> steps_;
  // The sets whose children must still be visited. All nested walks use this list.
  std::vector<Open> open_;
  std::vector<int32_t> targets_, slot_;
  std::vector<std::vector<int32_t>> lists_;
  int nesting_ = 0;
  std::vector<Step> shared_;
  std::vector<Shared> gone_on_;
  HashIndex gone_on_index_;  // finds an entry of gone_on_ by its set and state
  // For each hub: the number of walks over large sets.
  std::unordered_map<int32_t, int> large_sets_;
  // For each forced text: the node of the text's first token, or -1.
  std::unordered_map<std::string, int32_t> first_nodes_;
};

}  // namespace dlm::compile
