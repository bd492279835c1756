// Walks the tokens from state to state, starting only from states that tokens reach. Three things
// keep the walks short:
//
// - Some states take many bytes and lead to few states, for example inside a string. Such states
//   are walked over a tree of tokens that tells bytes apart only as far as these states do. In that
//   tree, "hello" and "world" are one path. If a token leaves these states, the walk continues over
//   the tree by bytes.
// - If several states reach the same state at the same node, the walk continues in the same way.
//   That walk is done once and stored as sets of tokens. This happens where a token leaves the
//   part, and where it reaches a state to which most bytes lead back. Suppose that a text is one of
//   100 listed words or any other string: then a state inside a word shares nearly all of its
//   tokens with the other states.
// - The tokens from one state to another are a list of nodes and sets. Equal lists are one group,
//   no matter how many states use it. For example, a string with a counted length uses one group
//   for all tokens of n characters.
#include "compile/token_walks.h"

#include <algorithm>
#include <deque>

#include "compile/numbers.h"

namespace dlm::compile {
namespace {

constexpr int32_t kCheckedNodes = 4096;  // nodes that a walk visits between two checks of the clock
constexpr int32_t kSharedNodes = 8;      // steps of larger subtrees are stored
constexpr int kMostNesting = 16;         // nested walks
constexpr int32_t kNone = -1;

}  // namespace

TokenWalks::TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, Budget& budget)
    : vocabulary_(vocabulary),
      tree_(vocabulary.tree()),
      budget_(budget),
      table_(texts, budget),
      state_count_(texts.states()),
      parts_(table_.parts().size()),
      slot_(texts.states(), kNone) {
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
  while (!open.empty()) {
    const int32_t state = open.front();
    open.pop_front();
    budget_.check();
    walk(state);
    sort_steps(steps_);
    out.row_of[index(state)] = static_cast<int32_t>(out.rows.size());
    out.rows.emplace_back();
    out.rows.back().reserve(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      const int32_t to = targets_[i];
      out.rows.back().push_back({groups_.group_of(lists_[i]), to});
      if (!out.is_met[index(to)]) {
        out.is_met[index(to)] = 1;
        open.push_back(to);
      }
    }
    edges += targets_.size();
    budget_.check_edges(edges);
    budget_.check_memory(table_.bytes() + edges * sizeof(TokenEdge) + groups_.bytes() +
                         shared_.size() * 2 * sizeof(Step) + gone_on_.size() * 64);
  }
  return out;
}

void TokenWalks::sort_steps(const std::vector<Step>& steps) {
  targets_.clear();
  for (const auto& [item, to] : steps) {
    int32_t& at = slot_[index(to)];
    if (at < 0) {
      at = static_cast<int32_t>(targets_.size());
      targets_.push_back(to);
      if (lists_.size() < targets_.size()) lists_.emplace_back();
      lists_[index(at)].clear();
    }
    lists_[index(at)].push_back(item);
  }
  for (const int32_t to : targets_) slot_[index(to)] = kNone;
}

// Fills steps_ with the tokens that can follow a state.
void TokenWalks::walk(int32_t state) {
  steps_.clear();
  if (const int32_t number = table_.part(state); number >= 0) {
    Part& part = parts_[index(number)];
    if (part.tree == nullptr) {
      part.tree = vocabulary_.by_classes(table_.parts()[index(number)], budget_);
      part.base = groups_.add_tree(*part.tree);
      part.is_end = ends_of(*part.tree);
    }
    walk_part(number, 0, part.tree->size(), state, steps_);
    return;
  }
  walk_bytes(0, tree_.size(), 0, state, steps_);
  if (const int32_t forced = table_.forced(state); forced > 0) {
    const int32_t wanted = vocabulary_.first_node(table_.text_after(state));
    if (wanted >= 0)
      steps_.erase(std::remove_if(steps_.begin(), steps_.end(),
                                  [&](const Step& step) {
                                    return step.item != wanted &&
                                           tree_.depths[index(step.item)] <= forced;
                                  }),
                   steps_.end());
  }
}

