// Draws a token from a row of logits.
//
// A draw from softmax(l/T) is the token with the largest l/T - ln(-ln u), computed in fp64 (Gumbel,
// 1954; LLaDA's loop, arXiv:2502.09992). u is a pure function of seed, step, position and token. So
// a draw is the same on any engine, with any number of threads and in any batch, and a small
// change of the logits changes few draws.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace dlm {

// The distribution at a temperature above 0: the `top_k` most likely tokens (0: all), cut to the
// shortest list with a probability of more than top_p. Both use the tempered softmax.
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

// A token this far below the best tempered logit cannot win: noise is in -ln(53 ln 2)..53 ln 2.
constexpr double kFarthest = 42;

// Finds the token with the largest sum of noise and log weight, among the tokens passed to `see`.
// Pass at least one token.
class Winner {
 public:
  explicit Winner(const DrawKey& key) : key_(key) {}

  void see(int32_t token, double log_weight);
  // Speeds up `see` for tokens below vocab_size, if it sees many. `spare` must outlive it.
  void prepare(int32_t vocab_size, std::vector<float>& spare);
  // Sees tokens [first, last) with log weights (logits[token] - best) / temperature, all at most 0.
  void see_row(const float* logits, int32_t first, int32_t last, float best, double temperature);
  int32_t token() const { return token_; }

 private:
  double uniform(int32_t token);
  std::array<uint32_t, 4> words_of(int32_t pair) const;
  void find_spare(int32_t first, int32_t count, float* spare) const;

  const DrawKey key_;
  std::array<uint32_t, 4> words_{};
  int32_t pair_ = -1, token_ = 0;
  const float* spare_ = nullptr;  // by token, at most 1 - u; NULL: unknown
  double best_ = -std::numeric_limits<double>::infinity(),
         scale_ = std::numeric_limits<double>::infinity();
};

// The last token that may be drawn, ordered by descending logit, then id. The default keeps all.
struct Cut {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t token = std::numeric_limits<int32_t>::max();

  bool is_one() const { return token < std::numeric_limits<int32_t>::max(); }

  bool keeps(float other_logit, int32_t other) const {
    return other_logit > logit || (other_logit == logit && other <= token);
  }
};

// A draw and its distribution. All numbers are NaN if a logit is NaN or +inf.
struct Draw {
  int32_t token;
  double prob;             // of the token
  double margin, entropy;  // of the distribution: p1 - p2, sum p ln p
};

// The fields that a draw computes. `token`: only the token. `distribution`: also prob and
// margin. `entropy`: also the entropy. All of them report bad logits by NaN.
enum class Told { token, distribution, entropy };

// Draws tokens other than `left_out` from logits [vocab_size]. Owns its scratch memory.
class Sampler {
 public:
  // If a logit is NaN or +inf, or if all are -inf, all fields but the token are NaN. Otherwise,
  // fields that `told` does not request are undefined.
  Draw draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling,
            const DrawKey& key, Told told);

  // Where top_k and top_p cut a row. A row with a NaN or without finite logits is not cut.
  Cut find_cut(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling);

 private:
  // A row's logits minus the best one, divided by the temperature.
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
  double total_ = 0;             // their sum
  std::vector<int32_t> kept_;    // the tokens that may be drawn; unused if nothing is cut
};

}  // namespace dlm
