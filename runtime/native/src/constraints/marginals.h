// Defines Texts, the probability distribution over all texts that a constraint accepts at some
// positions of a canvas. A text's probability is proportional to the product of the probabilities
// of its tokens. The class can draw texts from this distribution, and compute the marginal
// probabilities of tokens.
//
// The algorithm is forward filtering, backward sampling (Carter and Kohn, 1994), with both
// directions reversed. First, the algorithm goes from the last position to the first. The weight of
// a text is the product of the probabilities of its tokens. At each position, the algorithm adds up
// the weights of all ways to continue the text. Then it goes from the first position to the last,
// and draws one token at each position. This method is exact: the probability of drawing a text is
// the text's probability at the given temperature, divided by the total probability of all texts
// that the constraint accepts.
//
// A ruled-out token is a token with the logit -inf. A cut token is a token that top_k or top_p
// removes. Only the texts with the fewest ruled-out tokens can be drawn, and among these, only the
// texts with the fewest cut tokens. Each position uses the same random numbers as in a request
// without a constraint (decode/sampling.h).
//
// The sums are stored as logarithms in double. In two cases, the code computes the sums again with
// exact arithmetic (decode/exact_sum.h): if every text contains a ruled-out or cut token, or if the
// logarithms are large. The logarithms are large if the temperature is near 0 or the logits are
// huge. With exact arithmetic, at least one legal token has a probability above 0 at every
// position. tests/constrained_reference.py implements the same algorithm in exact arithmetic.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"
#include "decode/exact_sum.h"
#include "decode/sampling.h"

namespace dlm {

// `prob` is the marginal probability of one token at one position, over all texts. `margin` is the
// largest marginal probability of any token at this position, minus the second largest. `entropy`
// is the sum of p ln p over all tokens, where p is the token's marginal probability.
struct Marginal {
  double prob, margin, entropy;
};

// The total weight of a set of texts, stored as a logarithm in double. A text that contains a
// ruled-out or cut token has the weight 0.
struct RoundedWeight {
  double log = -std::numeric_limits<double>::infinity();

  static RoundedWeight of(float logit, float base, bool is_cut, double slope) {
    if (is_cut || is_ruled_out(logit)) return {};
    return {(static_cast<double>(logit) - static_cast<double>(base)) * slope};
  }
  static RoundedWeight one() { return {0}; }
  bool is_never() const { return !(log > -std::numeric_limits<double>::infinity()); }
  RoundedWeight times(const RoundedWeight& other) const { return {log + other.log}; }
  RoundedWeight times(double factor_log) const { return {log + factor_log}; }
  // Returns log(this weight / other weight). Ignores the second argument, which is 1 / temperature,
  // because `log` already includes this factor.
  double ratio(const RoundedWeight& other, double) const { return log - other.log; }
};

// The exact total weight of a set of texts: exp(sum * slope + rest), where slope is 1 /
// temperature. An avoided token is a ruled-out or cut token. The sum includes only the texts that
// contain the fewest avoided tokens.
struct ExactTexts {
  ExactWeight logits = ExactWeight::never();
  // The logarithm of the number of texts that are about as likely as the most likely text. `rest`
  // is small.
  double rest = 0;

  static ExactTexts of(float logit, float base, bool is_cut, double) {
    if (is_ruled_out(logit)) return {{ExactWeight::kRuledOut, {}}, 0};
    return {{is_cut ? ExactWeight::kCut : 0, ExactSum(logit) - ExactSum(base)}, 0};
  }
  static ExactTexts one() { return {{}, 0}; }
  bool is_never() const { return logits.is_never(); }
  ExactTexts times(const ExactTexts& other) const {
    return is_never() || other.is_never() ? ExactTexts{}
                                          : ExactTexts{logits + other.logits, rest + other.rest};
  }
  ExactTexts times(double factor_log) const { return {logits, rest + factor_log}; }
  double ratio(const ExactTexts& other, double slope) const {
    if (logits.avoided != other.logits.avoided)
      return logits.avoided > other.logits.avoided ? -std::numeric_limits<double>::infinity()
                                                   : std::numeric_limits<double>::infinity();
    return (logits.sum - other.logits.sum).value() * slope + (rest - other.rest);
  }
};

// Implements the class Texts for one type of weights.
template <class Weight>
class TextSums {
 public:
  TextSums(const Automaton& automaton, int32_t left_out)
      : automaton_(automaton), left_out_(left_out) {}

  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
           const Sampling& sampling, Ways& ways, Sampler& sampler);
  const Weight& total() const { return layers_.front().ahead.front(); }
  void draw(const DrawKey& key, const Ways& ways, std::vector<int32_t>& tokens);
  void find_marginals(const std::vector<int32_t>& tokens, bool with_all, const Ways& ways,
                      std::vector<Marginal>& marginals);
  void find_visits(const Ways& ways, std::vector<double>& visits, std::vector<double>& last);

