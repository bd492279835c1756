#include "viterbi.h"

#include <algorithm>
#include <limits>

namespace dlm {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr double kLeast = -1e30;  // of a token that the denoiser rules out: a text may need it all the same

size_t at(int32_t index) { return static_cast<size_t>(index); }

}  // namespace

bool may_stand(const Automaton& automaton, const Place& place, int32_t group) {
  if (place.token < 0) return true;
  for (const int32_t token : {place.token, place.other})
    if (token >= 0 && automaton.token_class[at(token)] >= 0 && automaton.has_class(group, automaton.token_class[at(token)])) return true;
  return false;
}

std::vector<uint8_t> Viterbi::reaching(const std::vector<Place>& places, int32_t room) const {
  const auto states = at(automaton_.states);
  size_t last = places.size();  // behind it any token may stand
  while (last > 0 && places[last - 1].token < 0) --last;
  const int64_t behind = int64_t{room} + static_cast<int64_t>(places.size() - last);
  std::vector<uint8_t> out(states), next(states);
  for (size_t state = 0; state < states; ++state) out[state] = automaton_.distances[state] <= behind ? 1 : 0;
  std::vector<int8_t> stands(at(automaton_.groups));  // -1: not looked at
  while (last-- > 0) {
    next.swap(out);
    std::fill(stands.begin(), stands.end(), int8_t{-1});
    for (size_t state = 0; state < states; ++state) {
      out[state] = 0;
      for (int32_t edge = automaton_.edge_starts[state]; edge < automaton_.edge_starts[state + 1] && out[state] == 0; ++edge) {
        if (next[at(automaton_.edge_states[at(edge)])] == 0) continue;
        const int32_t group = automaton_.edge_groups[at(edge)];
        if (stands[at(group)] < 0) stands[at(group)] = may_stand(automaton_, places[last], group) ? 1 : 0;
        out[state] = static_cast<uint8_t>(stands[at(group)]);
      }
    }
  }
  return out;
}

// Fills classes_ for a position.
void Viterbi::weigh(const Place& place) {
  ++weighing_;
  classes_.assign(at(automaton_.classes), {kNever, -1});
  const auto weigh_token = [&](int32_t token) {
    if (place.logits == nullptr) return 0.0;
    const double weight = static_cast<double>(place.logits[token]) - static_cast<double>(place.logits[place.best]);
    return weight > kLeast ? weight : kLeast;
  };
  if (place.token >= 0) {
    for (const int32_t token : {place.token, place.other}) {
      const int32_t number = token < 0 ? -1 : automaton_.token_class[at(token)];
      if (number < 0) continue;
      const double weight = weigh_token(token);
      Best& best = classes_[at(number)];
      if (weight > best.weight || (weight == best.weight && token < best.token)) best = {weight, token};
    }
    return;
  }
  if (place.logits == nullptr) {
    for (size_t number = 0; number < classes_.size(); ++number) classes_[number] = {0, automaton_.class_tokens[number]};
    return;
  }
  // Class -1 is at the front, and nothing is higher than its mark. Few tokens are higher than all before them of their class.
  highest_.assign(classes_.size() + 1, -std::numeric_limits<float>::infinity());
  highest_.front() = std::numeric_limits<float>::infinity();
  highest_token_.resize(classes_.size() + 1);
  std::copy(automaton_.class_tokens.begin(), automaton_.class_tokens.end(), highest_token_.begin() + 1);
  const int32_t* const token_class = automaton_.token_class.data();
  float* const highest = highest_.data() + 1;
  for (int32_t token = 0; token < automaton_.vocab_size; ++token) {
    if (!(place.logits[token] > highest[token_class[token]])) continue;
    highest[token_class[token]] = place.logits[token];
    highest_token_[at(token_class[token] + 1)] = token;
  }
  for (size_t number = 0; number < classes_.size(); ++number)
    classes_[number] = {weigh_token(highest_token_[number + 1]), highest_token_[number + 1]};
}

Viterbi::Best Viterbi::weigh_group(int32_t group) {
  Best& best = groups_[at(group)];
  if (fresh_[at(group)] == weighing_) return best;
  fresh_[at(group)] = weighing_;
  best = {kNever, -1};
  for (int32_t member = automaton_.group_starts[at(group)]; member < automaton_.group_starts[at(group) + 1]; ++member) {
    const Best& found = classes_[at(automaton_.group_classes[at(member)])];
    if (found.token >= 0 && (found.weight > best.weight || (found.weight == best.weight && found.token < best.token))) best = found;
  }
  return best;
}

