// Makes the automaton of token ids from the edges that the walks over tokens found: drops what
// leads nowhere, and names classes and groups.
//
// Classes are told apart by groups, each once, and not by states.
#include "compile/token_automaton.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "compile/numbers.h"
#include "compile/token_walks.h"

namespace dlm::compile {
namespace {

constexpr int32_t kNone = -1;

// Makes an automaton of edges between states of `texts`.
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
    // Groups that are left, and classes of tokens that are in the same of them.
    std::vector<int32_t> used(groups_.size(), kNone), groups;
    std::vector<int32_t> renamed(texts_.states(), kNone);
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (!edges_.is_met[state]) continue;
      renamed[state] = out.states++;
      for (const auto& [group, to] : edges_.rows[index(edges_.row_of[state])])
        if (used[index(group)] < 0) {
          used[index(group)] = 0;
          groups.push_back(group);
        }
    }
    const int32_t end_state = out.states++;
    name_classes(out, groups);
    const int32_t end_class = out.classes++;
    for (const int32_t end : vocabulary_.ends()) out.token_class[index(end)] = end_class;
    list_groups(out, groups, used, end_class);
    const int32_t end_group = out.groups - 1;
    out.edge_starts.push_back(0);
    for (size_t state = 0; state < texts_.states(); ++state) {
      if (!edges_.is_met[state]) continue;
      budget_.check();
      auto& row = edges_.rows[index(edges_.row_of[state])];
      std::sort(row.begin(), row.end(),
                [](const TokenEdge& a, const TokenEdge& b) { return a.state < b.state; });
      for (const auto& [group, to] : row) {
        out.edge_states.push_back(renamed[index(to)]);
        out.edge_groups.push_back(used[index(group)]);
      }
      if (texts_.accepting[state]) {
        out.edge_states.push_back(end_state);
        out.edge_groups.push_back(end_group);
      }
      out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
      out.distances.push_back(distances[state]);
    }
    out.edge_states.push_back(end_state);
    out.edge_groups.push_back(end_group);
    out.edge_starts.push_back(static_cast<int32_t>(out.edge_states.size()));
    out.distances.push_back(0);
    budget_.check_edges(out.edge_states.size());
    list_tokens(out);
    return out;
  }

 private:
  // The fewest tokens from each state to where a text may end, -1 if there is no way. After it,
  // only states and edges on a text's path are left in edges_.is_met and edges_.rows.
  std::vector<int32_t> measure() {
    const size_t states = texts_.states();
    std::vector<uint32_t> begins(states + 2);
    const auto each_edge = [&](auto visit) {
      for (size_t state = 0; state < states; ++state)
        if (edges_.is_met[state])
          for (const auto& [group, to] : edges_.rows[index(edges_.row_of[state])])
            visit(static_cast<int32_t>(state), index(to));
    };
    each_edge([&](int32_t, size_t to) { ++begins[to + 2]; });
    for (size_t i = 2; i < begins.size(); ++i) begins[i] += begins[i - 1];
    std::vector<int32_t> sources(begins.back());
    each_edge([&](int32_t from, size_t to) { sources[begins[to + 1]++] = from; });
    std::vector<int32_t> distances(states, kNone), order;
    for (size_t state = 0; state < states; ++state)
      if (edges_.is_met[state] && texts_.accepting[state]) {
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
    for (auto& row : edges_.rows)
      row.erase(
          std::remove_if(row.begin(), row.end(),
                         [&](const TokenEdge& edge) { return distances[index(edge.state)] < 0; }),
          row.end());
    for (size_t state = 0; state < states; ++state)
      if (edges_.is_met[state] && distances[state] < 0) edges_.is_met[state] = 0;
    return distances;
  }

  // Fills token_class: tokens are of one class if they are in the same groups. Classes are numbered
  // by their lowest tokens.
  void name_classes(Automaton& out, const std::vector<int32_t>& groups) {
    std::vector<int32_t> class_of(index(out.vocab_size), 0);
    std::vector<int32_t> sizes{out.vocab_size};
    struct Mark {
      int32_t round, count, fresh;  // the class for the tokens that are in the group
    };
    std::vector<Mark> marks{{kNone, 0, kNone}};
    int32_t round = 0;
    for (const int32_t group : groups) {
      budget_.check_time();
      groups_.each_token(group, [&](int32_t token) {
        Mark& mark = marks[index(class_of[index(token)])];
        if (mark.round != round) mark = {round, 0, kNone};
        ++mark.count;
      });
      groups_.each_token(group, [&](int32_t token) {
        const int32_t from = class_of[index(token)];
        Mark& mark = marks[index(from)];
        if (mark.round != round || mark.fresh == from) return;
        if (mark.fresh < 0) {
          // The class of tokens that are in no group keeps its number, whoever leaves it.
          if (mark.count == sizes[index(from)] && from != 0) {
            mark.fresh = from;
            return;
          }
          mark.fresh = static_cast<int32_t>(sizes.size());
          sizes[index(from)] -= mark.count;
          sizes.push_back(mark.count);
          marks.push_back({kNone, 0, kNone});
        }
        class_of[index(token)] = marks[index(from)].fresh;
      });
      ++round;
    }
    out.token_class.assign(index(out.vocab_size), kNone);
    std::vector<int32_t> names(sizes.size(), kNone);
    for (size_t token = 0; token < class_of.size(); ++token) {
      if (class_of[token] == 0) continue;
      int32_t& name = names[index(class_of[token])];
      if (name < 0) name = out.classes++;
      out.token_class[token] = name;
    }
  }

  // Fills the groups by their classes, equal ones once. used: the group of each list of nodes.
  void list_groups(Automaton& out, const std::vector<int32_t>& groups, std::vector<int32_t>& used,
                   int32_t end_class) {
    std::map<std::vector<int32_t>, int32_t> known;
    std::vector<int32_t> seen(index(out.classes), kNone), classes;
    out.group_starts.push_back(0);
    for (const int32_t group : groups) {
      budget_.check_time();
      classes.clear();
      groups_.each_token(group, [&](int32_t token) {
        const int32_t number = out.token_class[index(token)];
        if (std::exchange(seen[index(number)], group) != group) classes.push_back(number);
      });
      std::sort(classes.begin(), classes.end());
      const auto [at, is_new] = known.try_emplace(classes, out.groups);
      used[index(group)] = at->second;
      if (!is_new) continue;
      ++out.groups;
      out.group_classes.insert(out.group_classes.end(), classes.begin(), classes.end());
      out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
      budget_.check_memory(out.group_classes.size() * 2 * sizeof(int32_t));
    }
    ++out.groups;
    out.group_classes.push_back(end_class);
    out.group_starts.push_back(static_cast<int32_t>(out.group_classes.size()));
  }

  const ByteAutomaton& texts_;
  const Vocabulary& vocabulary_;
  TokenEdges edges_;
  const TokenGroups& groups_;
  Budget& budget_;
};

}  // namespace

Automaton token_automaton(const ByteAutomaton& texts, const Vocabulary& vocabulary,
                          Budget& budget) {
  TokenWalks walks(texts, vocabulary, budget);
  TokenEdges edges = walks.walk_all();
  return Assembly(texts, vocabulary, std::move(edges), walks.groups(), budget).make();
}

}  // namespace dlm::compile
