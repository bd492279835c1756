#include "constraints/reachable_states.h"

#include <algorithm>
#include <cstring>

namespace dlm {
void Ways::look_at(const Place& place) {
  place_ = place;
  if (place.token >= 0) stands_.assign(automaton_.groups, -1);
}

bool Ways::may_stand(int32_t group) {
  if (place_.token < 0) return true;
  int8_t& stands = stands_[group];
  if (stands < 0)
    stands = automaton_.has_token(group, place_.token) || automaton_.has_token(group, place_.other)
                 ? 1
                 : 0;
  return stands != 0;
}

void Ways::meet(int32_t state, const std::vector<Place>& places) {
  met_.resize(std::max(met_.size(), places.size() + 1));
  size_t known = 0;
  if (met_[0] == std::vector<int32_t>{state})
    while (known < std::min(stood_.size(), places.size()) &&
           stood_[known] == std::pair(places[known].token, places[known].other))
      ++known;
  met_[0].assign(1, state);
  stood_.resize(known);
  if (known == places.size()) return;
  const size_t bytes =
      (automaton_.states + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t);
  is_met_.assign(bytes, 0);
  is_open_.assign(bytes, 0);
  edges_to_.assign(automaton_.states, 0);
  const std::vector<int32_t> nothing, *open = &nothing;
  for (size_t i = known; i < places.size(); ++i) {
    if (places[i].token < 0) {
      move_open(*open, met_[i]);
      open = &met_[i];
      list(is_open_, met_[i + 1]);
    } else {
      look_at(places[i]);
      for (const int32_t from : met_[i])
        for (const auto [to, group] : automaton_.edges(from))
          if (may_stand(group)) is_met_[to] = 1;
      list(is_met_, met_[i + 1]);
      for (const int32_t behind : met_[i + 1]) is_met_[behind] = 0;
    }
    stood_.emplace_back(places[i].token, places[i].other);
  }
}

// There may be hundreds of states before a place (position of the text). Most of them are also
// before the next place. So this function updates edges_to_ and is_open_ only for the states that
// are in just one of the two lists.
void Ways::move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now) {
  // The C++ compiler must assume that a write through a uint8_t pointer can change any object,
  // including the vectors below. With local copies of their pointers, the inner loop does not
  // reload the pointers.
  const int32_t* const starts = automaton_.edge_starts.data();
  const int32_t* const states = automaton_.edge_states.data();
  int32_t* const edges_to = edges_to_.data();
  uint8_t* const is_open = is_open_.data();
  const auto count = [&](int32_t from, int32_t step) {
    for (int32_t edge = starts[from]; edge < starts[from + 1]; ++edge)
      is_open[states[edge]] = (edges_to[states[edge]] += step) != 0 ? 1 : 0;
  };
  auto gone = before.begin();
  auto come = now.begin();
  while (gone != before.end() || come != now.end()) {
    if (come == now.end() || (gone != before.end() && *gone < *come))
      count(*gone++, -1);
    else if (gone == before.end() || *come < *gone)
      count(*come++, 1);
    else
      ++gone, ++come;
  }
}

void Ways::list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states) {
  states.clear();
  for (size_t first = 0; first < marks.size(); first += sizeof(uint64_t)) {
    uint64_t some;
    std::memcpy(&some, &marks[first], sizeof some);
    if (some == 0) continue;
    for (size_t found = first; found < first + sizeof some; ++found)
      if (marks[found] != 0) states.push_back(static_cast<int32_t>(found));
  }
}

std::vector<uint8_t> Ways::reaching(const std::vector<Place>& places, int32_t room) {
  // All places from `last` on allow all tokens. A text may fill only some of them, if other tokens
  // may follow its end.
  size_t last = places.size();
  while (automaton_.is_padded && last > 0 && places[last - 1].token < 0) --last;
  const int64_t behind = int64_t{room} + static_cast<int64_t>(places.size() - last);
  std::vector<uint8_t> out(automaton_.states), next(automaton_.states);
  for (int32_t state = 0; state < automaton_.states; ++state)
    out[state] = automaton_.distances[state] <= behind ? 1 : 0;
  while (last-- > 0) {
    next.swap(out);
    look_at(places[last]);
    std::fill(out.begin(), out.end(), 0);
    for (int32_t state = 0; state < automaton_.states; ++state)
      for (const auto [to, group] : automaton_.edges(state))
        if (next[to] != 0 && may_stand(group)) {
          out[state] = 1;
          break;
        }
  }
  return out;
}

}  // namespace dlm
