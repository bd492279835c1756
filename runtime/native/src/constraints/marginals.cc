#include "constraints/marginals.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/gumbel.h"

namespace dlm {
namespace {

// Replaces `largest` by `other` if `other` is larger.
template <class Weight>
void raise(Weight& largest, const Weight& other, double slope) {
  if (!other.is_never() && (largest.is_never() || other.ratio(largest, slope) > 0)) largest = other;
}

}  // namespace

// Adds up the weights of texts. The constructor gets the largest of these weights.
template <class Weight>
class TextSums<Weight>::Total {
 public:
  Total(const Weight& largest, double slope) : largest_(largest), slope_(slope) {}
  void add(const Weight& weight) { add_ratio(weight.ratio(largest_, slope_)); }
  // Adds the weight w for which `ratio` is log(w / largest weight).
  void add_ratio(double ratio) {
    if (!(ratio > -kNothing)) return;
    const double share = std::exp(ratio);
    sum_ += share;
    product_ += share * ratio;
    ones_ += share < 1 ? 0 : 1;
    second_ = share < 1 && share > second_ ? share : second_;
  }
  Weight value() const { return largest_.is_never() ? largest_ : largest_.times(std::log(sum_)); }
  Sum sum() const { return {value(), 0, sum_, ones_ > 1 ? 1 : second_, product_}; }

