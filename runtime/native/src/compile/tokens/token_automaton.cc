// Builds an automaton over token ids from the edges that token_walks.h found. Drops states and
// edges from which no end of a text can be reached. Numbers the states, classes and groups.
#include "compile/tokens/token_automaton.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "compile/automata/numbers.h"
#include "compile/tokens/token_classes.h"
#include "compile/tokens/token_walks.h"

namespace dlm::compile {
namespace {

// Builds an automaton over token ids. Its states are the states of the byte automaton `texts` that
// are reached after a whole token. If there are end tokens, it has one more state, which is reached
// after an end token.
class Assembly {
 public:
  Assembly(const ByteAutomaton& texts, const Vocabulary& vocabulary, TokenEdges edges,
           const TokenGroups& groups, Budget& budget)
      : texts_(texts),
        vocabulary_(vocabulary),
        edges_(std::move(edges)),
        groups_(groups),
        budget_(budget) {}

  Automaton make() {
    const std::vector<int32_t> distances = measure();
    Automaton out{};
    out.vocab_size = vocabulary_.vocab_size();
    // This loop collects the groups of the remaining edges, in the order of their first use.
    std::vector<int32_t> used(index(groups_.size()), kNone), groups;
    std::vector<int32_t> renamed(texts_.states(), kNone);
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (distances[state] < 0) continue;
      renamed[state] = out.states++;
      for (auto [edge, last] = edges_.of(state); edge != last; ++edge)
        if (distances[index(edge->state)] >= 0 && used[index(edge->group)] < 0) {
          used[index(edge->group)] = static_cast<int32_t>(groups.size());
          groups.push_back(edge->group);
        }
    }
    const std::vector<int32_t> numbers = TokenClasses(groups_, budget_).name(groups, out);
    const bool has_ends = !vocabulary_.ends().empty();
    const int32_t end_state = out.states, end_group = out.groups;
    if (has_ends) {
      const int32_t end_class = out.classes++;
      ++out.states, ++out.groups;
      for (const int32_t end : vocabulary_.ends()) out.token_class[index(end)] = end_class;
      out.group_classes.push_back(end_class);
      out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
    }
    out.edge_starts.push_back(0);
    std::vector<TokenEdge> row;
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (distances[state] < 0) continue;
      budget_.check();
      row.clear();
      for (auto [edge, last] = edges_.of(state); edge != last; ++edge)
        if (distances[index(edge->state)] >= 0)
          row.push_back({numbers[index(used[index(edge->group)])], renamed[index(edge->state)]});
      std::sort(row.begin(), row.end(),
                [](const TokenEdge& a, const TokenEdge& b) { return a.state < b.state; });
      for (const auto& [group, to] : row) {
        out.edge_states.push_back(to);
        out.edge_groups.push_back(group);
      }
      if (texts_.accepting[state] && has_ends) {
        out.edge_states.push_back(end_state);
        out.edge_groups.push_back(end_group);
      }
      out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
      out.distances.push_back(distances[state]);
    }
    if (has_ends) {
      out.edge_states.push_back(end_state);
      out.edge_groups.push_back(end_group);
      out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
      out.distances.push_back(0);
    }
    budget_.check_edges(out.edge_states.size());
    complete_tables(out);
    return out;
  }

 private:
  // For each state, returns the smallest number of tokens from the state to the end of a text. The
  // number is -1 if the state is never reached after a whole token, or if no end can be reached
  // from it.
  std::vector<int32_t> measure() const {
    const size_t states = texts_.states();
    std::vector<uint32_t> begins(states + 2);
    const auto each_edge = [&](auto visit) {
      for (size_t state = 0; state < states; ++state)
        if (edges_.row_of[state] >= 0)
          for (auto [edge, last] = edges_.of(state); edge != last; ++edge)
            visit(static_cast<int32_t>(state), index(edge->state));
    };
    each_edge([&](int32_t, size_t to) { ++begins[to + 2]; });
    for (size_t i = 2; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::vector<int32_t> sources(begins.back());
    each_edge([&](int32_t from, size_t to) { sources[begins[to + 1]++] = from; });
    std::vector<int32_t> distances(states, kNone), order;
    for (size_t state = 0; state < states; ++state)
      if (edges_.row_of[state] >= 0 && texts_.accepting[state]) {
        distances[state] = 0;
        order.push_back(static_cast<int32_t>(state));
      }
    for (size_t i = 0; i < order.size(); ++i) {
      budget_.check();
      for (uint32_t j = begins[index(order[i])]; j < begins[index(order[i]) + 1]; ++j)
        if (distances[index(sources[j])] < 0) {
          distances[index(sources[j])] = distances[index(order[i])] + 1;
          order.push_back(sources[j]);
        }
    }
    if (distances[0] < 0)
      fail(DLM_INVALID_ARGUMENT,
           "constraint: no tokens of this vocabulary make a text that it allows");
    return distances;
  }

  const ByteAutomaton& texts_;
  const Vocabulary& vocabulary_;
  const TokenEdges edges_;
  const TokenGroups& groups_;
  Budget& budget_;
};

// Returns an automaton that accepts the same texts, but with kTextStart before each text.
ByteAutomaton start_text(const ByteAutomaton& texts) {
  ByteAutomaton out;
  out.starts.assign(1, 0);
  append_edge(out, static_cast<uint8_t>(kTextStart), static_cast<uint8_t>(kTextStart), 1);
  for (const ByteEdge& edge : texts.edges)
    out.edges.push_back({edge.low, edge.high, edge.state + 1});
  for (const uint32_t start : texts.starts) out.starts.push_back(start + 1);
  out.accepting.push_back(texts.accepting.front());
  out.accepting.insert(out.accepting.end(), texts.accepting.begin(), texts.accepting.end());
  return out;
}

}  // namespace

Automaton token_automaton(const ByteAutomaton& texts, const Vocabulary& vocabulary,
                          Budget& budget) {
  const ByteAutomaton started = vocabulary.has_starts() ? start_text(texts) : ByteAutomaton{};
  const ByteAutomaton& bytes = vocabulary.has_starts() ? started : texts;
  std::unique_ptr<TokenSets> sets = vocabulary.take_sets();
  TokenWalks walks(bytes, vocabulary, *sets, budget);
  TokenEdges edges = walks.walk_all();
  Automaton out = Assembly(bytes, vocabulary, std::move(edges), walks.groups(), budget).make();
  vocabulary.keep_sets(std::move(sets));
  return out;
}

}  // namespace dlm::compile
