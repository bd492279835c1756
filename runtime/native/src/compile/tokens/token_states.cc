// Computes tables about the states of a byte automaton. For each state, the tables contain the next
// states, the number of bytes that are forced (the only possible next bytes), and a flag that is
// true if the state accepts many bytes.
#include "compile/tokens/token_states.h"

#include <algorithm>
#include <numeric>

#include "base/utf8.h"
#include "compile/automata/numbers.h"

namespace dlm::compile {
namespace {

// A state inside a string accepts nearly all bytes, and most of these bytes lead to one next state.
// A state inside a word or number accepts only few bytes. The limits kManyBytes and kBytesAlike
// distinguish these two kinds of states.
constexpr int kManyBytes = 24, kBytesAlike = 16;

}  // namespace

TokenStates::TokenStates(const ByteAutomaton& texts, TokenSets& sets, Budget& budget)
    : texts_(texts), budget_(budget) {
  find_shapes(sets);
  find_forced();
}

void TokenStates::find_shapes(TokenSets& sets) {
  const size_t states = texts_.states();
  budget_.check_memory(states * 4 * sizeof(int32_t) + texts_.edges.size() * sizeof(int32_t));
  states_.reserve(states);
  // For each next state of the current state: the part of the bytes that lead to it.
  std::vector<int32_t> part_of(states, kNone);
  std::vector<int> bytes;  // for each part: the number of bytes in the part
  std::vector<TokenSets::Range> ranges;
  for (size_t state = 0; state < states; ++state) {
    budget_.check();
    const size_t first = targets_.size();
    bytes.clear();
    ranges.clear();
    for (uint32_t i = texts_.starts[state]; i < texts_.starts[state + 1]; ++i) {
      const auto& [low, high, to] = texts_.edges[i];
      int32_t& part = part_of[index(to)];
      if (part < 0) {
        part = static_cast<int32_t>(bytes.size());
        bytes.push_back(0);
        targets_.push_back(to);
      }
      bytes[index(part)] += high - low + 1;
      ranges.push_back({low, high, static_cast<uint16_t>(part)});
    }
    const int32_t back = part_of[state];
    const bool is_hub = back >= 0 && bytes[index(back)] >= kBytesAlike;
    const bool is_wide = std::accumulate(bytes.begin(), bytes.end(), 0) >= kManyBytes &&
                         *std::max_element(bytes.begin(), bytes.end()) >= kBytesAlike;
    states_.push_back({sets.shape_of(ranges), static_cast<uint32_t>(first), is_wide, is_hub});
    for (size_t i = first; i < targets_.size(); ++i) part_of[index(targets_[i])] = kNone;
  }
}

size_t TokenStates::bytes() const {
  return states_.size() * sizeof(State) + (targets_.size() + forced_.size()) * sizeof(int32_t);
}

void TokenStates::find_forced() {
  const size_t states = texts_.states();
  forced_.assign(states, 0);
  const auto is_forced = [&](size_t state) {
    return texts_.starts[state + 1] - texts_.starts[state] == 1 && !texts_.accepting[state] &&
           texts_.edges[texts_.starts[state]].low == texts_.edges[texts_.starts[state]].high;
  };
  std::vector<int32_t> path;
  for (size_t state = 0; state < states; ++state) {
    budget_.check();
    auto at = static_cast<int32_t>(state);
    path.clear();
    while (forced_[index(at)] == 0 && is_forced(index(at))) {
      path.push_back(at);
      at = texts_.edges[texts_.starts[index(at)]].state;
    }
    int32_t length = forced_[index(at)];
    while (!path.empty()) {
      forced_[index(path.back())] = ++length;
      path.pop_back();
    }
  }
}

std::string TokenStates::text_after(int32_t state) const {
  std::string out;
  while (forced_[index(state)] > 0 && out.size() < kEncodedBytes) {
    const ByteEdge& edge = texts_.edges[texts_.starts[index(state)]];
    out += static_cast<char>(edge.low);
    state = edge.state;
  }
  drop_cut_char(out);
  return out;
}

}  // namespace dlm::compile