 private:
  // The sum leaves out weights whose ratio is below -kNothing. Even 2^32 such weights together are
  // too small to change the rounded sum.
  static constexpr double kNothing = 60;
  const Weight largest_;
  const double slope_;
  double sum_ = 0, second_ = 0, product_ = 0;
  int32_t ones_ = 0;  // the number of weights that equal the largest weight
};

// Returns the weight of a token at the current place.
template <class Weight>
Weight TextSums<Weight>::weigh(int32_t token) const {
  if (place_->logits == nullptr) return Weight::one();
  const float logit = place_->logits[token];
  return Weight::of(logit, base_, !layer_->cut.keeps(logit, token), slope_);
}

template <class Weight>
const typename TextSums<Weight>::Sum& TextSums<Weight>::weigh_class(int32_t number) {
  Sum& sum = classes_[number];
  if (sum.number == weighing_) return sum;
  sum = sum_of(automaton_.tokens_of(number));
  sum.number = weighing_;
  layer_->classes.push_back({number, sum});
  return sum;
}

// Returns the sum of the weights of the tokens of a class.
template <class Weight>
typename TextSums<Weight>::Sum TextSums<Weight>::sum_of(const View<int32_t>& tokens) const {
  if (place_->logits == nullptr) return sum_of_equal(Weight::one(), tokens.size);
  if (!layer_->cut.is_one()) return sum_of_whole(tokens);
  Weight largest;
  for (const int32_t token : tokens) raise(largest, weigh(token), slope_);
  Total total(largest, slope_);
  for (const int32_t token : tokens) total.add(weigh(token));
  return total.sum();
}

// Does the same as sum_of(), but for a class without cut tokens. In such a class, the token with
// the highest logit has the largest weight.
template <class Weight>
typename TextSums<Weight>::Sum TextSums<Weight>::sum_of_whole(const View<int32_t>& tokens) const {
  const float* const logits = place_->logits;
  float highest = -std::numeric_limits<float>::infinity();
  for (const int32_t token : tokens) highest = std::max(highest, logits[token]);
  const Weight largest = Weight::of(highest, base_, false, slope_);
  if (is_ruled_out(highest)) return sum_of_equal(largest, tokens.size);  // all are ruled out
  Total total(largest, slope_);
  for (const int32_t token : tokens)
    total.add_ratio((static_cast<double>(logits[token]) - static_cast<double>(highest)) * slope_);
  return total.sum();
}

// Returns the sum of `count` equal weights.
template <class Weight>
typename TextSums<Weight>::Sum TextSums<Weight>::sum_of_equal(const Weight& weight, size_t count) {
  const auto total = static_cast<double>(count);
  return {weight.times(std::log(total)), 0, total, count > 1 ? 1.0 : 0.0, 0};
}

template <class Weight>
Weight TextSums<Weight>::weigh_group(int32_t group) {
  Sum& sum = groups_[group];
  if (sum.number == weighing_) return sum.weight;
  sum = {};
  sum.number = weighing_;
  if (place_->token >= 0) {
    if (automaton_.has_token(group, place_->token)) sum.weight = Weight::one();
  } else {
    const View<int32_t> classes = automaton_.classes_of(group);
    Weight largest;
    for (const int32_t number : classes) raise(largest, weigh_class(number).weight, slope_);
    Total total(largest, slope_);
    for (const int32_t number : classes) total.add(weigh_class(number).weight);
    sum.weight = total.value();
  }
  if (!sum.weight.is_never()) layer_->groups.push_back({group, sum.weight});
  return sum.weight;
}

template <class Weight>
void TextSums<Weight>::weigh_place(size_t place) {
  ++weighing_;
  place_ = &places_[place];
  layer_ = &layers_[place];
  // At tiny temperatures, 1 / temperature is infinite, and infinity times 0 is NaN. So the code
  // limits slope_.
  slope_ = std::min(1 / sampling_.temperature, 1e300);
  base_ = place_->logits == nullptr ? 0 : place_->base();
}

template <class Weight>
bool TextSums<Weight>::sum(int32_t state, const std::vector<Place>& places,
                           const std::vector<uint8_t>& ends, const Sampling& sampling, Ways& ways,
                           Sampler& sampler) {
  state_ = state, places_ = places, sampling_ = sampling;
  weighing_ = 0;
  classes_.assign(automaton_.classes, {});
  groups_.assign(automaton_.groups, {});
  ahead_.assign(automaton_.states, Weight());
  layers_.resize(places.size() + 1);
  Layer& last = layers_.back();
  last.ahead.clear();
  for (const int32_t end : ways.before(places.size())) {
    ahead_[end] = ends[end] != 0 ? Weight::one() : Weight();
    last.ahead.push_back(ahead_[end]);
  }
  const bool is_cut = sampling.top_k > 0 || sampling.top_p < 1;
  for (size_t i = places.size(); i-- > 0;) {
    weigh_place(i);
    Layer& layer = *layer_;
    layer.ahead.clear(), layer.groups.clear(), layer.classes.clear();
    layer.cut = {};
    if (is_cut && place_->token < 0 && place_->logits != nullptr)
      layer.cut = sampler.find_cut(place_->logits, automaton_.vocab_size, left_out_, sampling);
    for (const int32_t from : ways.before(i)) {
      terms_.clear();
      Weight largest;
      for (const auto [to, group] : automaton_.edges(from)) {
        if (ahead_[to].is_never()) continue;
        terms_.push_back(ahead_[to].times(weigh_group(group)));
        raise(largest, terms_.back(), slope_);
      }
      Total total(largest, slope_);
      for (const Weight& term : terms_) total.add(term);
      layer.ahead.push_back(total.value());
    }
    clear_ahead(ways, i + 1);
    for (size_t from = 0; from < layer.ahead.size(); ++from)
      ahead_[ways.before(i)[from]] = layer.ahead[from];
  }
  ahead_[state] = Weight();
  return !total().is_never();
}

// Sets ahead_ for all states before the given place to the weights that sum() stored. clear_ahead()
// resets ahead_.
template <class Weight>
void TextSums<Weight>::restore_ahead(const Ways& ways, size_t place) {
  const std::vector<int32_t>& met = ways.before(place);
  for (size_t to = 0; to < met.size(); ++to) ahead_[met[to]] = layers_[place].ahead[to];
}

template <class Weight>
void TextSums<Weight>::clear_ahead(const Ways& ways, size_t place) {
  for (const int32_t to : ways.before(place)) ahead_[to] = Weight();
}

// Returns the number of tokens on all edges of a state. A token on several edges counts once for
// each edge.
template <class Weight>
size_t TextSums<Weight>::count_tokens(int32_t state) const {
  size_t count = 0;
  for (const auto [to, group] : automaton_.edges(state))
    for (const int32_t number : automaton_.classes_of(group))
      count += automaton_.tokens_of(number).size;
  return count;
}

// Draws the token at the current place (position of the text). `all` is the sum of the weights of
// all paths from `state`. The probability of a token is the total weight of the paths that start
// with this token, divided by `all`.
template <class Weight>
int32_t TextSums<Weight>::draw_token(int32_t state, const Weight& all, const DrawKey& key) {
  if (place_->token >= 0) return place_->token;
  // The most likely token has a probability of at least 1 / V, where V is the size of the
  // vocabulary. Tokens that are much less likely cannot win the draw (see kFarthest).
  const double farthest = kFarthest + std::log(static_cast<double>(automaton_.vocab_size));
  Winner winner(key);
  if (count_tokens(state) > static_cast<size_t>(automaton_.vocab_size / 2))
    winner.prepare(automaton_.vocab_size, spare_);
  for (const auto [to, group] : automaton_.edges(state)) {
    if (ahead_[to].is_never()) continue;
    for (const int32_t number : automaton_.classes_of(group))
      for (const int32_t token : automaton_.tokens_of(number)) {
        const double share = weigh(token).times(ahead_[to]).ratio(all, slope_);
        if (share > -farthest) winner.see(token, share);
      }
  }
  return winner.token();
}

// Returns the state after a token. Throws an error if no end of a text can be reached from this
// state.
template <class Weight>
int32_t TextSums<Weight>::next_state(int32_t state, int32_t token) const {
  const int32_t next = automaton_.next(state, token);
  if (next < 0 || ahead_[next].is_never())
    fail(DLM_INTERNAL, "the constraint does not allow token %d, which was drawn", token);
  return next;
}

template <class Weight>
void TextSums<Weight>::draw(const DrawKey& key, const Ways& ways, std::vector<int32_t>& tokens) {
  int32_t state = state_;
  tokens.clear();
  for (size_t i = 0; i < places_.size(); ++i) {
    weigh_place(i);
    restore_ahead(ways, i + 1);
    const std::vector<int32_t>& met = ways.before(i);
    const Weight& all =
        layer_->ahead[std::lower_bound(met.begin(), met.end(), state) - met.begin()];
    tokens.push_back(
        draw_token(state, all, {key.seed, key.step, key.position + static_cast<uint32_t>(i)}));
    state = next_state(state, tokens.back());
    clear_ahead(ways, i + 1);
  }
}

// Distributes the probability `mass` of a state over the state's edges. Adds the share of each edge
// to the probability of the edge's group, and to the probability of the edge's next state. `all` is
// the sum of the weights of all paths from the state.
template <class Weight>
void TextSums<Weight>::spread(double mass, int32_t state, const Weight& all) {
  shares_.clear();
  double total = 0;
  for (const auto [to, group] : automaton_.edges(state)) {
    const Sum& sum = groups_[group];
    shares_.push_back(ahead_[to].is_never() || sum.number != weighing_
                          ? 0
                          : std::exp(ahead_[to].times(sum.weight).ratio(all, slope_)));
    total += shares_.back();
  }
  auto own = shares_.begin();
  for (const auto [to, group] : automaton_.edges(state)) {
    const double share = mass * *own++ / total;
    mass_behind_[to] += share;
    group_mass_[group] += share;
  }
}

// Visits the places (positions of the text) from the first to the last. For each place, computes
// the probabilities of the groups at this place (group_mass_), and the probabilities of the states
// after this place (mass_). Then calls see(place).
template <class Weight>
template <class See>
void TextSums<Weight>::each_place(const Ways& ways, See see) {
  mass_.assign(automaton_.states, 0);
  mass_behind_.assign(automaton_.states, 0);
  group_mass_.assign(automaton_.groups, 0);
  class_mass_.assign(automaton_.classes, 0);
  mass_[state_] = 1;
  for (size_t i = 0; i < places_.size(); ++i) {
    weigh_place(i);
    for (const Weighed& group : layer_->groups)
      groups_[group.group].weight = group.weight, groups_[group.group].number = weighing_;
    restore_ahead(ways, i + 1);
    const std::vector<int32_t>& met = ways.before(i);
    for (size_t from = 0; from < met.size(); ++from)
      if (const double mass = std::exchange(mass_[met[from]], 0); mass > 0)
        spread(mass, met[from], layer_->ahead[from]);
    clear_ahead(ways, i + 1);
    mass_.swap(mass_behind_);
    see(i);
    for (const Weighed& group : layer_->groups) group_mass_[group.group] = 0;
  }
}

template <class Weight>
void TextSums<Weight>::find_marginals(const std::vector<int32_t>& tokens, bool with_all,
                                      const Ways& ways, std::vector<Marginal>& marginals) {
  marginals.clear();
  each_place(ways, [&](size_t place) {
    marginals.push_back(marginal(tokens[place], with_all && place_->token < 0));
  });
}

template <class Weight>
void TextSums<Weight>::find_visits(const Ways& ways, std::vector<double>& visits,
                                   std::vector<double>& last) {
  visits.assign(automaton_.states, 0);
  each_place(ways, [&](size_t place) {
    for (const int32_t state : ways.before(place + 1)) visits[state] += mass_[state];
  });
  last = mass_;
}

template <class Weight>
Marginal TextSums<Weight>::marginal(int32_t token, bool with_all) {
  Marginal found{0, 0, 0};
  for (const Weighed& group : layer_->groups)
    if (automaton_.has_token(group.group, token))
      found.prob +=
          group_mass_[group.group] *
          std::exp((place_->token < 0 ? weigh(token) : Weight::one()).ratio(group.weight, slope_));
  if (!with_all) return found;
  for (const WeighedClass& each : layer_->classes) {
    classes_[each.number] = each.sum;
    classes_[each.number].number = weighing_;
  }
  for (const Weighed& group : layer_->groups)
    for (const int32_t number : automaton_.classes_of(group.group))
      class_mass_[number] += group_mass_[group.group] *
                             std::exp(weigh_class(number).weight.ratio(group.weight, slope_));
  double best = 0, second = 0;
  const auto see = [&](double prob) {
    if (prob > best)
      second = std::exchange(best, prob);
    else
      second = std::max(second, prob);
  };
  for (const WeighedClass& each : layer_->classes) {
    const double mass = std::exchange(class_mass_[each.number], 0);
    if (mass == 0) continue;
    const double largest = mass / each.sum.total;  // the probability of the class's best token
    see(largest), see(largest * each.sum.second);
    if (largest > 0) found.entropy += mass * std::log(largest) + largest * each.sum.product;
  }
  found.margin = best - second;
  return found;
}

bool Texts::sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
                const Sampling& sampling) {
  ways_.meet(state, places);
  is_exact_ = !rounded_.sum(state, places, ends, sampling, ways_, sampler_) ||
              !(std::fabs(rounded_.total().log) < kLargestRounded);
  return !is_exact_ || exact_.sum(state, places, ends, sampling, ways_, sampler_);
}

void Texts::draw(const DrawKey& key, std::vector<int32_t>& tokens) {
  is_exact_ ? exact_.draw(key, ways_, tokens) : rounded_.draw(key, ways_, tokens);
}

void Texts::find_marginals(const std::vector<int32_t>& tokens, bool with_all,
                           std::vector<Marginal>& marginals) {
  is_exact_ ? exact_.find_marginals(tokens, with_all, ways_, marginals)
            : rounded_.find_marginals(tokens, with_all, ways_, marginals);
}

void Texts::find_visits(std::vector<double>& visits, std::vector<double>& last) {
  is_exact_ ? exact_.find_visits(ways_, visits, last) : rounded_.find_visits(ways_, visits, last);
}

}  // namespace dlm
