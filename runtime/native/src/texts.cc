#include "texts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace dlm {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr double kLeast = -1e30;  // of a token that the denoiser rules out: a text may need it all the same
constexpr double kCutOff = -1e6;  // added to what was cut: no text with more of it is as likely as one with less

size_t at(int32_t index) { return static_cast<size_t>(index); }

// The logarithm of a sum of exponentials that are added one by one, the largest known.
class LogSum {
 public:
  explicit LogSum(double largest) : largest_(largest) {}
  void add(double weight) {
    if (const double behind = weight - largest_; behind > -kNothing) sum_ += std::exp(behind);
  }
  double value() const { return largest_ == kNever ? kNever : largest_ + std::log(sum_); }

 private:
  static constexpr double kNothing = 60;  // behind which even 2^32 weights are lost in a double's rounding
  const double largest_;
  double sum_ = 0;
};

}  // namespace

// A token's logarithm of its weight at the place.
double Texts::weigh(int32_t token) const {
  if (place_->logits == nullptr) return 0;
  const float logit = place_->logits[token];
  const double weight = (static_cast<double>(logit) - best_) * slope_;
  return (weight > kLeast ? weight : kLeast) + (layer_->cut.keeps(logit, token) ? 0 : kCutOff);
}

double Texts::weigh_class(int32_t number) {
  Sum& sum = classes_[at(number)];
  if (sum.number == weighing_) return sum.weight;
  const auto first = automaton_.class_tokens.begin() + automaton_.class_starts[at(number)];
  const auto last = automaton_.class_tokens.begin() + automaton_.class_starts[at(number) + 1];
  sum = {std::log(static_cast<double>(last - first)), weighing_};
  if (place_->logits == nullptr) return sum.weight;
  if (!layer_->cut.is_one()) return sum.weight = weigh_whole(first, last);
  double largest = kNever;
  for (auto token = first; token != last; ++token) largest = std::max(largest, weigh(*token));
  LogSum total(largest);
  for (auto token = first; token != last; ++token) total.add(weigh(*token));
  return sum.weight = total.value();
}

// weigh_class where nothing is cut, so that the highest logit has the largest weight.
double Texts::weigh_whole(Tokens first, Tokens last) const {
  const float* const logits = place_->logits;
  float highest = -std::numeric_limits<float>::infinity();
  for (auto token = first; token != last; ++token) highest = std::max(highest, logits[*token]);
  const double most = static_cast<double>(highest), largest = std::max((most - best_) * slope_, kLeast);
  if (largest == kLeast) return largest + std::log(static_cast<double>(last - first));  // of those that are ruled out, all are alike
  LogSum total(0);
  for (auto token = first; token != last; ++token) total.add((static_cast<double>(logits[*token]) - most) * slope_);
  return largest + total.value();
}

double Texts::weigh_group(int32_t group) {
  Sum& sum = groups_[at(group)];
  if (sum.number == weighing_) return sum.weight;
  sum = {kNever, weighing_};
  if (place_->token >= 0) {
    if (automaton_.has_token(group, place_->token)) sum.weight = 0;
  } else {
    const auto first = automaton_.group_classes.begin() + automaton_.group_starts[at(group)];
    const auto last = automaton_.group_classes.begin() + automaton_.group_starts[at(group) + 1];
    double largest = kNever;
    for (auto number = first; number != last; ++number) largest = std::max(largest, weigh_class(*number));
    LogSum total(largest);
    for (auto number = first; number != last; ++number) total.add(weigh_class(*number));
    sum.weight = total.value();
  }
  if (sum.weight > kNever) layer_->groups.push_back({group, sum.weight});
  return sum.weight;
}

void Texts::weigh_place(size_t place) {
  ++weighing_;
  place_ = &places_[place];
  layer_ = &layers_[place];
  slope_ = std::min(1 / sampling_.temperature, 1e300);
  best_ = place_->logits == nullptr ? 0 : static_cast<double>(place_->logits[place_->best]);
}

