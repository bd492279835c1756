// A token drawn from a row of logits.
//
// The log form: the largest of l/T - ln(-ln u) over the tokens, in fp64, is a draw from softmax(l/T) (Gumbel, 1954; LLaDA's loop,
// arXiv:2502.09992, writes it so). u is a pure function of seed, step, position and token, so that a draw is the same on any
// engine, with any number of threads and in any batch, and a change of the logits changes few of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dlm {

// What is drawn from: the `top_k` best tokens (0: all), of which as few of the best as have a probability of more than top_p
// together, at a temperature above 0. Both cuts are of the tempered distribution.
struct Sampling {
  double temperature, top_p;
  int32_t top_k;
  uint64_t seed;
};

// The draw's place in the random numbers: one a request, a pass and a position of the canvas.
struct Place {
  uint32_t step, position;
};

// A draw, and the distribution that it is from. Not finite where a logit is none.
struct Draw {
  int32_t token;
  double prob;             // of the token
  double margin, entropy;  // of the distribution: p1 - p2, sum p ln p
};

// Draws a token from logits [vocab_size] other than `left_out`, of which there is one at least. Holds the memory that it takes.
class Sampler {
 public:
  // The draw's entropy is of no meaning without `with_entropy`.
  Draw draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling, Place place, bool with_entropy);

 private:
  void cut(const float* logits, const Sampling& sampling, double total);

  std::vector<double> weights_;  // [V], exp((l - best) / T)
  std::vector<int32_t> kept_;    // the tokens that are drawn from; unused where nothing is cut
};

}  // namespace dlm
