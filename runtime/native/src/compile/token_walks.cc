// Walks the tokens from state to state.
//
// Only states that tokens lead to are walked from. Two things keep the walks short:
//
// - A state that takes many bytes to few states, as inside a string, is walked over a tree of
//   tokens whose bytes are told apart only as far as such states around it do. "hello" and "world"
//   are one there. Where a token leaves these states, the walk goes on over the tree by bytes; what
//   follows there is the same for all states that come to the same place, and is kept.
// - The tokens from one state to another are a list of nodes of these trees. Equal lists are one
//   group, however many states share it: the tokens of n characters, in a counted string.
#include "compile/token_walks.h"

#include <algorithm>
#include <deque>

#include "compile/numbers.h"

namespace dlm::compile {
namespace {

constexpr int32_t kCheckedNodes = 4096;  // of a walk between two looks at the clock
constexpr int32_t kNone = -1;

}  // namespace

int32_t TokenGroups::group_of(const std::vector<int32_t>& nodes) {
  uint64_t hash = nodes.size();
  for (const int32_t node : nodes) hash = mixed(hash, static_cast<uint64_t>(node));
  for (auto [at, last] = numbers_.equal_range(hash); at != last; ++at) {
    const auto first = content_.begin() + static_cast<ptrdiff_t>(begins_[index(at->second)]);
    const auto end = content_.begin() + static_cast<ptrdiff_t>(begins_[index(at->second) + 1]);
    if (std::equal(nodes.begin(), nodes.end(), first, end)) return at->second;
  }
  const auto number = static_cast<int32_t>(begins_.size()) - 1;
  numbers_.emplace(hash, number);
  content_.insert(content_.end(), nodes.begin(), nodes.end());
  begins_.push_back(content_.size());
  return number;
}

TokenWalks::TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget)
    : vocabulary_(vocabulary),
      tree_(vocabulary.tree()),
      budget_(budget),
      table_(texts, budget),
      state_count_(texts.states()),
      parts_(table_.parts().size()) {
  groups_.add_tree(tree_);
}

TokenEdges TokenWalks::walk_all() {
  const size_t states = state_count_;
  TokenEdges out;
  out.is_met.assign(states, 0);
  out.row_of.assign(states, kNone);
  size_t edges = 0;
  std::deque<int32_t> open{0};
  out.is_met[0] = 1;
  std::vector<int32_t> slot(states, kNone), targets;
  std::vector<std::vector<int32_t>> lists;
  while (!open.empty()) {
    const int32_t state = open.front();
    open.pop_front();
    budget_.check_time();
    walk(state);
    // The steps by the state that they lead to.
    targets.clear();
    for (const auto& [node, to] : steps_) {
      int32_t& at = slot[index(to)];
      if (at < 0) {
        at = static_cast<int32_t>(targets.size());
        targets.push_back(to);
        if (lists.size() < targets.size()) lists.emplace_back();
        lists[index(at)].clear();
      }
      lists[index(at)].push_back(node);
    }
    out.row_of[index(state)] = static_cast<int32_t>(out.rows.size());
    out.rows.emplace_back();
    for (size_t i = 0; i < targets.size(); ++i) {
      const int32_t to = targets[i];
      slot[index(to)] = kNone;
      out.rows.back().push_back({groups_.group_of(lists[i]), to});
      if (!out.is_met[index(to)]) {
        out.is_met[index(to)] = 1;
        open.push_back(to);
      }
    }
    edges += targets.size();
    budget_.check_memory(table_.bytes() + edges * sizeof(Step) +
                         (groups_.nodes() + 2 * behind_.size()) * sizeof(int32_t) +
                         continued_.size() * 64);
  }
  return out;
}

