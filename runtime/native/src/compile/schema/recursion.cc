#include "compile/schema/recursion.h"

#include <algorithm>

namespace dlm::compile::schema {
namespace {

// The largest supported number of combinations of counter values in one strongly connected
// component. If there would be more, Recursion uses fewer counters.
constexpr uint64_t kMostCombinations = 4096;

}  // namespace

void unite(std::vector<uint32_t>& into, const std::vector<uint32_t>& others) {
  std::vector<uint32_t> merged;
  std::set_union(into.begin(), into.end(), others.begin(), others.end(),
                 std::back_inserter(merged));
  into.swap(merged);
}

Recursion::Recursion(Document& document, Budget& budget) : document_(document), budget_(budget) {
  vertex(*document.root().value);
  for (size_t at = 0; at < targets_.size(); ++at) {
    std::vector<uint32_t> next;
    for (const json::Value* const target : document_.destinations_below(*targets_[at]))
      next.push_back(vertex(*target));
    std::sort(next.begin(), next.end());
    next.erase(std::unique(next.begin(), next.end()), next.end());
    edges_[at] = std::move(next);
  }
  find_components();
}

uint32_t Recursion::vertex(const json::Value& target) {
  const auto [at, is_new] = vertices_.emplace(&target, static_cast<uint32_t>(targets_.size()));
  if (is_new) {
    targets_.push_back(&target);
    edges_.emplace_back();
  }
  return at->second;
}

// Finds the strongly connected components with Tarjan's algorithm. The algorithm uses an explicit
// stack, so that deep schemas do not overflow the stack of the thread.
void Recursion::find_components() {
  const auto count = static_cast<uint32_t>(targets_.size());
  constexpr uint32_t kNew = UINT32_MAX;
  std::vector<uint32_t> order(count, kNew), low(count), next(count, 0), open, path;
  std::vector<uint8_t> is_on_path(count, 0), is_open(count, 0);
  component_.assign(count, 0), is_cyclic_.assign(count, 0), is_head_.assign(count, 0);
  uint32_t visited = 0;
  for (uint32_t root = 0; root < count; ++root) {
    if (order[root] != kNew) continue;
    path.push_back(root);
    while (!path.empty()) {
      budget_.check();
      const uint32_t at = path.back();
      if (order[at] == kNew) {
        order[at] = low[at] = visited++;
        open.push_back(at);
        is_open[at] = is_on_path[at] = 1;
      }
      if (next[at] < edges_[at].size()) {
        const uint32_t to = edges_[at][next[at]++];
        if (order[to] == kNew) {
          path.push_back(to);
        } else if (is_open[to]) {
          low[at] = std::min(low[at], order[to]);
          if (is_on_path[to]) is_head_[to] = 1;
        }
        continue;
      }
      path.pop_back();
      is_on_path[at] = 0;
      if (!path.empty()) low[path.back()] = std::min(low[path.back()], low[at]);
      if (low[at] != order[at]) continue;
      size_t size = 0;
      for (uint32_t last = kNew; last != at; ++size) {
        last = open.back();
        open.pop_back();
        is_open[last] = 0;
        component_[last] = components_;
        is_cyclic_[last] = 1;
      }
      if (size == 1 && !is_head_[at]) is_cyclic_[at] = 0;
      ++components_;
    }
  }
}

void Recursion::count(uint32_t max_depth) {
  const auto count = static_cast<uint32_t>(targets_.size());
  std::vector<std::vector<uint32_t>> members(components_);
  for (uint32_t at = 0; at < count; ++at) members[component_[at]].push_back(at);
  numbers_.assign(count, kNotCounted);
  reached_.assign(components_, {});
  below_.clear();
  // `some` lists the targets in a component, and `which` marks the targets to count. Returns true
  // if the number of marked targets is small enough for separate counters.
  const auto is_few = [&](const std::vector<uint32_t>& some, const std::vector<uint8_t>& which) {
    uint64_t combinations = 1;
    for (const uint32_t at : some) {
      if (which[at] != 0) combinations *= uint64_t{max_depth} + 2;
      if (combinations > kMostCombinations) return false;
    }
    return true;
  };
  uint32_t made = 0;
  for (uint32_t each = 0; each < components_; ++each) {
    const bool are_all = is_few(members[each], is_cyclic_);
    const bool share_one = !are_all && !is_few(members[each], is_head_);
    std::vector<uint32_t>& reached = reached_[each];
    for (const uint32_t at : members[each]) {
      if ((are_all ? is_cyclic_ : is_head_)[at] != 0) {
        numbers_[at] = share_one ? made : made++;
        unite(reached, {numbers_[at]});
      }
      for (const uint32_t to : edges_[at]) {
        budget_.check();
        if (component_[to] != each) unite(reached, reached_[component_[to]]);
      }
    }
    if (share_one) ++made;
  }
}

uint32_t Recursion::number(const json::Value& target) const {
  const auto found = vertices_.find(&target);
  return found == vertices_.end() ? kNotCounted : numbers_[found->second];
}

const std::vector<uint32_t>& Recursion::below(const json::Value& value) {
  const auto [at, is_new] = below_.try_emplace(&value);
  if (!is_new) return at->second;
  std::vector<uint32_t> found;
  std::vector<uint32_t> components;
  for (const json::Value* const target : document_.destinations_below(value))
    components.push_back(component_[vertices_.at(target)]);
  std::sort(components.begin(), components.end());
  components.erase(std::unique(components.begin(), components.end()), components.end());
  for (const uint32_t each : components) unite(found, reached_[each]);
  return at->second = std::move(found);
}

}  // namespace dlm::compile::schema
