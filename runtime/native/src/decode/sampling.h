// A token drawn from a row of logits.
//
// The log form: the largest of l/T - ln(-ln u) over the tokens, in fp64, is a draw from
// softmax(l/T) (Gumbel, 1954; LLaDA's loop, arXiv:2502.09992, writes it so). u is a pure function
// of seed, step, position and token, so that a draw is the same on any engine, with any number of
// threads and in any batch, and a change of the logits changes few of them.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace dlm {

// What is drawn from, at a temperature above 0: the `top_k` best tokens (0: all), and of those the
// fewest best ones with a probability of more than top_p together, both of the tempered softmax.
struct Sampling {
  double temperature, top_p;
  int32_t top_k;
};

// Whose the random numbers of a draw are: one a request, a pass and a position of the canvas.
struct DrawKey {
  uint64_t seed;
  uint32_t step, position;
};

// A token this far behind the best tempered logit cannot win: noise is in -ln(53 ln 2)..53 ln 2.
constexpr double kFarthest = 42;

// Of the tokens that it is shown, at least one, the one with the largest noise plus log weight.
class Winner {
 public:
  explicit Winner(const DrawKey& key) : key_(key) {}

  void see(int32_t token, double log_weight);
  // Makes `see` quicker for most tokens below vocab_size, if many are shown. `spare` outlives it.
  void prepare(int32_t vocab_size, std::vector<float>& spare);
  // Sees tokens [first, last) of log weights (logits[token] - best) / temperature, none above 0.
  void see_row(const float* logits, int32_t first, int32_t last, float best, double temperature);
  int32_t token() const { return token_; }

 private:
  double uniform(int32_t token);
  std::array<uint32_t, 4> words_of(int32_t pair) const;
  void find_spare(int32_t first, int32_t count, float* spare) const;

  const DrawKey key_;
  std::array<uint32_t, 4> words_{};
  int32_t pair_ = -1, token_ = 0;
  const float* spare_ = nullptr;  // by token, no more than 1 - u; NULL: unknown
  double best_ = -std::numeric_limits<double>::infinity(),
         scale_ = std::numeric_limits<double>::infinity();
};

// The last token that is drawn from, by descending logits, then ids. The default keeps all.
struct Cut {
  float logit = -std::numeric_limits<float>::infinity();
  int32_t token = std::numeric_limits<int32_t>::max();

  bool is_one() const { return token < std::numeric_limits<int32_t>::max(); }

  bool keeps(float other_logit, int32_t other) const {
    return other_logit > logit || (other_logit == logit && other <= token);
  }
};

// A draw and its distribution. All numbers are NaN if a logit is NaN or +infinity.
struct Draw {
  int32_t token;
  double prob;             // of the token
  double margin, entropy;  // of the distribution: p1 - p2, sum p ln p
};

// What a draw tells: its token and whether logits are finite, also the distribution, also entropy.
enum class Told { token, distribution, entropy };

// Draws a token other than `left_out` from logits [vocab_size]. Holds the memory that it needs.
class Sampler {
 public:
  // What is not told is of no meaning where it is finite.
  Draw draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling,
            const DrawKey& key, Told told);

  // Where top_k and top_p cut such a row. A row without finite logits, or with NaN, is not cut.
  Cut find_cut(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling);

 private:
  // A row's logits, tempered and counted from the best one's.
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
  double total_ = 0;             // of these
  std::vector<int32_t> kept_;    // the tokens that are drawn from; unused where nothing is cut
};

}  // namespace dlm
