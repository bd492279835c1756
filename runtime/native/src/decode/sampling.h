// Draws a token at random from l, the logits of one position. The probabilities are softmax(l / T),
// where T is the temperature.
//
// The Gumbel method gives each token a uniform random number u, and draws the token with the
// largest l/T - ln(-ln u) (Gumbel, 1954; also in LLaDA's loop, arXiv:2502.09992). The computation
// uses fp64. u depends only on the seed, step, position and token. So a request draws the same
// token on any engine, with any number of threads, and in any batch. Engines compute slightly
// different logits, but a small change of the logits rarely changes the drawn token.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/random.h"
#include "engines/draws.h"

namespace dlm {

// Finds the token with the largest sum of log weight and random noise. The caller passes every
// token to `see` or `see_row`. There must be at least one token.
class Winner {
 public:
  explicit Winner(const DrawKey& key) : key_(key) {}

  void see(int32_t token, double log_weight);
  // Makes later calls of `see` faster for tokens below vocab_size. `spare` is scratch memory, and
  // must outlive this object.
  void prepare(int32_t vocab_size, std::vector<float>& spare);
  // Calls `see` for the tokens from `first` to `last` - 1. The log weight of a token is
  // (logits[token] - best) / temperature. `best` must not be smaller than any of these logits.
  void see_row(const float* logits, int32_t first, int32_t last, float best, double temperature);
  int32_t token() const { return token_; }

 private:
  double uniform(int32_t token);
  Words words_of(int32_t pair) const;
  void find_spare(int32_t first, int32_t count, float* spare) const;

  const DrawKey key_;
  Words words_{};
  int32_t pair_ = -1, token_ = 0;
  // For each token, a lower bound of 1 - u, where u is the token's random number. NULL if prepare()
  // was not called.
  const float* spare_ = nullptr;
  double best_ = -std::numeric_limits<double>::infinity(),
         scale_ = std::numeric_limits<double>::infinity();
};

// The last token of a row that is not cut. The tokens of the row are sorted by descending logit,
// and tokens with equal logits by ascending id. By default, no token is cut.
struct Cut {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t token = std::numeric_limits<int32_t>::max();

  bool is_one() const { return token < std::numeric_limits<int32_t>::max(); }

  bool keeps(float other_logit, int32_t other) const {
    return other_logit > logit || (other_logit == logit && other <= token);
  }
};

// Draws tokens from one row of logits [vocab_size]. Never draws the token `left_out`. The object
// owns the scratch memory that it needs.
class Sampler {
 public:
  // Draws a token. If a logit is NaN or +inf, or if all logits are -inf, all fields except the
  // token are NaN. Otherwise, only the fields that `told` selects are valid.
  Draw draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling,
            const DrawKey& key, Told told);

  // Finds the last token of a row that top_k and top_p do not cut. If a logit of the row is NaN or
  // +inf, or if all logits are -inf, no token is cut.
  Cut find_cut(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling);

 private:
  // A row's logits minus its best logit, divided by the temperature.
  struct Tempered {
    const float* logits;
    int32_t best;
    double temperature;

    double operator()(int32_t token) const {
      return (static_cast<double>(logits[token]) - static_cast<double>(logits[best])) / temperature;
    }
  };

  void temper(const Tempered& tempered, int32_t vocab_size, int32_t left_out);
  void cut(const float* logits, const Sampling& sampling);
  void keep_best(const float* logits, int32_t top_k);

  std::vector<double> weights_;  // [V], the weights exp((logit - best logit) / temperature)
  double total_ = 0;             // sum of weights_
  std::vector<int32_t> kept_;    // the tokens that cut() keeps; unused if it keeps all
};

}  // namespace dlm
