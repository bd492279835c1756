#include "constraints/viterbi.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "decode/exact_sum.h"

namespace dlm {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr double kUnknown = std::numeric_limits<double>::infinity();
constexpr float kNone = -std::numeric_limits<float>::infinity();
// find_best() computes this many maxima side by side, so that the processor loads several logits at
// a time.
constexpr size_t kLanes = 8;
// A run consists of this many neighbouring tokens. highest_ contains the highest logit of each run.
constexpr size_t kRun = 32;
// weigh_highest() divides a row into this many sections. It reads only the logits that are not
// below a bound, and chooses the bound so that each section contains at least one such logit.
constexpr size_t kSections = 16;
// best_of_class() itself reads at most 1 / kMany of a row's logits. If it needs more logits, it
// calls weigh_highest().
constexpr size_t kMany = 16;

// Returns the weight of a token. The weight is -inf if the denoiser rules out the token.
double weigh(const Place& place, int32_t token) {
  if (place.logits == nullptr) return place.best < 0 || token == place.best ? 0 : -1;
  if (is_ruled_out(place.logits[token])) return kNever;
  return static_cast<double>(place.logits[token]) - static_cast<double>(place.base());
}

ExactWeight weigh_exactly(const Place& place, int32_t token) {
  if (place.logits == nullptr)
    return {0, ExactSum(place.best < 0 || token == place.best ? 0.0f : -1.0f)};
  if (is_ruled_out(place.logits[token])) return {ExactWeight::kRuledOut, {}};
  return {0, ExactSum(place.logits[token]) - ExactSum(place.base())};
}

// Returns true if `token` is better than `other` at a place. The token with the higher logit is
// better. If the logits are equal, the token with the lower id is better. The function compares
// logits, because rounding can give different logits the same weight.
bool is_better(const Place& place, int32_t token, int32_t other) {
  if (place.logits != nullptr)
    return place.logits[token] > place.logits[other] ||
           (place.logits[token] == place.logits[other] && token < other);
  const double weight = weigh(place, token), other_weight = weigh(place, other);
  return weight > other_weight || (weight == other_weight && token < other);
}

// Returns the maximum of a run of logits. The code compares four logits at a time. C++ compilers
// often do not vectorise std::max in this way, because they must handle NaN as std::max does.
float max_of_run(const float* logits) {
  using Four = float __attribute__((vector_size(16)));
  constexpr size_t kFours = kRun / 4;
  Four all[kFours];
  std::memcpy(all, logits, sizeof all);
  for (size_t half = kFours / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) all[i] = all[i + half] > all[i] ? all[i + half] : all[i];
  const float first = all[0][1] > all[0][0] ? all[0][1] : all[0][0],
              last = all[0][3] > all[0][2] ? all[0][3] : all[0][2];
  return last > first ? last : first;
}

void fetch_run(const float* logits) {
  constexpr size_t kLine = 64 / sizeof(float);
  for (size_t i = 0; i < kRun; i += kLine) __builtin_prefetch(logits + i);
}

// Returns the first token that has the highest logit. If every logit is -inf, returns the first
// token.
int32_t find_best(const float* logits, const View<int32_t>& tokens) {
  // The function searches the row in parts of this many tokens. Then it searches the part with the
  // highest logit again.
  constexpr size_t kStretch = 32 * kLanes;
  float highest = kNone;
  size_t found = 0;
  for (size_t start = 0; start < tokens.size; start += kStretch) {
    const size_t end = std::min(start + kStretch, tokens.size);
    float lanes[kLanes] = {kNone, kNone, kNone, kNone, kNone, kNone, kNone, kNone};
    size_t i = start;
    for (; i + kLanes <= end; i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const float logit = logits[tokens[i + lane]];
        lanes[lane] = logit > lanes[lane] ? logit : lanes[lane];
      }
    for (; i < end; ++i) lanes[0] = std::max(lanes[0], logits[tokens[i]]);
    const float best = *std::max_element(lanes, lanes + kLanes);
    if (best > highest) highest = best, found = start;
  }
  while (highest > kNone && logits[tokens[found]] != highest) ++found;
  return tokens[found];
}

}  // namespace

