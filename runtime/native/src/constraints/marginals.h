// The distribution over all texts of a constraint at some positions of a canvas: samples, and the
// marginals of tokens. A text's probability is proportional to the product of its tokens'.
//
// Sums over the rest of the text run from the last position back, and sampling runs forward
// (forward filtering, backward sampling; Carter and Kohn, 1994, with directions swapped). So a
// sample has exactly the distribution of the product of the tempered rows, restricted to the
// constraint. Only texts with the fewest ruled-out tokens (logit -inf) are drawn, and among those
// only texts with the fewest tokens that top_k and top_p cut. A row uses the same noise as without
// a constraint (decode/sampling.h).
//
// Sums are logarithms in double. If every text has a ruled-out or cut token, or the logarithms are
// large (temperatures near 0, huge logits), they are computed again from exact sums of logits
// (decode/exact_sum.h). So some legal token always has a share of its position.
// tests/constrained_reference.py implements the same in exact arithmetic.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"
#include "decode/exact_sum.h"
#include "decode/sampling.h"

namespace dlm {

// The probability of a position's token over all texts, and p1 - p2 and sum p ln p of the position.
struct Marginal {
  double prob, margin, entropy;
};

// The log weight of a set of texts, in double. Texts with a ruled-out or cut token weigh 0.
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
  // The logarithm of this divided by `other`. slope: 1 / temperature.
  double ratio(const RoundedWeight& other, double) const { return log - other.log; }
};

// The same, exactly: exp(sum * slope + rest), over the texts with the fewest avoided tokens.
struct ExactTexts {
  ExactWeight logits = ExactWeight::never();
  double rest = 0;  // stays small: the logarithm of a number of about equally likely texts

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

// The implementation of `Texts` for one kind of weights.
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
  // The sum of the token weights of a class or group at a place.
  struct Sum {
    Weight weight;
    int32_t number;  // of the place's weighing, see weighing_
  };
  struct Weighed {
    int32_t group;
    Weight weight;
  };
  // The results at a place.
  struct Layer {
    std::vector<Weight> ahead;    // by visited state: the sum over all paths to the end
    std::vector<Weighed> groups;  // used by these paths
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
  std::vector<Layer> layers_;     // by place, plus one after the last
  const Place* place_ = nullptr;  // the place being weighed; layer_ is its layer
  Layer* layer_ = nullptr;
  float base_ = 0;    // subtracted from its logits
  double slope_ = 1;  // the factor for differences of logits
  int32_t weighing_ = 0;
  std::vector<Sum> classes_, groups_;
  std::vector<float> spare_;                // scratch of a draw's Winner
  std::vector<Weight> terms_;               // by edge of a state
  std::vector<double> shares_;              // by edge of a state
  std::vector<Weight> ahead_;               // by state, after the place
  std::vector<double> mass_, mass_behind_;  // by state: its probability before, after the place
  std::vector<double> group_mass_, class_mass_;  // the probability of each at the place
};

class Texts {
 public:
  // left_out: the mask token, which no text contains.
  Texts(const Automaton& automaton, int32_t left_out)
      : ways_(automaton), rounded_(automaton, left_out), exact_(automaton, left_out) {}

  // Sums over all paths from `state` to a state of `ends` (1 or 0 per state); false if there is no
  // path. Call it before the functions below. Without logits, tokens are equally likely.
  bool sum(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
           const Sampling& sampling);

  // Draws one text, one token per place. The first place is at key's position.
  void draw(const DrawKey& key, std::vector<int32_t>& tokens);

  // The probability of each place's token. Fills margins and entropies only if `with_all`.
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