// Fills steps_ with all tokens that lead on from a state.
void TokenWalks::walk(int32_t state) {
  steps_.clear();
  if (table_.part(state) >= 0) {
    walk_part(state);
    return;
  }
  walk_bytes(0, tree_.size(), 0, state, steps_);
  if (const int32_t forced = table_.forced(state); forced > 0) {
    const int32_t wanted = vocabulary_.first_node(table_.text_after(state));
    if (wanted >= 0)
      steps_.erase(std::remove_if(steps_.begin(), steps_.end(),
                                  [&](const Step& step) {
                                    return step.node != wanted &&
                                           tree_.depths[index(step.node)] <= forced;
                                  }),
                   steps_.end());
  }
}

// Steps of the nodes [first, end) of the tree by bytes, whose parent has `depth` bytes and leads
// to `state`.
void TokenWalks::walk_bytes(int32_t first, int32_t end, int32_t depth, int32_t state,
                            std::vector<Step>& out) {
  if (states_.size() < 64) states_.resize(64);
  states_[0] = state;
  const uint8_t* const bytes = tree_.bytes.data();
  const int32_t *const depths = tree_.depths.data(), *const behind = tree_.behind.data(),
                       *const starts = tree_.token_starts.data();
  int32_t left = kCheckedNodes;
  for (int32_t node = first; node < end;) {
    if (--left == 0) {
      left = kCheckedNodes;
      budget_.check();
    }
    const size_t above = index(depths[node] - depth - 1);
    const int32_t to = table_.next_by_byte(states_[above], bytes[node]);
    if (to < 0) {
      node = behind[node];
      continue;
    }
    if (starts[node] < starts[node + 1]) out.push_back({node, to});
    if (above + 1 >= states_.size()) states_.resize(2 * states_.size());
    states_[above + 1] = to;
    ++node;
  }
}

// walk() for a state of a part.
void TokenWalks::walk_part(int32_t start) {
  const int32_t number = table_.part(start);
  Part& part = parts_[index(number)];
  if (part.tree == nullptr) {
    part.tree = vocabulary_.by_classes(table_.parts()[index(number)], budget_);
    part.base = groups_.add_tree(*part.tree);
  }
  const TokenTree& tree = *part.tree;
  std::vector<int32_t> states{start};
  int32_t left = kCheckedNodes;
  for (int32_t node = 0; node < tree.size();) {
    if (--left == 0) {
      left = kCheckedNodes;
      budget_.check();
    }
    const size_t above = index(tree.depths[index(node)] - 1);
    const int32_t to = table_.next_by_byte(states[above], tree.bytes[index(node)]);
    if (to < 0) {
      node = tree.behind[index(node)];
      continue;
    }
    if (tree.has_tokens(node)) steps_.push_back({part.base + node, to});
    if (table_.part(to) != number) {
      go_on(part, node, to);
      node = tree.behind[index(node)];
      continue;
    }
    if (above + 1 >= states.size()) states.resize(2 * states.size() + 1);
    states[above + 1] = to;
    ++node;
  }
}

// Appends the steps that go on from a node by classes, which leads to a state out of its part.
void TokenWalks::go_on(const Part& part, int32_t node, int32_t state) {
  const uint64_t key = static_cast<uint64_t>(part.base + node) << 32 | static_cast<uint32_t>(state);
  const auto [at, is_new] = continued_.try_emplace(key, std::pair{size_t{0}, size_t{0}});
  if (is_new) {
    const TokenTree& tree = *part.tree;
    const size_t first = behind_.size();
    for (int32_t i = tree.node_starts[index(node)]; i < tree.node_starts[index(node) + 1]; ++i) {
      const int32_t from = tree.nodes[index(i)];
      walk_bytes(from + 1, tree_.behind[index(from)], tree_.depths[index(from)], state, behind_);
    }
    at->second = {first, behind_.size()};
  }
  const auto [first, last] = at->second;
  steps_.insert(steps_.end(), behind_.begin() + static_cast<ptrdiff_t>(first),
                behind_.begin() + static_cast<ptrdiff_t>(last));
}

}  // namespace dlm::compile