// Finds the tokens with the highest logits at a place. For each class that contains at least one of
// these tokens, stores the best of these tokens in classes_. Each stored token is also the best
// token of its whole class.
void Viterbi::weigh_highest(const Place& place) {
  looked_at_ = place_;
  const auto vocab_size = static_cast<size_t>(automaton_.vocab_size), runs = vocab_size / kRun;
  if (runs < kSections) return;
  highest_.resize(runs);
  float bound = std::numeric_limits<float>::infinity();
  for (size_t section = 0; section < kSections; ++section) {
    float best = kNone;
    for (size_t run = section * runs / kSections; run < (section + 1) * runs / kSections; ++run) {
      highest_[run] = max_of_run(place.logits + run * kRun);
      best = std::max(best, highest_[run]);
    }
    bound = std::min(bound, best);
  }
  if (!(bound > kNone)) return;
  const auto see = [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      if (!(place.logits[i] >= bound) || automaton_.token_class[i] < 0) continue;
      Best& best = classes_[automaton_.token_class[i]];
      const auto token = static_cast<int32_t>(i);
      if (best.place != place_ || place.logits[i] > place.logits[best.token])
        best = {token, place_};
    }
  };
  for (size_t run = 0; run < runs; ++run)
    if (highest_[run] >= bound) see(run * kRun, (run + 1) * kRun);
  see(runs * kRun, vocab_size);
}

int32_t Viterbi::best_of_class(const Place& place, int32_t number) {
  Best& best = classes_[number];
  if (best.place == place_) return best.token;
  const View<int32_t> tokens = automaton_.tokens_of(number);
  if (place.logits != nullptr && looked_at_ != place_ &&
      (looked_up_ += tokens.size) * kMany > static_cast<size_t>(automaton_.vocab_size)) {
    weigh_highest(place);
    if (best.place == place_) return best.token;
  }
  const int32_t token = place.logits == nullptr ? tokens[0] : find_best(place.logits, tokens);
  best = {token, place_};
  return token;
}

int32_t Viterbi::best_of_group(const Place& place, int32_t group) {
  int32_t best = -1;
  const auto see = [&](int32_t token) {
    if (best < 0 || is_better(place, token, best)) best = token;
  };
  if (place.token >= 0) {
    for (const int32_t token : {place.token, place.other})
      if (automaton_.has_token(group, token)) see(token);
  } else if (automaton_.has_token(group, place.best)) {
    see(place.best);
  } else {
    for (const int32_t number : automaton_.classes_of(group)) see(best_of_class(place, number));
  }
  return best;
}

void Viterbi::weigh_edges(const Place& place, int32_t state, Layer& layer) {
  for (const auto [to, group] : automaton_.edges(state)) {
    if (weights_[group] != kUnknown || ahead_[to] == kNever) continue;
    const int32_t token = best_of_group(place, group);
    weights_[group] = token < 0 ? kNever : weigh(place, token);
    layer.groups.push_back({group, token, weights_[group]});
  }
}

