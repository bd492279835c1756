// All texts of a constraint over some positions of a canvas, each as likely as its tokens are
// together: draws of one, and how likely a token is at a position among them.
//
// Sums over the rest of the text are made from the last position on, and a draw goes forward over
// them (forward filtering and backward sampling, Carter and Kohn, 1994, in the other direction). So
// a draw is distributed exactly as the product of the tempered rows, restricted to the texts of the
// constraint. Of these, only texts with the fewest ruled-out tokens (logit -inf) are drawn, and
// among those only texts with the fewest tokens that top_k and top_p cut. A row draws with the same
// noise as without a constraint (decode/sampling.h).
//
// Sums are logarithms in double. Where no text is free of ruled-out and cut tokens, or the
// logarithms are large (temperatures near 0, huge logits), all is done again with exact sums of
// logits (decode/exact_sum.h). So some legal token always has a share of its position.
// exporter/dlm_export/network/constrained.py implements the same in exact arithmetic.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"
#include "decode/exact_sum.h"
#include "decode/sampling.h"

namespace dlm {

// The probability of a position's token among all texts; and of its tokens p1 - p2 and sum p ln p.
struct Marginal {
  double prob, margin, entropy;
};

// The log weight of some texts, in double. A text with a ruled-out or cut token weighs nothing.
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
  // The logarithm of this by `other`. slope: 1 / temperature.
  double ratio(const RoundedWeight& other, double) const { return log - other.log; }
};

// The same without rounding: exp(sum * slope + rest), of the texts with the fewest avoided tokens.
struct ExactTexts {
  ExactWeight logits = ExactWeight::never();
  double rest = 0;  // stays small: the logarithm of numbers of texts that are about as likely

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

// What `Texts` does, with one kind of weights.
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
  using Tokens = std::vector<int32_t>::const_iterator;
  // Of a class or a group at a place: the sum of its tokens' weights.
  struct Sum {
    Weight weight;
    int32_t number;  // of the weighing that it is of
  };
  struct Weighed {
    int32_t group;
    Weight weight;
  };
  // Of a place.
  struct Layer {
    std::vector<Weight> ahead;    // by state that is met, the sum over all ways on
    std::vector<Weighed> groups;  // that ways lead through
    Cut cut;
  };
  class Total;

  void weigh_place(size_t place);
  Weight weigh(int32_t token) const;
  Weight weigh_class(int32_t number);
  Weight weigh_whole(Tokens first, Tokens last) const;
  Weight weigh_group(int32_t group);
  int64_t count_tokens(int32_t state) const;
  int32_t draw_token(int32_t state, const Weight& all, const DrawKey& key);
  int32_t next_state(int32_t state, int32_t token) const;
  void spread(double mass, int32_t state, const Weight& all);
  Marginal marginal(int32_t token, bool with_all);
  template <class See>
  void each_token(int32_t group, See see) const;

  const Automaton& automaton_;
  const int32_t left_out_;
  Sampling sampling_{};
  int32_t state_ = 0;
  std::vector<Place> places_;
  std::vector<Layer> layers_;     // by place, and one behind the last
  const Place* place_ = nullptr;  // that is being weighed, with its layer
  Layer* layer_ = nullptr;
  float base_ = 0;    // what its logits are compared with
  double slope_ = 1;  // what differences of logits are multiplied by
  int32_t weighing_ = 0;
  std::vector<Sum> classes_, groups_;
  std::vector<float> spare_;    // a draw's Winner's
  std::vector<Weight> terms_;   // by edge of a state
  std::vector<double> shares_;  // by edge of a state
  std::vector<Weight> ahead_;   // by state, behind the place
  std::vector<double> mass_,
      mass_behind_;  // by state: how likely it is before the place, and behind it
  std::vector<double> group_mass_, class_mass_;  // how likely each is at the place
};

class Texts {
 public:
  // left_out: the mask token, which no text has.
  Texts(const Automaton& automaton, int32_t left_out)
      : ways_(automaton), rounded_(automaton, left_out), exact_(automaton, left_out) {}

  // Sums over all ways from `state` to a state of `ends` (1 or 0 a state); false if there is none.
  // Must be called before the functions below. Without logits a place's tokens are equally likely.
  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
           const Sampling& sampling);

  // Draws one text, a token a place; the first is at key's position.
  void draw(const DrawKey& key, std::vector<int32_t>& tokens);

  // How likely each place's token is. Margins and entropies are only filled if `with_all`.
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
