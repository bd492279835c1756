#include "ways.h"

#include <algorithm>
#include <cstring>

namespace dlm {
namespace {

size_t at(int32_t index) { return static_cast<size_t>(index); }

}  // namespace

void Ways::look_at(const Place& place) {
  place_ = place;
  if (place.token >= 0) stands_.assign(at(automaton_.groups), -1);
}

bool Ways::may_stand(int32_t group) {
  if (place_.token < 0) return true;
  int8_t& stands = stands_[at(group)];
  if (stands < 0) stands = automaton_.has_token(group, place_.token) || automaton_.has_token(group, place_.other) ? 1 : 0;
  return stands != 0;
}

void Ways::meet(int32_t state, const std::vector<Place>& places) {
  is_met_.assign((at(automaton_.states) + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t), 0);
  met_.resize(std::max(met_.size(), places.size() + 1));
  size_t known = 0;
  if (met_[0] == std::vector<int32_t>{state})
    while (known < std::min(stood_.size(), places.size()) && stood_[known] == std::pair(places[known].token, places[known].other)) ++known;
  met_[0].assign(1, state);
  stood_.resize(known);
  for (size_t i = known; i < places.size(); ++i) {
    look_at(places[i]);
    const bool is_free = places[i].token < 0;
    uint8_t* const is_met = is_met_.data();  // bytes may alias all else: what the inner loop reads is held here
    const int32_t *const states = automaton_.edge_states.data(), *const groups = automaton_.edge_groups.data();
    for (const int32_t from : met_[i])
      for (int32_t edge = automaton_.edge_starts[at(from)], last = automaton_.edge_starts[at(from) + 1]; edge < last; ++edge)
        if (is_free || may_stand(groups[edge])) is_met[states[edge]] = 1;
    std::vector<int32_t>& behind = met_[i + 1];
    behind.clear();
    for (size_t first = 0; first < is_met_.size(); first += sizeof(uint64_t)) {
      uint64_t marks;
      std::memcpy(&marks, &is_met_[first], sizeof marks);
      if (marks == 0) continue;
      for (size_t found = first; found < first + sizeof marks; ++found)
        if (is_met_[found] != 0) behind.push_back(static_cast<int32_t>(found));
      std::memset(&is_met_[first], 0, sizeof marks);
    }
    stood_.emplace_back(places[i].token, places[i].other);
  }
}

std::vector<uint8_t> Ways::reaching(const std::vector<Place>& places, int32_t room) {
  const auto states = at(automaton_.states);
  size_t last = places.size();  // behind it any token may stand
  while (last > 0 && places[last - 1].token < 0) --last;
  const int64_t behind = int64_t{room} + static_cast<int64_t>(places.size() - last);
  std::vector<uint8_t> out(states), next(states);
  for (size_t state = 0; state < states; ++state) out[state] = automaton_.distances[state] <= behind ? 1 : 0;
  while (last-- > 0) {
    next.swap(out);
    look_at(places[last]);
    for (size_t state = 0; state < states; ++state) {
      out[state] = 0;
      for (int32_t edge = automaton_.edge_starts[state]; edge < automaton_.edge_starts[state + 1] && out[state] == 0; ++edge)
        out[state] = next[at(automaton_.edge_states[at(edge)])] != 0 && may_stand(automaton_.edge_groups[at(edge)]) ? 1 : 0;
    }
  }
  return out;
}

}  // namespace dlm