bool Viterbi::solve(int32_t state, const std::vector<Place>& places,
                    const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens) {
  const size_t length = places.size();
  ways_.meet(state, places);
  classes_.assign(automaton_.classes, {-1, -1});
  weights_.assign(automaton_.groups, kUnknown);
  tokens_.resize(automaton_.groups);
  ahead_.assign(automaton_.states, kNever);
  layers_.resize(std::max(layers_.size(), length + 1));
  looked_at_ = -1;
  layers_[length].ahead.clear();
  for (const int32_t end : ways_.before(length)) {
    ahead_[end] = ends[end] != 0 ? 0 : kNever;
    layers_[length].ahead.push_back(ahead_[end]);
  }
  const int32_t *const starts = automaton_.edge_starts.data(),
                       *const states = automaton_.edge_states.data(),
                       *const groups = automaton_.edge_groups.data();
  const double *const ahead = ahead_.data(), *const weights = weights_.data();
  // The sum of -inf and inf is NaN. Comparisons with NaN are false, so an edge with such a sum is
  // never the best.
  const auto best_of = [=](int32_t from) {
    double best = kNever;
    for (int32_t edge = starts[from], last = starts[from + 1]; edge < last; ++edge) {
      const double own = ahead[states[edge]] + weights[groups[edge]];
      best = own > best ? own : best;
    }
    return best;
  };
  for (size_t i = length; i-- > 0;) {
    place_ = static_cast<int32_t>(i);
    looked_up_ = 0;
    Layer& layer = layers_[i];
    const std::vector<int32_t>& met = ways_.before(i);
    layer.ahead.resize(met.size());
    layer.groups.clear();
    // While the loop visits the states of this place, it prefetches the logits of the preceding
    // place.
    const float* const next = looked_at_ == place_ + 1 && i > 0 ? places[i - 1].logits : nullptr;
    for (size_t from = 0; from < met.size(); ++from) {
      if (next != nullptr && (from + 1) * kRun <= static_cast<size_t>(automaton_.vocab_size))
        fetch_run(next + from * kRun);
      double best = best_of(met[from]);
      if (best == kUnknown) {
        weigh_edges(places[i], met[from], layer);
        best = best_of(met[from]);
      }
      layer.ahead[from] = best;
    }
    for (const Weighed& group : layer.groups) weights_[group.group] = kUnknown;
    for (const int32_t behind : ways_.before(i + 1)) ahead_[behind] = kNever;
    for (size_t from = 0; from < met.size(); ++from) ahead_[met[from]] = layer.ahead[from];
  }
  const double best = std::exchange(ahead_[state], kNever);
  if (!(std::fabs(best) < kLargestRounded)) return solve_exactly(state, places, ends, tokens);
  tokens.resize(length);
  for (size_t i = 0; i < length; ++i) state = find_step(i, state, tokens[i]);
  return true;
}

// Does the same as solve(), but with exact sums. solve() calls this function if every text contains
// a ruled-out token, or if logits are too far apart for sums in double.
bool Viterbi::solve_exactly(int32_t state, const std::vector<Place>& places,
                            const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens) {
  struct Step {
    // The best next token, and the state after this token. Both are -1 if the text cannot continue.
    int32_t token, state;
  };
  const size_t length = places.size();
  // For each place: one step for each state of ways_.before(place).
  std::vector<std::vector<Step>> steps(length);
  std::vector<ExactWeight> ahead(automaton_.states, ExactWeight::never()),
      weights(automaton_.groups), found;
  std::vector<int32_t> weighed_at(automaton_.groups, -1);
  for (const int32_t end : ways_.before(length))
    if (ends[end] != 0) ahead[end] = {};
  for (size_t i = length; i-- > 0;) {
    place_ = static_cast<int32_t>(i);
    looked_up_ = 0;
    found.clear();
    for (const int32_t from : ways_.before(i)) {
      ExactWeight best = ExactWeight::never();
      Step step{-1, -1};
      for (const auto [to, group] : automaton_.edges(from)) {
        if (ahead[to].is_never()) continue;
        if (std::exchange(weighed_at[group], place_) != place_) {
          tokens_[group] = best_of_group(places[i], group);
          if (tokens_[group] >= 0) weights[group] = weigh_exactly(places[i], tokens_[group]);
        }
        if (tokens_[group] < 0) continue;
        const ExactWeight own = ahead[to] + weights[group];
        if (step.token < 0 || best < own || (own == best && tokens_[group] < step.token))
          best = own, step = {tokens_[group], to};
      }
      found.push_back(best);
      steps[i].push_back(step);
    }
    for (const int32_t after : ways_.before(i + 1)) ahead[after] = ExactWeight::never();
    for (size_t from = 0; from < found.size(); ++from) ahead[ways_.before(i)[from]] = found[from];
  }
  if (ahead[state].is_never()) return false;
  tokens.resize(length);
  for (size_t i = 0; i < length; ++i) {
    const std::vector<int32_t>& met = ways_.before(i);
    const Step& step = steps[i][std::lower_bound(met.begin(), met.end(), state) - met.begin()];
    tokens[i] = step.token, state = step.state;
  }
  return true;
}

