#include "viterbi.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace dlm {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr double kLeast = -1e30;  // of a token that the denoiser rules out: a text may need it all the same

size_t at(int32_t index) { return static_cast<size_t>(index); }

double weigh(const Place& place, int32_t token) {
  if (place.logits == nullptr) return place.best < 0 || token == place.best ? 0 : -1;
  const double weight = static_cast<double>(place.logits[token]) - static_cast<double>(place.logits[place.best]);
  return weight > kLeast ? weight : kLeast;
}

constexpr size_t kLanes = 8;  // as many maxima as there are loads under way at a time
constexpr size_t kRun = 64;        // tokens of a row whose highest logit is held
constexpr size_t kHighest = 64;    // as many runs, at least, have a token that reaches the bound
constexpr size_t kMany = 16 * kHighest;  // tokens of a class that make it worth a look at the row's highest ones

float max_of(const float (&lanes)[kLanes]) { return *std::max_element(lanes, lanes + kLanes); }

// The first of the tokens whose logit is the highest; the first of all where none is above minus infinity.
int32_t find_best(const float* logits, const int32_t* tokens, size_t count) {
  constexpr size_t kStretch = 32 * kLanes;  // short enough to look through once more
  float highest = kNone;
  size_t found = 0;
  for (size_t start = 0; start < count; start += kStretch) {
    const size_t end = std::min(start + kStretch, count);
    float lanes[kLanes] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};
    size_t i = start;
    for (; i + kLanes <= end; i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float logit = logits[tokens[i + lane]];
        lanes[lane] = logit > lanes[lane] ? logit : lanes[lane];
      }
    for (; i < end; ++i) lanes[0] = std::max(lanes[0], logits[tokens[i]]);
    const float best = max_of(lanes);
    if (best > highest) highest = best, found = start;
  }
  while (highest > kNone && logits[tokens[found]] != highest) ++found;
  return tokens[found];
}

}  // namespace

// A class that has any of the tokens that reach a bound, which are a row's highest ones, has its best one among them.
void Viterbi::weigh_highest(const Place& place) {
  looked_at_ = place_;
  const auto vocab_size = at(automaton_.vocab_size), runs = vocab_size / kRun;
  if (runs <= kHighest) return;
  highest_.resize(runs);
  for (size_t run = 0; run < runs; ++run) {
    const float* const logits = place.logits + run * kRun;
    float lanes[kLanes] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};
    for (size_t i = 0; i < kRun; i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
    highest_[run] = max_of(lanes);
  }
  ordered_ = highest_;
  std::nth_element(ordered_.begin(), ordered_.begin() + kHighest, ordered_.end(), std::greater<>());
  const float bound = ordered_[kHighest];
  if (!(bound > kNone)) return;
  const auto see = [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      if (!(place.logits[i] >= bound) || automaton_.token_class[i] < 0) continue;
      Best& best = classes_[at(automaton_.token_class[i])];
      const auto token = static_cast<int32_t>(i);
      if (best.place != place_ || place.logits[i] > place.logits[best.token]) best = {weigh(place, token), token, place_};
    }
  };
  for (size_t run = 0; run < runs; ++run)
    if (highest_[run] >= bound) see(run * kRun, (run + 1) * kRun);
  see(runs * kRun, vocab_size);
}

const Viterbi::Best& Viterbi::weigh_class(const Place& place, int32_t number) {
  Best& best = classes_[at(number)];
  const auto start = at(automaton_.class_starts[at(number)]), end = at(automaton_.class_starts[at(number) + 1]);
  if (looked_at_ != place_ && place.logits != nullptr && end - start >= kMany) weigh_highest(place);
  if (best.place == place_) return best;
  const int32_t token = place.logits == nullptr ? automaton_.class_tokens[start]
                                                : find_best(place.logits, automaton_.class_tokens.data() + start, end - start);
  return best = {weigh(place, token), token, place_};
}

const Viterbi::Best& Viterbi::weigh_group(const Place& place, int32_t group) {
  Best& best = groups_[at(group)];
  best = {kNever, -1, place_};
  const auto see = [&](double weight, int32_t token) {
    if (best.token < 0 || weight > best.weight || (weight == best.weight && token < best.token)) best = {weight, token, place_};
  };
  if (place.token >= 0) {
    for (const int32_t token : {place.token, place.other})
      if (automaton_.has_token(group, token)) see(weigh(place, token), token);
  } else if (automaton_.has_token(group, place.best)) {
    see(weigh(place, place.best), place.best);
  } else {
    for (int32_t member = automaton_.group_starts[at(group)]; member < automaton_.group_starts[at(group) + 1]; ++member) {
      const Best& found = weigh_class(place, automaton_.group_classes[at(member)]);
      see(found.weight, found.token);
    }
  }
  return best;
}