bool Texts::sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, const Sampling& sampling) {
  state_ = state, places_ = places, sampling_ = sampling;
  ways_.meet(state, places);
  weighing_ = 0;
  classes_.assign(at(automaton_.classes), {kNever, 0});
  groups_.assign(at(automaton_.groups), {kNever, 0});
  ahead_.assign(at(automaton_.states), kNever);
  layers_.resize(places.size() + 1);
  Layer& last = layers_.back();
  last.ahead.clear();
  for (const int32_t end : ways_.before(places.size())) {
    ahead_[at(end)] = ends[at(end)] != 0 ? 0 : kNever;
    last.ahead.push_back(ahead_[at(end)]);
  }
  const bool is_cut = sampling.top_k > 0 || sampling.top_p < 1;
  for (size_t i = places.size(); i-- > 0;) {
    weigh_place(i);
    Layer& layer = *layer_;
    layer.ahead.clear(), layer.groups.clear();
    layer.cut = {};
    if (is_cut && place_->token < 0 && place_->logits != nullptr)
      layer.cut = sampler_.find_cut(place_->logits, automaton_.vocab_size, left_out_, sampling);
    for (const int32_t from : ways_.before(i)) {
      terms_.clear();
      double largest = kNever;
      for (int32_t edge = automaton_.edge_starts[at(from)]; edge < automaton_.edge_starts[at(from) + 1]; ++edge) {
        const double ahead = ahead_[at(automaton_.edge_states[at(edge)])];
        if (ahead == kNever) continue;
        terms_.push_back(ahead + weigh_group(automaton_.edge_groups[at(edge)]));
        largest = std::max(largest, terms_.back());
      }
      LogSum total(largest);
      for (const double term : terms_) total.add(term);
      layer.ahead.push_back(total.value());
    }
    for (const int32_t behind : ways_.before(i + 1)) ahead_[at(behind)] = kNever;
    for (size_t from = 0; from < layer.ahead.size(); ++from) ahead_[at(ways_.before(i)[from])] = layer.ahead[from];
  }
  return layers_.front().ahead.front() > kNever;
}

template <class See>
void Texts::each_token(int32_t group, See see) const {
  for (int32_t member = automaton_.group_starts[at(group)]; member < automaton_.group_starts[at(group) + 1]; ++member) {
    const int32_t number = automaton_.group_classes[at(member)];
    for (int32_t i = automaton_.class_starts[at(number)]; i < automaton_.class_starts[at(number) + 1]; ++i)
      see(automaton_.class_tokens[at(i)]);
  }
}

// On all edges of a state, as often as they stand there.
int64_t Texts::count_tokens(int32_t state) const {
  int64_t count = 0;
  for (int32_t edge = automaton_.edge_starts[at(state)]; edge < automaton_.edge_starts[at(state) + 1]; ++edge) {
    const int32_t group = automaton_.edge_groups[at(edge)];
    for (int32_t member = automaton_.group_starts[at(group)]; member < automaton_.group_starts[at(group) + 1]; ++member) {
      const int32_t number = automaton_.group_classes[at(member)];
      count += automaton_.class_starts[at(number) + 1] - automaton_.class_starts[at(number)];
    }
  }
  return count;
}

void Texts::draw(const DrawKey& key, std::vector<int32_t>& tokens) {
  // The most likely token has a share of one in V at least.
  const double farthest = kFarthest + std::log(static_cast<double>(automaton_.vocab_size));
  int32_t state = state_;
  tokens.clear();
  for (size_t i = 0; i < places_.size(); ++i) {
    weigh_place(i);
    const std::vector<int32_t>&met = ways_.before(i), &behind = ways_.before(i + 1);
    for (size_t to = 0; to < behind.size(); ++to) ahead_[at(behind[to])] = layers_[i + 1].ahead[to];
    const double all = layer_->ahead[static_cast<size_t>(std::lower_bound(met.begin(), met.end(), state) - met.begin())];
    Winner winner({key.seed, key.step, key.position + static_cast<uint32_t>(i)});
    if (place_->token < 0 && count_tokens(state) > automaton_.vocab_size / 2) winner.prepare(automaton_.vocab_size, spare_);
    for (int32_t edge = automaton_.edge_starts[at(state)]; place_->token < 0 && edge < automaton_.edge_starts[at(state) + 1]; ++edge) {
      const double ahead = ahead_[at(automaton_.edge_states[at(edge)])] - all;
      if (ahead > kNever)
        each_token(automaton_.edge_groups[at(edge)], [&](int32_t token) {
          const double weight = weigh(token) + ahead;
          if (weight > -farthest) winner.see(token, weight);
        });
    }
    tokens.push_back(place_->token < 0 ? winner.token() : place_->token);
    int32_t edge = automaton_.edge_starts[at(state)];
    while (ahead_[at(automaton_.edge_states[at(edge)])] == kNever || !automaton_.has_token(automaton_.edge_groups[at(edge)], tokens.back()))
      ++edge;
    state = automaton_.edge_states[at(edge)];
    for (const int32_t to : behind) ahead_[at(to)] = kNever;
  }
}