// Returns the state after the first step of the best path, and sets `token` to the token of this
// step. If several paths are equally good, takes the path whose next token has the lowest id.
int32_t Viterbi::find_step(size_t place, int32_t state, int32_t& token) {
  const std::vector<Weighed>& groups = layers_[place].groups;
  const std::vector<int32_t>& behind = ways_.before(place + 1);
  for (const Weighed& group : groups)
    weights_[group.group] = group.weight, tokens_[group.group] = group.token;
  for (size_t to = 0; to < behind.size(); ++to) ahead_[behind[to]] = layers_[place + 1].ahead[to];
  double best = kNever;
  int32_t next = -1;
  for (const auto [to, group] : automaton_.edges(state)) {
    const double own = ahead_[to] + weights_[group];
    if (own > best || (own == best && own > kNever && tokens_[group] < token))
      best = own, next = to, token = tokens_[group];
  }
  for (const int32_t to : behind) ahead_[to] = kNever;
  for (const Weighed& group : groups) weights_[group.group] = kUnknown;
  return next;
}

void Viterbi::find_only(int32_t state, const std::vector<Place>& places,
                        const std::vector<uint8_t>& ends, std::vector<int32_t>& classes) {
  constexpr int32_t none = -2, several = -1;
  ways_.meet(state, places);
  classes.resize(places.size());
  leads_on_ = ends;
  std::vector<uint8_t> found;
  // True if an end can be reached from every visited state after the current place.
  bool do_all = true;
  for (const int32_t end : ways_.before(places.size())) do_all = do_all && ends[end] != 0;
  // The C++ compiler must assume that a write through a uint8_t pointer can change any object,
  // including the automaton's vectors. With local copies of their pointers, the inner loop does not
  // reload the pointers.
  const int32_t *const starts = automaton_.edge_starts.data(),
                       *const states = automaton_.edge_states.data(),
                       *const groups = automaton_.edge_groups.data(),
                       *const group_starts = automaton_.group_starts.data();
  for (size_t i = places.size(); i-- > 0;) {
    ways_.look_at(places[i]);
    const std::vector<int32_t>& met = ways_.before(i);
    const bool is_free = places[i].token < 0;
    const uint8_t* const leads_on = leads_on_.data();
    int32_t only = none;
    // If all tokens are allowed, every state before this place has an edge to a state after this
    // place. If the text can also reach an end from all states after this place, it can reach an
    // end from all states before this place.
    const bool is_sure = is_free && do_all;
    found.assign(met.size(), 1);
    for (size_t from = 0; from < met.size() && !(is_sure && only == several); ++from) {
      uint8_t is_found = 0;
      for (int32_t edge = starts[met[from]], last = starts[met[from] + 1]; edge < last; ++edge) {
        const int32_t group = groups[edge];
        if (leads_on[states[edge]] == 0 || !(is_free || ways_.may_stand(group))) continue;
        is_found = 1;
        if (only == several) break;
        const bool is_one = group_starts[group + 1] == group_starts[group] + 1;
        const int32_t own = is_one ? automaton_.group_classes[group_starts[group]] : several;
        only = only == none || only == own ? own : several;
      }
      found[from] = is_found;
    }
    classes[i] = only;
    do_all = is_sure || std::find(found.begin(), found.end(), 0) == found.end();
    for (const int32_t behind : ways_.before(i + 1)) leads_on_[behind] = 0;
    for (size_t from = 0; from < found.size(); ++from) leads_on_[met[from]] = found[from];
  }
}

}  // namespace dlm
