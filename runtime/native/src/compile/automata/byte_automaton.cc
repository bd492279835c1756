#include "compile/automata/byte_automaton.h"

#include <algorithm>
#include <unordered_map>

#include "base/json.h"
#include "base/utf8.h"

namespace dlm::compile {
namespace {

// Searches the edges from `first` to `last` - 1. Returns the edge that accepts the byte, or `last`
// if there is no such edge.
const ByteEdge* find_edge(const ByteEdge* first, const ByteEdge* last, uint8_t byte) {
  const ByteEdge* const edge = std::lower_bound(
      first, last, byte, [](const ByteEdge& each, uint8_t value) { return each.high < value; });
  return edge != last && edge->low <= byte ? edge : last;
}

// Combines two automata. Each state of the result is a pair of a state of the first automaton and a
// state of the second automaton. Pairs are numbered in the order of their first visit.
class Product {
 public:
  Product(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget)
      : first_(first), second_(second), budget_(budget) {}

  // If is_both is true, the result accepts the texts that both automata accept. If is_both is
  // false, the result accepts the texts that only the first automaton accepts. In this case, the
  // second state of a pair is -1 if the second automaton accepts no continuation.
  ByteAutomaton make(bool is_both) {
    ByteAutomaton out;
    if (first_.is_empty()) return out;
    number(0, second_.is_empty() ? -1 : 0);
    if (is_both && second_.is_empty()) return out;
    for (size_t at = 0; at < pairs_.size(); ++at) {
      budget_.check();
      budget_.check_memory(at * 64 + out.edges.size() * sizeof(ByteEdge));
      const auto [left, right] = pairs_[at];
      out.starts.push_back(static_cast<uint32_t>(out.edges.size()));
      const bool is_second = right >= 0 && second_.accepting[static_cast<size_t>(right)];
      out.accepting.push_back(first_.accepting[static_cast<size_t>(left)] && is_second == is_both);
      add_edges(out, left, right, is_both);
    }
    out.starts.push_back(static_cast<uint32_t>(out.edges.size()));
    return minimised(out, 0, budget_);
  }

 private:
  struct Pair {
    int32_t left, right;
  };

  int32_t number(int32_t left, int32_t right) {
    const uint64_t key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
    const auto [at, is_new] = numbers_.try_emplace(key, static_cast<int32_t>(pairs_.size()));
    if (is_new) pairs_.push_back({left, right});
    return at->second;
  }

  void add_edges(ByteAutomaton& out, int32_t left, int32_t right, bool is_both) {
    const auto l = static_cast<size_t>(left);
    const ByteEdge* other = nullptr;
    const ByteEdge* last = nullptr;
    if (right >= 0) {
      other = second_.edges.data() + second_.starts[static_cast<size_t>(right)];
      last = second_.edges.data() + second_.starts[static_cast<size_t>(right) + 1];
    }
    for (uint32_t i = first_.starts[l]; i < first_.starts[l + 1]; ++i) {
      const ByteEdge& edge = first_.edges[i];
      int low = edge.low;
      while (low <= edge.high) {
        while (other != last && other->high < low) ++other;
        const bool is_inside = other != last && other->low <= low;
        const int high = is_inside       ? std::min<int>(edge.high, other->high)
                         : other != last ? std::min<int>(edge.high, other->low - 1)
                                         : edge.high;
        if (is_inside || !is_both)
          append_edge(out, static_cast<uint8_t>(low), static_cast<uint8_t>(high),
                      number(edge.state, is_inside ? other->state : -1));
        low = high + 1;
      }
    }
  }

  const ByteAutomaton& first_;
  const ByteAutomaton& second_;
  Budget& budget_;
  std::vector<Pair> pairs_;
  std::unordered_map<uint64_t, int32_t> numbers_;
};

}  // namespace

int32_t ByteAutomaton::next(int32_t state, uint8_t byte) const {
  const auto at = static_cast<size_t>(state);
  const ByteEdge* const last = edges.data() + starts[at + 1];
  const ByteEdge* const edge = find_edge(edges.data() + starts[at], last, byte);
  return edge == last ? -1 : edge->state;
}

bool ByteAutomaton::matches(std::string_view text) const {
  if (is_empty()) return false;
  int32_t state = 0;
  for (const char each : text)
    if ((state = next(state, static_cast<uint8_t>(each))) < 0) return false;
  return accepting[static_cast<size_t>(state)] != 0;
}

void append_edge(ByteAutomaton& automaton, uint8_t low, uint8_t high, int32_t state) {
  if (automaton.edges.size() > automaton.starts.back() && automaton.edges.back().state == state &&
      automaton.edges.back().high + 1 == low)
    automaton.edges.back().high = high;
  else
    automaton.edges.push_back({low, high, state});
}

ByteAutomaton intersection(const ByteAutomaton& first, const ByteAutomaton& second,
                           Budget& budget) {
  return Product(first, second, budget).make(true);
}

ByteAutomaton difference(const ByteAutomaton& first, const ByteAutomaton& second, Budget& budget) {
  return Product(first, second, budget).make(false);
}

ByteAutomaton between(const ByteAutomaton& texts, const std::string& before,
                      const std::string& behind, const std::string& hint, Budget& budget) {
  const auto takes_nul = [](const ByteEdge& edge) { return edge.low == 0; };
  if (before.empty() && behind.empty() &&
      std::none_of(texts.edges.begin(), texts.edges.end(), takes_nul))
    return texts;
  int32_t first = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    first = texts.next(first, static_cast<uint8_t>(before[i]));
    if (first < 0) {
      size_t good = i;  // length of the accepted part, without a cut character
      while (good > 0 && continues_char(before[good])) --good;
      throw Error(DLM_INVALID_ARGUMENT, "no text of the constraint starts with " +
                                            json::quoted(before) + ", though some may with " +
                                            json::quoted(before.substr(0, good)) + hint);
    }
  }
  ByteAutomaton cut;
  for (size_t state = 0; state < texts.states(); ++state) {
    cut.starts.push_back(static_cast<uint32_t>(cut.edges.size()));
    for (uint32_t i = texts.starts[state]; i < texts.starts[state + 1]; ++i) {
      const auto [low, high, to] = texts.edges[i];
      if (high > 0) append_edge(cut, std::max<uint8_t>(low, 1), high, to);
    }
    auto end = static_cast<int32_t>(state);
    for (size_t i = 0; i < behind.size() && end >= 0; ++i)
      end = texts.next(end, static_cast<uint8_t>(behind[i]));
    cut.accepting.push_back(end >= 0 && texts.accepting[static_cast<size_t>(end)]);
    budget.check();
  }
  cut.starts.push_back(static_cast<uint32_t>(cut.edges.size()));
  ByteAutomaton out = minimised(cut, first, budget);
  if (out.is_empty())
    throw Error(DLM_INVALID_ARGUMENT, before.empty() && behind.empty()
                                          ? std::string("regex: only texts with a NUL match it")
                                          : "no text of the constraint starts with " +
                                                json::quoted(before) + " and ends with " +
                                                json::quoted(behind));
  return out;
}

}  // namespace dlm::compile
