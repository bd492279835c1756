// Draws a token from a row of logits, that is, from the distribution softmax(l / T).
//
// The Gumbel method draws the token with the largest l/T - ln(-ln u), where u is a uniform random
// number for each token (Gumbel, 1954; also in LLaDA's loop, arXiv:2502.09992). It is computed in
// fp64. u is a pure function of seed, step, position and token. So a draw has the same result on
// any engine, with any number of threads, and in any batch. A small change of the logits changes
// few draws.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace dlm {

// How to draw at a temperature above 0. Only the `top_k` most likely tokens can be drawn (0: all).
// Then only the most likely of these can be drawn, as few as have a total probability of more than
// top_p. The probabilities are those at the temperature.
struct Sampling {
  double temperature, top_p;
  int32_t top_k;
};

// The random numbers of a draw depend only on this key: the request's seed, the pass, and the
// canvas position.
struct DrawKey {
  uint64_t seed;
  uint32_t step, position;
};

// A token whose logit, divided by the temperature, is this far below the best one cannot win. The
// noise is always between -ln(53 ln 2) and 53 ln 2.
constexpr double kFarthest = 42;

// Finds the token with the largest sum of noise and log weight. The caller passes all tokens to
// `see` or `see_row`, and at least one token.
class Winner {
 public:
  explicit Winner(const DrawKey& key) : key_(key) {}

  void see(int32_t token, double log_weight);
  // Prepares for many calls of `see` with tokens below vocab_size, which makes them faster. `spare`
  // is scratch memory that must outlive this object.
  void prepare(int32_t vocab_size, std::vector<float>& spare);
  // Calls `see` for the tokens [first, last), with the log weights (logits[token] - best) /
  // temperature. `best` must be at least as large as all these logits.
  void see_row(const float* logits, int32_t first, int32_t last, float best, double temperature);
  int32_t token() const { return token_; }

 private:
  double uniform(int32_t token);
  std::array<uint32_t, 4> words_of(int32_t pair) const;
  void find_spare(int32_t first, int32_t count, float* spare) const;

  const DrawKey key_;
  std::array<uint32_t, 4> words_{};
  int32_t pair_ = -1, token_ = 0;
  const float* spare_ = nullptr;  // by token: a number of at most 1 - u; NULL: not prepared
  double best_ = -std::numeric_limits<double>::infinity(),
         scale_ = std::numeric_limits<double>::infinity();
};

// Where top_k and top_p cut a row. The tokens are ordered by descending logit, then by id. This is
// the last token that may be drawn. By default, no token is cut.
struct Cut {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t token = std::numeric_limits<int32_t>::max();

  bool is_one() const { return token < std::numeric_limits<int32_t>::max(); }

  bool keeps(float other_logit, int32_t other) const {
    return other_logit > logit || (other_logit == logit && other <= token);
  }
};

// A drawn token, and measures of its distribution. All numbers are NaN if a logit is NaN or +inf.
struct Draw {
  int32_t token;
  double prob;             // probability of the token
  double margin, entropy;  // p1 - p2 and sum p ln p of the distribution
};

// Which fields a draw computes. `token`: only the token. `distribution`: the token, prob and
// margin. `entropy`: all fields. With each of them, the numbers are NaN if a logit is NaN or +inf.
enum class Told { token, distribution, entropy };

// Draws tokens from logits [vocab_size]. It never draws the token `left_out`. The object owns the
// scratch memory that it needs.
class Sampler {
 public:
  // Draws a token. If a logit is NaN or +inf, or if all are -inf, all fields except the token are
  // NaN. Otherwise, the fields that `told` does not ask for are undefined.
  Draw draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling,
            const DrawKey& key, Told told);

  // Finds where top_k and top_p cut a row. A row that has a NaN, or no finite logit, is not cut.
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

  std::vector<double> weights_;  // [V], exp((l - best) / T)
  double total_ = 0;             // sum of weights_
  std::vector<int32_t> kept_;    // tokens that may be drawn; unused if no token is cut
};

}  // namespace dlm
