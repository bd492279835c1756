// Finds the tokens that lead from state to state. A walk follows all tokens from one state. Only
// states that are reached after a whole token need a walk. Three things make the walks short:
//
// - A walk does not visit single tokens. Instead, it visits sets of nodes of the token tree
//   (token_sets.h). So one step covers all tokens that lead from a state to the same next state.
// - Several walks may reach the same state with the same set of nodes. From this state on, these
//   walks are the same. So the code makes this common part only once, and stores the result as
//   groups of tokens. A common part starts where a walk goes from a state that accepts many bytes
//   to a state that accepts few bytes, or the other way round. A common part also starts at a hub,
//   which is a state from which many bytes lead back to the state itself. For example, suppose that
//   a text is one of 100 listed words or any other string. Then nearly all tokens that can follow a
//   state inside a word can also follow many other states.
// - The tokens from one state to another are stored as a list of sets and groups. Equal lists are
//   stored as one group, even if many states use the group. For example, if the length of a string
//   is counted, all tokens of n characters are one group.
#include "compile/tokens/token_walks.h"

#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {

// The code may store the result of a walk if the walk visits more nodes than this.
constexpr int32_t kSharedNodes = 8;
constexpr int kMostNestedWalks = 16;  // largest depth of nested walks
// For some constraints, nearly all first bytes of tokens lead from many states to the same hub. An
// example is a text in which "abc" may occur anywhere. So the code counts the walks from a hub over
// large sets. After kMostLargeSets such walks, it makes a separate walk for each first byte of a
// token, and stores the results of these walks.
constexpr int32_t kLargeSet = 4096;  // a large set has more nodes below it than this
constexpr int kMostLargeSets = 3;
constexpr size_t kTextBytes = 192;  // estimated memory of an entry in first_nodes_, in bytes

}  // namespace

TokenWalks::TokenWalks(const ByteAutomaton& texts, const Vocabulary& vocabulary, TokenSets& sets,
                       Budget& budget)
    : vocabulary_(vocabulary),
      sets_(sets),
      budget_(budget),
      table_(texts, sets, budget),
      state_count_(texts.states()),
      groups_(sets),
      slot_(texts.states(), kNone) {}

TokenEdges TokenWalks::walk_all() {
  const size_t states = state_count_;
  TokenEdges out;
  out.row_of.assign(states, kNone);
  // The states that are reached after a whole token. The index of a state in this list is its row
  // in `out`.
  std::vector<int32_t> met{0};
  out.row_of[0] = 0;
  for (size_t row = 0; row < met.size(); ++row) {
    budget_.check();
    walk(met[row]);
    sort_steps(steps_);
    for (size_t i = 0; i < targets_.size(); ++i) {
      const int32_t to = targets_[i];
      out.edges.push_back({groups_.group_of(lists_[i]), to});
      if (out.row_of[index(to)] < 0) {
        out.row_of[index(to)] = static_cast<int32_t>(met.size());
        met.push_back(to);
      }
    }
    out.starts.push_back(out.edges.size());
    budget_.check_edges(out.edges.size());
    budget_.check_memory(table_.bytes() + sets_.bytes() + out.edges.size() * sizeof(TokenEdge) +
                         groups_.bytes() + shared_.size() * sizeof(Step) +
                         gone_on_.size() * sizeof(Shared) + gone_on_index_.bytes() +
                         first_nodes_.size() * kTextBytes);
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

// Finds the tokens that can follow a state, and stores them in steps_.
void TokenWalks::walk(int32_t state) {
  steps_.clear();
  walk_below(TokenSets::kRoot, state, steps_);
  const int32_t forced = table_.forced(state);
  if (forced == 0) return;
  const auto [known, is_new] = first_nodes_.try_emplace(table_.text_after(state), kNone);
  if (is_new) known->second = vocabulary_.first_node(known->first);
  const int32_t wanted = known->second;
  if (wanted < 0) return;
  const auto is_other = [&](const Step& step) {
    if (step.item < 0) return false;
    const int32_t set = groups_.set_of(step.item);
    return sets_.depth(set) <= forced && !sets_.is_node(set, wanted);
  };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), is_other), steps_.end());
}

void TokenWalks::walk_below(int32_t set, int32_t start, std::vector<Step>& out) {
  const size_t base = open_.size();
  open_.push_back({set, start});
  while (open_.size() > base) {
    const auto [above, from] = open_.back();
    open_.pop_back();
    budget_.check();
    const auto [first, last] = sets_.children(above, table_.shape(from), budget_);
    for (size_t i = first; i < last; ++i) {
      const auto [part, child] = sets_.child(i);
      const int32_t to = table_.target(from, part);
      if (sets_.has_tokens(child)) out.push_back({groups_.item_of(child), to});
      const int32_t below = sets_.below(child);
      if (below == 0) continue;
      if (below > kSharedNodes && nesting_ < kMostNestedWalks &&
          (table_.is_wide(from) != table_.is_wide(to) || (to != start && table_.is_hub(to))))
        go_on(child, to, out);
      else
        open_.push_back({child, to});
    }
  }
}

void TokenWalks::go_on(int32_t set, int32_t state, std::vector<Step>& out) {
  const uint64_t hash = mixed(index(state), index(set));
  int32_t number = gone_on_index_.find(hash, [&](int32_t each) {
    return gone_on_[index(each)].set == set && gone_on_[index(each)].state == state;
  });
  if (number < 0) {
    std::vector<Step> found;
    ++nesting_;
    const size_t nodes = sets_.count(set);
    if (nodes > 1 && sets_.below(set) > kLargeSet && sets_.depth(set) == 1 &&
        table_.is_hub(state) && ++large_sets_[state] > kMostLargeSets)
      for (size_t i = 0; i < nodes; ++i) go_on(sets_.alone(set, i), state, found);
    else
      walk_below(set, state, found);
    --nesting_;
    sort_steps(found);
    const size_t first = shared_.size();
    for (size_t i = 0; i < targets_.size(); ++i) {
      const std::vector<int32_t>& items = lists_[i];
      shared_.push_back(
          {items.size() == 1 ? items.front() : ~groups_.group_of(items), targets_[i]});
    }
    number = static_cast<int32_t>(gone_on_.size());
    gone_on_.push_back({set, state, first, shared_.size()});
    gone_on_index_.add(hash, number);
  }
  const Shared& steps = gone_on_[index(number)];
  out.insert(out.end(), shared_.begin() + static_cast<ptrdiff_t>(steps.first),
             shared_.begin() + static_cast<ptrdiff_t>(steps.last));
}

}  // namespace dlm::compile
