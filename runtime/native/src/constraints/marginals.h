// The distribution over all texts that a constraint accepts at some positions of a canvas. `Texts`
// draws samples from it, and computes the marginal probabilities of tokens. The probability of a
// text is proportional to the product of the probabilities of its tokens.
//
// The algorithm is forward filtering, backward sampling (Carter and Kohn, 1994), with the
// directions swapped: sums over the rest of the text are computed from the last position back, and
// then samples are drawn from the first position on. So samples have exactly the distribution of
// the product of the rows at the temperature, restricted to the constraint. Only texts with the
// fewest ruled-out tokens (logit -inf) are drawn. Among these, only texts with the fewest tokens
// that top_k and top_p cut are drawn. A row uses the same noise as without a constraint
// (decode/sampling.h).
//
// The sums are stored as logarithms in double. In some cases they are computed again from exact
// sums of logits (decode/exact_sum.h): if every text has a ruled-out or cut token, or if the
// logarithms are large (temperatures near 0, huge logits). So at every position, some legal token
// has a probability above 0. tests/constrained_reference.py implements the same in exact
// arithmetic.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"
#include "decode/exact_sum.h"
#include "decode/sampling.h"

namespace dlm {

// The probability of one position's token over all texts. margin (p1 - p2) and entropy (sum p ln p)
// describe the distribution of the position.
struct Marginal {
  double prob, margin, entropy;
};

// The logarithm of the weight of a set of texts, in double. A text with a ruled-out or cut token
// weighs 0.
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
  // The logarithm of this weight divided by `other`. The second argument is 1 / temperature.
  double ratio(const RoundedWeight& other, double) const { return log - other.log; }
};

// The exact weight of a set of texts: exp(sum * slope + rest), where slope is 1 / temperature. Only
// the texts of the set with the fewest avoided tokens count.
struct ExactTexts {
  ExactWeight logits = ExactWeight::never();
  double rest = 0;  // small: logarithm of a number of about equally likely texts

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

// Implements `Texts` for one type of weights.
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

 private:
  // The sum of the token weights of a class or group at the current place.
  struct Sum {
    Weight weight;
    int32_t number;  // value of weighing_ when it was computed
  };
  struct Weighed {
    int32_t group;
    Weight weight;
  };
  // The results for one place.
  struct Layer {
    std::vector<Weight> ahead;    // by visited state: the sum over all paths to the end
    std::vector<Weighed> groups;  // the groups that these paths use
    Cut cut;
  };
  class Total;

  void weigh_place(size_t place);
  Weight weigh(int32_t token) const;
  Weight weigh_class(int32_t number);
  Weight weigh_whole(const View<int32_t>& tokens) const;
  Weight weigh_group(int32_t group);
  void restore_ahead(const Ways& ways, size_t place);
  void clear_ahead(const Ways& ways, size_t place);
  size_t count_tokens(int32_t state) const;
  int32_t draw_token(int32_t state, const Weight& all, const DrawKey& key);
  int32_t next_state(int32_t state, int32_t token) const;
  void spread(double mass, int32_t state, const Weight& all);
  Marginal marginal(int32_t token, bool with_all);

  const Automaton& automaton_;
  const int32_t left_out_;
  Sampling sampling_{};
  int32_t state_ = 0;
  std::vector<Place> places_;
  std::vector<Layer> layers_;  // by place, plus one after the last
  // The current place. layer_ is its layer.
  const Place* place_ = nullptr;
  Layer* layer_ = nullptr;
  float base_ = 0;    // subtracted from the logits of the current place
  double slope_ = 1;  // 1 / temperature
  int32_t weighing_ = 0;
  std::vector<Sum> classes_, groups_;
  std::vector<float> spare_;    // scratch memory of a draw's Winner
  std::vector<Weight> terms_;   // by edge of the current state
  std::vector<double> shares_;  // by edge of the current state
  std::vector<Weight> ahead_;   // by state after the current place
  // By state: the probability of being in it before the current place, and after.
  std::vector<double> mass_, mass_behind_;
  // The probability of each group and class at the current place.
  std::vector<double> group_mass_, class_mass_;
};

class Texts {
 public:
  // `left_out` is the mask token, which no text contains.
  Texts(const Automaton& automaton, int32_t left_out)
      : ways_(automaton), rounded_(automaton, left_out), exact_(automaton, left_out) {}

  // Computes the sums over all paths from `state` to the states in `ends`, which has a 1 or 0 for
  // each state. Returns false if there is no path. Call it before the functions below. At a place
  // without logits, all tokens are equally likely.
  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
           const Sampling& sampling);

  // Draws one text, with one token per place. The first place is at the canvas position in `key`.
  void draw(const DrawKey& key, std::vector<int32_t>& tokens);

  // Computes the marginal of the token at each place. Fills margins and entropies only if
  // `with_all` is set.
  void find_marginals(const std::vector<int32_t>& tokens, bool with_all,
                      std::vector<Marginal>& marginals);

 private:
  Ways ways_;
  Sampler sampler_;
  bool is_exact_ = false;
  TextSums<RoundedWeight> rounded_;
  TextSums<ExactTexts> exact_;
};

}  // namespace dlm