Viterbi::Step Viterbi::step_from(const Place& place, int32_t state) {
  const int32_t *const states = automaton_.edge_states.data(), *const groups = automaton_.edge_groups.data();
  const int32_t first = automaton_.edge_starts[at(state)], last = automaton_.edge_starts[at(state) + 1];
  const double* const ahead = ahead_.data();
  double* const weights = group_weights_.data();
  const auto weigh_edge = [&](int32_t edge) {
    double& weight = weights[groups[edge]];
    if (std::isnan(weight)) {
      if (ahead[states[edge]] == kNever) return kNever;
      weight = weigh_group(place, groups[edge]).weight;
    }
    return ahead[states[edge]] + weight;
  };
  // Without a branch on which edge is better, which nobody could predict. Equal ones are rare.
  double weight = kNever;
  int32_t best = -1, equals = 0;
  for (int32_t edge = first; edge < last; ++edge) {
    const double own = weigh_edge(edge);
    equals = own > weight ? 0 : equals + (own == weight ? 1 : 0);
    best = own > weight ? edge : best;
    weight = std::max(weight, own);
  }
  if (best < 0) return {kNever, -1, -1};
  if (equals > 0)
    for (int32_t edge = best + 1; edge < last; ++edge)
      if (weigh_edge(edge) == weight && groups_[at(groups[edge])].token < groups_[at(groups[best])].token) best = edge;
  return {weight, groups_[at(groups[best])].token, states[best]};
}

bool Viterbi::solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens) {
  const size_t length = places.size();
  ways_.meet(state, places);
  classes_.assign(at(automaton_.classes), {kNever, -1, -1});
  groups_.resize(at(automaton_.groups));
  looked_at_ = -1;
  ahead_.assign(at(automaton_.states), kNever);
  steps_.resize(std::max(steps_.size(), length));
  for (const int32_t end : ways_.before(length))
    if (ends[at(end)] != 0) ahead_[at(end)] = 0;
  for (size_t i = length; i-- > 0;) {
    place_ = static_cast<int32_t>(i);
    group_weights_.assign(at(automaton_.groups), std::numeric_limits<double>::quiet_NaN());
    const std::vector<int32_t>& met = ways_.before(i);
    std::vector<Step>& steps = steps_[i];
    steps.resize(met.size());
    for (size_t from = 0; from < met.size(); ++from) steps[from] = step_from(places[i], met[from]);
    for (const int32_t behind : ways_.before(i + 1)) ahead_[at(behind)] = kNever;
    for (size_t from = 0; from < met.size(); ++from) ahead_[at(met[from])] = steps[from].weight;
  }
  if (ahead_[at(state)] == kNever) return false;
  tokens.resize(length);
  for (size_t i = 0; i < length; ++i) {
    const std::vector<int32_t>& met = ways_.before(i);
    const Step& step = steps_[i][static_cast<size_t>(std::lower_bound(met.begin(), met.end(), state) - met.begin())];
    tokens[i] = step.token;
    state = step.next;
  }
  return true;
}

void Viterbi::find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& classes) {
  constexpr int32_t none = -2, several = -1;
  ways_.meet(state, places);
  classes.resize(places.size());
  leads_on_ = ends;
  std::vector<uint8_t> found;
  bool do_all = true;  // whether all states that are met behind the place lead on
  for (const int32_t end : ways_.before(places.size())) do_all = do_all && ends[at(end)] != 0;
  // Bytes may alias all else: what the inner loop reads is held here.
  const int32_t *const starts = automaton_.edge_starts.data(), *const states = automaton_.edge_states.data(),
                *const groups = automaton_.edge_groups.data(), *const group_starts = automaton_.group_starts.data();
  for (size_t i = places.size(); i-- > 0;) {
    ways_.look_at(places[i]);
    const std::vector<int32_t>& met = ways_.before(i);
    const bool is_free = places[i].token < 0;
    const uint8_t* const leads_on = leads_on_.data();
    int32_t only = none;
    const bool is_sure = is_free && do_all;  // that the states do which are met here: each has an edge
    found.assign(met.size(), 1);
    for (size_t from = 0; from < met.size() && !(is_sure && only == several); ++from) {
      uint8_t is_found = 0;
      for (int32_t edge = starts[met[from]], last = starts[met[from] + 1]; edge < last; ++edge) {
        const int32_t group = groups[edge];
        if (leads_on[states[edge]] == 0 || !(is_free || ways_.may_stand(group))) continue;
        is_found = 1;
        if (only == several) break;
        const bool is_one = group_starts[group + 1] == group_starts[group] + 1;
        const int32_t own = is_one ? automaton_.group_classes[at(group_starts[group])] : several;
        only = only == none || only == own ? own : several;
      }
      found[from] = is_found;
    }
    classes[i] = only;
    do_all = is_sure || std::find(found.begin(), found.end(), 0) == found.end();
    for (const int32_t behind : ways_.before(i + 1)) leads_on_[at(behind)] = 0;
    for (size_t from = 0; from < found.size(); ++from) leads_on_[at(met[from])] = found[from];
  }
}

}  // namespace dlm