// Appends the steps of the nodes [first, end) of the tree by bytes. Their parent has `depth` bytes
// and leads to `state`.
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

// Appends the steps of the nodes [first, end) of a part's tree. Their parent leads to `start`, a
// state of the part.
void TokenWalks::walk_part(int32_t number, int32_t first, int32_t end, int32_t start,
                           std::vector<Step>& out) {
  const TokenTree& tree = *parts_[index(number)].tree;
  const int32_t base = parts_[index(number)].base;
  if (first == end) return;
  const uint8_t* const bytes = tree.bytes.data();
  const int32_t *const depths = tree.depths.data(), *const behind = tree.behind.data(),
                       *const starts = tree.token_starts.data();
  const int32_t depth = depths[first];  // depth of the parent's children
  std::vector<int32_t> states(64);
  states[0] = start;
  int32_t left = kCheckedNodes;
  for (int32_t node = first; node < end;) {
    if (--left == 0) {
      left = kCheckedNodes;
      budget_.check();
    }
    const size_t above = index(depths[node] - depth);
    const int32_t to = table_.next_by_byte(states[above], bytes[node]);
    if (to < 0) {
      node = behind[node];
      continue;
    }
    if (starts[node] < starts[node + 1]) out.push_back({base + node, to});
    if (table_.part(to) != number ||
        (to != start && table_.is_hub(to) && behind[node] - node > kSharedNodes &&
         nesting_ < kMostNesting)) {
      go_on(number, node, to, out);
      node = behind[node];
      continue;
    }
    if (above + 1 >= states.size()) states.resize(2 * states.size());
    states[above + 1] = to;
    ++node;
  }
}

// Returns for each node of a tree by classes whether all nodes that it merges are leaves.
std::vector<uint8_t> TokenWalks::ends_of(const TokenTree& tree) const {
  std::vector<uint8_t> is_end(index(tree.size()), 1);
  for (int32_t node = 0; node < tree.size(); ++node)
    for (int32_t i = tree.node_starts[index(node)]; i < tree.node_starts[index(node) + 1]; ++i)
      if (const int32_t from = tree.nodes[index(i)]; tree_.behind[index(from)] > from + 1)
        is_end[index(node)] = 0;
  return is_end;
}

void TokenWalks::go_on(int32_t number, int32_t node, int32_t state, std::vector<Step>& out) {
  const Part& part = parts_[index(number)];
  if (part.is_end[index(node)] && table_.part(state) != number) return;
  const uint64_t key = static_cast<uint64_t>(part.base + node) << 32 | static_cast<uint32_t>(state);
  auto at = gone_on_.find(key);
  if (at == gone_on_.end()) {
    const TokenTree& tree = *part.tree;
    std::vector<Step> found;
    if (table_.part(state) == number) {
      ++nesting_;
      walk_part(number, node + 1, tree.behind[index(node)], state, found);
      --nesting_;
    } else {
      for (int32_t i = tree.node_starts[index(node)]; i < tree.node_starts[index(node) + 1]; ++i) {
        const int32_t from = tree.nodes[index(i)];
        walk_bytes(from + 1, tree_.behind[index(from)], tree_.depths[index(from)], state, found);
      }
    }
    sort_steps(found);
    const size_t first = shared_.size();
    for (size_t i = 0; i < targets_.size(); ++i) {
      const std::vector<int32_t>& items = lists_[i];
      shared_.push_back(
          {items.size() == 1 ? items.front() : ~groups_.group_of(items), targets_[i]});
    }
    at = gone_on_.emplace(key, Shared{first, shared_.size()}).first;
  }
  out.insert(out.end(), shared_.begin() + static_cast<ptrdiff_t>(at->second.first),
             shared_.begin() + static_cast<ptrdiff_t>(at->second.last));
}

}  // namespace dlm::compile