// Shares out how likely a state is, all ways on from which are `all` together, to its edges' groups and the states behind them.
void Texts::spread(double mass, int32_t state, double all) {
  const int32_t first = automaton_.edge_starts[at(state)], last = automaton_.edge_starts[at(state) + 1];
  terms_.clear();
  double total = 0;
  for (int32_t edge = first; edge < last; ++edge) {
    const double ahead = ahead_[at(automaton_.edge_states[at(edge)])];
    const Sum& group = groups_[at(automaton_.edge_groups[at(edge)])];
    terms_.push_back(ahead == kNever || group.number != weighing_ ? 0 : std::exp(ahead + group.weight - all));
    total += terms_.back();
  }
  for (int32_t edge = first; edge < last; ++edge) {
    const double share = mass * terms_[at(edge - first)] / total;
    mass_behind_[at(automaton_.edge_states[at(edge)])] += share;
    group_mass_[at(automaton_.edge_groups[at(edge)])] += share;
  }
}

void Texts::find_marginals(const std::vector<int32_t>& tokens, bool with_all, std::vector<Marginal>& marginals) {
  marginals.clear();
  mass_.assign(at(automaton_.states), 0);
  mass_behind_.assign(at(automaton_.states), 0);
  group_mass_.assign(at(automaton_.groups), 0);
  class_mass_.assign(at(automaton_.classes), 0);
  mass_[at(state_)] = 1;
  for (size_t i = 0; i < places_.size(); ++i) {
    weigh_place(i);
    for (const Weighed& group : layer_->groups) groups_[at(group.group)] = {group.weight, weighing_};
    const std::vector<int32_t>&met = ways_.before(i), &behind = ways_.before(i + 1);
    for (size_t to = 0; to < behind.size(); ++to) ahead_[at(behind[to])] = layers_[i + 1].ahead[to];
    for (size_t from = 0; from < met.size(); ++from)
      if (const double mass = std::exchange(mass_[at(met[from])], 0); mass > 0) spread(mass, met[from], layer_->ahead[from]);
    for (const int32_t to : behind) ahead_[at(to)] = kNever;
    mass_.swap(mass_behind_);
    marginals.push_back(marginal(tokens[i], with_all && place_->token < 0));
    for (const Weighed& group : layer_->groups) group_mass_[at(group.group)] = 0;
  }
}

Marginal Texts::marginal(int32_t token, bool with_all) {
  Marginal found{0, 0, 0};
  for (const Weighed& group : layer_->groups)
    if (automaton_.has_token(group.group, token))
      found.prob += group_mass_[at(group.group)] * std::exp((place_->token < 0 ? weigh(token) : 0) - group.weight);
  if (!with_all) return found;
  for (const Weighed& group : layer_->groups)
    for (int32_t member = automaton_.group_starts[at(group.group)]; member < automaton_.group_starts[at(group.group) + 1]; ++member) {
      const int32_t number = automaton_.group_classes[at(member)];
      class_mass_[at(number)] += group_mass_[at(group.group)] * std::exp(weigh_class(number) - group.weight);
    }
  double best = 0, second = 0;
  for (size_t number = 0; number < class_mass_.size(); ++number) {
    const double mass = std::exchange(class_mass_[number], 0);
    if (mass == 0) continue;
    const double sum = weigh_class(static_cast<int32_t>(number));
    for (int32_t i = automaton_.class_starts[number]; i < automaton_.class_starts[number + 1]; ++i) {
      const double prob = mass * std::exp(weigh(automaton_.class_tokens[at(i)]) - sum);
      if (prob > 0) found.entropy += prob * std::log(prob);
      if (prob > best) second = std::exchange(best, prob);
      else second = std::max(second, prob);
    }
  }
  found.margin = best - second;
  return found;
}

}  // namespace dlm