// Fills steps_, with nothing but the states.
void Viterbi::meet(int32_t state, const std::vector<Place>& places) {
  is_met_.assign(at(automaton_.states), 0);
  steps_.resize(places.size() + 1);
  for (std::vector<Step>& steps : steps_) steps.clear();
  steps_[0].push_back({state, -1, -1, kNever});
  std::vector<int8_t> stands;
  for (size_t i = 0; i < places.size(); ++i) {
    stands.assign(at(automaton_.groups), -1);
    for (const Step& from : steps_[i])
      for (int32_t edge = automaton_.edge_starts[at(from.state)]; edge < automaton_.edge_starts[at(from.state) + 1]; ++edge) {
        const int32_t group = automaton_.edge_groups[at(edge)], to = automaton_.edge_states[at(edge)];
        if (is_met_[at(to)] != 0) continue;
        if (stands[at(group)] < 0) stands[at(group)] = may_stand(automaton_, places[i], group) ? 1 : 0;
        if (stands[at(group)] == 0) continue;
        is_met_[at(to)] = 1;
        steps_[i + 1].push_back({to, -1, -1, kNever});
      }
    std::sort(steps_[i + 1].begin(), steps_[i + 1].end(), [](const Step& a, const Step& b) { return a.state < b.state; });
    for (const Step& step : steps_[i + 1]) is_met_[at(step.state)] = 0;
  }
}

void Viterbi::find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& classes) {
  constexpr int32_t none = -2;
  meet(state, places);
  classes.assign(places.size(), none);
  ahead_.assign(at(automaton_.states), kNever);
  for (Step& step : steps_.back()) step.weight = ends[at(step.state)] != 0 ? 0.0 : kNever;
  for (size_t i = places.size(); i-- > 0;) {
    for (const Step& step : steps_[i + 1]) ahead_[at(step.state)] = step.weight;
    for (Step& from : steps_[i])
      for (int32_t edge = automaton_.edge_starts[at(from.state)]; edge < automaton_.edge_starts[at(from.state) + 1]; ++edge) {
        const auto group = at(automaton_.edge_groups[at(edge)]);
        if (ahead_[at(automaton_.edge_states[at(edge)])] == kNever || !may_stand(automaton_, places[i], automaton_.edge_groups[at(edge)])) continue;
        from.weight = 0;
        const int32_t first = automaton_.group_starts[group], only = automaton_.group_classes[at(first)];
        const bool is_one = automaton_.group_starts[group + 1] == first + 1 && (classes[i] == none || classes[i] == only);
        classes[i] = is_one ? only : -1;
      }
    for (const Step& step : steps_[i + 1]) ahead_[at(step.state)] = kNever;
  }
}

bool Viterbi::solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens) {
  const size_t length = places.size();
  groups_.resize(at(automaton_.groups));
  fresh_.assign(at(automaton_.groups), -1);
  weighing_ = 0;
  ahead_.assign(at(automaton_.states), kNever);
  meet(state, places);
  for (Step& step : steps_[length]) step.weight = ends[at(step.state)] != 0 ? 0.0 : kNever;
  for (size_t i = length; i-- > 0;) {
    for (const Step& step : steps_[i + 1]) ahead_[at(step.state)] = step.weight;
    weigh(places[i]);
    for (Step& from : steps_[i])
      for (int32_t edge = automaton_.edge_starts[at(from.state)]; edge < automaton_.edge_starts[at(from.state) + 1]; ++edge) {
        const int32_t to = automaton_.edge_states[at(edge)];
        if (ahead_[at(to)] == kNever) continue;
        const Best best = weigh_group(automaton_.edge_groups[at(edge)]);
        if (best.token < 0) continue;
        const double weight = best.weight + ahead_[at(to)];
        if (weight > from.weight || (weight == from.weight && best.token < from.token)) from = {from.state, best.token, to, weight};
      }
    for (const Step& step : steps_[i + 1]) ahead_[at(step.state)] = kNever;
  }
  if (steps_[0].front().weight == kNever) return false;
  tokens.resize(length);
  for (size_t i = 0; i < length; ++i) {
    const auto step = std::lower_bound(steps_[i].begin(), steps_[i].end(), state,
                                       [](const Step& each, int32_t wanted) { return each.state < wanted; });
    tokens[i] = step->token;
    state = step->next;
  }
  return true;
}

}  // namespace dlm
