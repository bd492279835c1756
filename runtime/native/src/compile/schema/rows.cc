// Builds the regular languages (sets of texts) of rows. A row is an object, or an array whose items
// must all be different. The parts of a row are its properties or items. A slot is one possible
// part of a row, which may be present or absent.
#include <algorithm>
#include <map>

#include "compile/schema/writer.h"

namespace dlm::compile::schema {

// Returns the texts after the last slot of a row. They consist of properties that the schema does
// not list, and the closing bracket. `count` is the number of parts that the row already contains.
Node Writer::end_of_row(const Row& row, bool is_array, const Layout::Around& around,
                        uint64_t count) {
  const Node closing = expressions_.bytes(is_array ? "]" : "}");
  const Node ended = expressions_.sequence(expressions_.bytes(around.end), closing);
  const Node between = expressions_.sequence(expressions_.bytes(around.between), row.more);
  // An unlisted property is a property that the schema does not list. All unlisted properties of an
  // object may have the same name. Programs then keep only one of them. So all unlisted properties
  // together count as one property when the code checks the minimum.
  const uint64_t missing = row.low > count ? row.low - count : 0;
  const uint64_t most = row.high == kNoLimit ? kUnbounded : row.high - std::min(count, row.high);
  const auto limit = static_cast<uint32_t>(most);
  const bool has_more = row.more != expressions_.nothing() && most > 0 && missing <= 1;
  if (missing > 1 && missing <= most && row.more != expressions_.nothing())
    limits_.insert("minProperties " + std::to_string(row.low) +
                   " is not supported if the schema lists fewer than " +
                   std::to_string(row.low - 1) + " possible properties");
  if (count > 0) {
    const Node rest = has_more ? expressions_.repeat(between, static_cast<uint32_t>(missing), limit)
                      : missing == 0 ? expressions_.empty()
                                     : expressions_.nothing();
    return expressions_.sequence(rest, ended);
  }
  std::vector<Node> ways;
  if (missing == 0) ways.push_back(closing);
  if (has_more)
    ways.push_back(expressions_.sequence(
        {expressions_.bytes(around.start), row.more,
         expressions_.repeat(between, 0, limit == kUnbounded ? kUnbounded : limit - 1), ended}));
  return expressions_.either(std::move(ways));
}

Node Writer::row(const Row& row, bool is_array, uint32_t level) {
  const Layout::Around around = options_.layout.around(level, is_array);
  // The function builds an automaton that processes one slot after another. A state of the
  // automaton consists of the number of parts so far, and a bit mask of the clauses that are
  // already true. The automaton stops counting parts when a higher number would not affect the
  // minimum or maximum.
  using State = std::pair<uint64_t, uint64_t>;
  const uint64_t most_counted = row.high != kNoLimit ? row.high : std::max<uint64_t>(row.low, 1);
  const size_t slots = row.slots.size();
  // For each slot: the indices of the clauses about the slot. The bool is true if the presence of
  // the slot makes the clause true, and false if the absence of the slot makes it true.
  std::vector<std::vector<std::pair<size_t, bool>>> literals(slots);
  // For each slot: a bit mask of the clauses that no later slot can make true.
  std::vector<uint64_t> closed(slots, 0);
  for (size_t c = 0; c < row.clauses.size(); ++c) {
    size_t last = 0;
    for (const Literal& literal : row.clauses[c]) {
      literals[literal.slot].emplace_back(c, literal.is_there);
      last = std::max(last, literal.slot);
    }
    if (row.clauses[c].empty()) return expressions_.nothing();
    closed[last] |= uint64_t{1} << c;
  }
  constexpr uint32_t kNone = UINT32_MAX;
  struct Step {
    State state;
    // The next state if the slot is absent, and the next state if the slot is present. Both are
    // indices into the next layer, which contains the states after this slot.
    uint32_t without = kNone, with = kNone;
  };
  std::vector<std::vector<Step>> layers(slots + 1);
  layers[0].push_back({{0, 0}, kNone, kNone});
  for (size_t i = 0; i < slots; ++i) {
    std::map<State, uint32_t> numbers;
    const Slot& slot = row.slots[i];
    const auto next = [&](const State& from, bool is_there) -> uint32_t {
      State to = from;
      if (is_there) {
        if (slot.node == expressions_.nothing() || (row.high != kNoLimit && from.first == row.high))
          return kNone;
        to.first = std::min(from.first + 1, most_counted);
      } else if (slot.is_required) {
        return kNone;
      }
      for (const auto& [clause, wanted] : literals[i])
        if (wanted == is_there) to.second |= uint64_t{1} << clause;
      if ((closed[i] & ~to.second) != 0) return kNone;
      const auto [at, is_new] = numbers.emplace(to, static_cast<uint32_t>(layers[i + 1].size()));
      if (is_new) layers[i + 1].push_back({to, kNone, kNone});
      return at->second;
    };
    for (size_t s = 0; s < layers[i].size(); ++s) {
      expressions_.budget().check();
      const State from = layers[i][s].state;
      const uint32_t without = next(from, false), with = next(from, true);
      layers[i][s].without = without, layers[i][s].with = with;
    }
    steps_ += layers[i].size();
    expressions_.budget().check_memory(steps_ * sizeof(Step));
  }
  std::vector<Node> behind;
  for (const Step& step : layers[slots])
    behind.push_back(end_of_row(row, is_array, around, step.state.first));
  const Node start = expressions_.bytes(around.start), between = expressions_.bytes(around.between);
  for (size_t i = slots; i-- > 0;) {
    std::vector<Node> nodes;
    for (const Step& step : layers[i]) {
      expressions_.budget().check();
      const Node without = step.without == kNone ? expressions_.nothing() : behind[step.without];
      const Node with = step.with == kNone
                            ? expressions_.nothing()
                            : expressions_.sequence({step.state.first == 0 ? start : between,
                                                     row.slots[i].node, behind[step.with]});
      nodes.push_back(expressions_.either(without, with));
    }
    behind.swap(nodes);
  }
  return expressions_.sequence(expressions_.bytes(is_array ? "[" : "{"), behind[0]);
}

// Does the same as row(), but the slots may come in any order. A state is the set of slots that are
// already written. So n slots need 2^n states, and the number of slots must be small.
Node Writer::row_in_any_order(const Row& row, bool is_array, uint32_t level) {
  const Layout::Around around = options_.layout.around(level, is_array);
  std::vector<Slot> slots;
  std::vector<size_t> number(row.slots.size(), SIZE_MAX);
  for (size_t i = 0; i < row.slots.size(); ++i) {
    if (row.slots[i].node == expressions_.nothing()) continue;
    number[i] = slots.size();
    slots.push_back(row.slots[i]);
  }
  const size_t all = (size_t{1} << slots.size()) - 1;
  std::vector<Node> behind(all + 1);
  const Node start = expressions_.bytes(around.start), between = expressions_.bytes(around.between);
  for (size_t written = all + 1; written-- > 0;) {
    uint64_t count = 0;
    bool may_end = true;
    for (size_t i = 0; i < slots.size(); ++i) {
      const bool is_there = (written >> i & 1) != 0;
      count += is_there ? 1 : 0;
      may_end = may_end && (is_there || !slots[i].is_required);
    }
    for (const Clause& clause : row.clauses) {
      may_end = may_end && std::any_of(clause.begin(), clause.end(), [&](const Literal& literal) {
                  const size_t at = number[literal.slot];
                  return (at != SIZE_MAX && (written >> at & 1) != 0) == literal.is_there;
                });
    }
    std::vector<Node> ways;
    if (count > row.high) may_end = false;
    if (may_end) ways.push_back(end_of_row(row, is_array, around, count));
    for (size_t i = 0; i < slots.size() && count < row.high; ++i) {
      if ((written >> i & 1) == 0)
        ways.push_back(expressions_.sequence(
            {count == 0 ? start : between, slots[i].node, behind[written | size_t{1} << i]}));
    }
    behind[written] = expressions_.either(std::move(ways));
  }
  return expressions_.sequence(expressions_.bytes(is_array ? "[" : "{"), behind[0]);
}

}  // namespace dlm::compile::schema