 private:
  // The sum of the weights of all tokens of a class or group, at the current place (position of the
  // text).
  struct Sum {
    Weight weight;
    int32_t number = 0;  // the value of weighing_ when this sum was computed
    // The weights of the tokens of a class divided by the largest of them are shares. `total` is
    // the sum of the shares, `second` is the second largest share, and `product` is the sum of
    // s ln s over all shares s.
    double total = 0, second = 0, product = 0;
  };
  struct WeighedClass {
    int32_t number;
    Sum sum;
  };
  struct Weighed {
    int32_t group;
    Weight weight;
  };
  // The sums for one place, which is one position of the text.
  struct Layer {
    // For each visited state: the total weight of all paths from the state to the end.
    std::vector<Weight> ahead;
    // The groups and classes that occur on the paths of `ahead`.
    std::vector<Weighed> groups;
    std::vector<WeighedClass> classes;
    Cut cut;
  };
  class Total;

  void weigh_place(size_t place);
  Weight weigh(int32_t token) const;
  const Sum& weigh_class(int32_t number);
  Sum sum_of(const View<int32_t>& tokens) const;
  Sum sum_of_whole(const View<int32_t>& tokens) const;
  static Sum sum_of_equal(const Weight& weight, size_t count);
  Weight weigh_group(int32_t group);
  void restore_ahead(const Ways& ways, size_t place);
  void clear_ahead(const Ways& ways, size_t place);
  size_t count_tokens(int32_t state) const;
  int32_t draw_token(int32_t state, const Weight& all, const DrawKey& key);
  int32_t next_state(int32_t state, int32_t token) const;
  void spread(double mass, int32_t state, const Weight& all);
  template <class See>
  void each_place(const Ways& ways, See see);
  Marginal marginal(int32_t token, bool with_all);

  const Automaton& automaton_;
  const int32_t left_out_;
  Sampling sampling_{};
  int32_t state_ = 0;
  std::vector<Place> places_;
  std::vector<Layer> layers_;  // one layer per place, and one more after the last place
  // The place (position of the text) that is being processed, and the layer that contains the sums
  // of this place.
  const Place* place_ = nullptr;
  Layer* layer_ = nullptr;
  float base_ = 0;    // the number that the code subtracts from each logit of the current place
  double slope_ = 1;  // 1 / temperature
  int32_t weighing_ = 0;
  std::vector<Sum> classes_, groups_;
  std::vector<float> spare_;   // scratch memory for Winner in draw_token()
  std::vector<Weight> terms_;  // for each edge of the current state: its weight
  // For each edge of the current state: the probability that a text in this state continues along
  // the edge.
  std::vector<double> shares_;
  // For each state after the current place: the total weight of all paths from the state to the
  // end.
  std::vector<Weight> ahead_;
  // For each state: the probability that the text is in this state before the current place (mass_)
  // or after the current place (mass_behind_).
  std::vector<double> mass_, mass_behind_;
  // For each group and each class of tokens (see automaton.h): the probability that the token at
  // the current place is in this group or class.
  std::vector<double> group_mass_, class_mass_;
};

class Texts {
 public:
  // `left_out` is the mask token, which no text contains.
  Texts(const Automaton& automaton, int32_t left_out)
      : ways_(automaton), rounded_(automaton, left_out), exact_(automaton, left_out) {}

  // Computes the total weight of all paths from `state` to an end state. `ends` contains a 1 for
  // each end state, and a 0 for every other state. Returns false if there is no path. Call this
  // function before the functions below. At a place without logits, all tokens are equally likely.
  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
           const Sampling& sampling);

  // Draws one text, with one token per place. `key` contains the canvas position of the first
  // place.
  void draw(const DrawKey& key, std::vector<int32_t>& tokens);

  // For each place, computes the marginal probability of the token that `tokens` contains for the
  // place. Fills margins and entropies only if `with_all` is true.
  void find_marginals(const std::vector<int32_t>& tokens, bool with_all,
                      std::vector<Marginal>& marginals);

  // For each state, sets `visits` to the expected number of times that a text arrives in the state.
  // Sets `last` to the probability that a text is in the state after the last place.
  void find_visits(std::vector<double>& visits, std::vector<double>& last);

 private:
  Ways ways_;
  Sampler sampler_;
  bool is_exact_ = false;
  TextSums<RoundedWeight> rounded_;
  TextSums<ExactTexts> exact_;
};

}  // namespace dlm
